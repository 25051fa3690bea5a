"""Checkpoints in Hugging Face's layout: config.json and model.safetensors, with their tensor names.

Our parameters have the names of Hugging Face's BERT; the row of a model's family says how theirs
differ. Besides, queries, keys and values are one packed tensor here, and the vocabulary is padded
to a multiple of 8. Reading also understands the names of older files, and drops tensors that repeat
others. Anything else that is missing or unexpected is reported by name.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bert_unpad._files import replacing
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.nn.families import OWN
from bert_unpad.nn.weight_files import WEIGHTS_FILE, read_tensors

CONFIG_FILE = "config.json"

# Our tensors with one row for each token of the vocabulary, and padding rows.
VOCAB_PADDED = (
    "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.weight",
    "cls.predictions.bias",
)

logger = logging.getLogger(__name__)


class ModelWithConfig(Protocol):
    """What these functions need: the parameters of an `EncoderForPreTraining`, and its config."""

    config: EncoderConfig

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


Model = TypeVar("Model", bound=ModelWithConfig)


@dataclass(frozen=True)
class LoadReport:
    """How the tensors of a checkpoint and a model differ, by Hugging Face's names."""

    missing: tuple[str, ...]
    """Tensors of the model that the checkpoint lacks."""
    unexpected: tuple[str, ...]
    """Tensors of the checkpoint that the model does not have."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected)

    def __str__(self) -> str:
        lists = (("missing", self.missing), ("unexpected", self.unexpected))
        return "; ".join(f"{label}: {', '.join(names)}" for label, names in lists if names)


def to_hf_state_dict(model: ModelWithConfig) -> dict[str, Tensor]:
    """Returns the parameters under Hugging Face's names, as views that share memory.

    A decoder's weight that is the word embedding is left out, as in their files.
    """
    return {
        name: part
        for own_name, parameter in model.named_parameters()
        for name, part in _hf_parts(own_name, parameter.detach(), model.config).items()
    }


def load_state_dict(
    model: ModelWithConfig, tensors: Mapping[str, Tensor], strict: bool = True
) -> LoadReport:
    """Copies tensors with Hugging Face's names into the model, converting their dtype.

    Accepts the names of transformers' models with heads, of the bare model (in BERT's case without
    `bert.`), LayerNorm's older names (gamma, beta), and those of NVIDIA's DeepLearningExamples
    (dense_act). Changes the model only if every check passes.

    Args:
        model: the model to fill.
        tensors: tensors by name.
        strict: raise an error if a tensor is missing or unexpected. Otherwise missing tensors keep
            their values.

    Returns:
        The missing and unexpected tensors.

    Raises:
        ValueError: a tensor is missing or unexpected (if strict), has another shape, is not
            floating point, or the decoder is not tied to the word embedding.
    """
    report, pairs = _match(model, tensors, strict)
    for target, tensor in pairs:
        target.copy_(tensor)
    return report


def _match(
    model: ModelWithConfig, tensors: Mapping[str, Tensor], strict: bool
) -> tuple[LoadReport, list[tuple[Tensor, Tensor]]]:
    """Returns a report, and pairs of a tensor of the model and the one to copy into it."""
    targets = to_hf_state_dict(model)
    found = modern_tensors(tensors, model.config, targets)
    report = LoadReport(
        missing=tuple(sorted(targets.keys() - found.keys())),
        unexpected=tuple(sorted(found.keys() - targets.keys())),
    )
    if strict and report:
        raise ValueError(
            f"the checkpoint does not fit the model ({report}); strict=False loads the rest"
        )
    common = sorted(targets.keys() & found.keys())
    check_tensors(found, {name: targets[name].shape for name in common})
    return report, [(targets[name], found[name]) for name in common]


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Checks that the tensors named in `shapes` have these shapes and are floating point.

    Raises:
        ValueError: some do not or are not; the message names them.
    """
    wrong = [
        f"{name}: expected shape {list(shape)}, got {list(tensors[name].shape)}"
        for name, shape in shapes.items()
        if tensors[name].shape != torch.Size(shape)
    ]
    if wrong:
        raise ValueError(f"the tensors do not fit the configuration: {'; '.join(wrong)}")
    wrong = [
        f"{name}: expected floating point, got {tensors[name].dtype}"
        for name in shapes
        if not tensors[name].is_floating_point()
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def read_config(
    directory: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None
) -> EncoderConfig:
    """Reads the configuration in `directory`, with some fields replaced.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: it is not a configuration that this model supports.
        TypeError: an override is not a field of `EncoderConfig`.
    """
    config = EncoderConfig.from_json(Path(directory) / CONFIG_FILE)
    return dataclasses.replace(config, **(overrides or {}))


def load(
    make: Callable[[], Model], directory: str | os.PathLike[str], strict: bool = True
) -> Model:
    """Creates a model and fills it from model.safetensors, or from the shards that an index names.

    If not strict, missing and unexpected tensors are logged.

    Args:
        make: creates the model. It is first called on the meta device, without memory for the
            weights, to check that they fit.
        directory: folder of the files.
        strict: see `load_state_dict`.

    Raises:
        FileNotFoundError: the folder has no safetensors weights, or a shard is missing.
        ValueError: as `load_state_dict`; or a file is damaged, or the index names a file outside
            the folder.
    """
    tensors = read_tensors(Path(directory))
    with torch.device("meta"):
        outline = make()
    _match(outline, tensors, strict)
    model = make()
    report = load_state_dict(model, tensors, strict=strict)
    if report:
        logger.warning("%s: %s", directory, report)
    return model


def save(model: ModelWithConfig, directory: str | os.PathLike[str]) -> None:
    """Writes config.json and model.safetensors, which transformers' `from_pretrained` reads.

    Each file appears whole or not at all. Creates the directory if it does not exist.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.contiguous().cpu() for name, t in to_hf_state_dict(model).items()}
    with replacing(directory / WEIGHTS_FILE) as temporary:
        # transformers reads only files that name the framework they come from.
        save_file(tensors, temporary, metadata={"format": "pt"})
    config = model.config
    extra = {k: v for k, v in config.extra.items() if k != "torch_dtype"}
    if config.family is not OWN:
        extra["architectures"] = [config.family.architecture(config.heads)]
    # transformers loads the weights in this dtype.
    dtype = next(iter(model.parameters())).dtype
    extra["dtype"] = str(dtype).removeprefix("torch.")
    dataclasses.replace(config, extra=extra).to_json(directory / CONFIG_FILE)


def _hf_parts(name: str, tensor: Tensor, config: EncoderConfig) -> dict[str, Tensor]:
    """Returns views of one of our tensors under Hugging Face's names."""
    if name in VOCAB_PADDED:
        tensor = tensor[: config.vocab_size]
    found = config.family.hf_names(name, config)
    if isinstance(found, str):
        return {found: tensor}
    sizes = [tensor.shape[0] // len(found)] * len(found)
    if ".attention.self.qkv." in name:
        heads = (config.num_attention_heads, config.kv_heads, config.kv_heads)
        sizes = [count * config.head_dim for count in heads]
    return dict(zip(found, tensor.split(sizes), strict=True))


def modern_tensors(
    tensors: Mapping[str, Tensor], config: EncoderConfig, known: Collection[str]
) -> dict[str, Tensor]:
    """Returns a file's tensors by today's names, without those that repeat others.

    Args:
        tensors: by the names in the file.
        config: of the model.
        known: Hugging Face's names of the model's tensors.

    Raises:
        ValueError: a tensor that should repeat another one differs from it.
    """
    family = config.family
    bare = not any(name.startswith(f"{family.trunk}.") for name in tensors)
    found = {}
    for name, tensor in tensors.items():
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        name = name.replace(".dense_act.", ".dense.")
        if bare and f"{family.trunk}.{name}" in known:
            name = f"{family.trunk}.{name}"
        if name in known or not any(re.fullmatch(x, name) for x in family.unused):
            found[name] = tensor
    words = family.hf_names(VOCAB_PADDED[0], config)
    for name, source in family.tied.items():
        if name not in found or (source == words and not config.tie_word_embeddings):
            continue
        tensor = found.pop(name)
        if not torch.equal(tensor, found.setdefault(source, tensor)):
            raise ValueError(
                f"{name}: expected the same values as {source}; untied decoders are not supported"
            )
    # A buffer 0, 1, 2, ... in older files.
    position_ids = found.get(f"{family.trunk}.embeddings.position_ids")
    if position_ids is not None and torch.equal(
        position_ids.flatten(), torch.arange(position_ids.numel())
    ):
        del found[f"{family.trunk}.embeddings.position_ids"]
    return found
