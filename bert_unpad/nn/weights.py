"""Checkpoints in Hugging Face's layout: config.json and model.safetensors, their tensor names.

Our parameters are named as theirs, so the conversion knows only what differs: one packed tensor
for queries, keys and values, and a vocabulary padded to a multiple of 8. Names that older files
use, or that follow from other tensors, are understood. Whatever else is missing or left over is
reported by name; nothing is dropped in silence.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bert_unpad._files import replacing
from bert_unpad.nn.config import BertConfig
from bert_unpad.nn.weight_files import WEIGHTS_FILE, read_tensors

if TYPE_CHECKING:
    from bert_unpad.nn.pretraining import BertForPreTraining

__all__ = ["LoadReport", "load", "load_state_dict", "read_config", "save", "to_hf_state_dict"]

CONFIG_FILE = "config.json"

_QKV = re.compile(r"(.*\.attention\.self\.)qkv\.(weight|bias)")
_QKV_PARTS = ("query", "key", "value")
_WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
_MLM_BIAS = "cls.predictions.bias"
_VOCAB_PADDED = (_WORD_EMBEDDINGS, _MLM_BIAS)

# Tensors that some files hold a second time, or under this name only.
_DUPLICATES = {
    "cls.predictions.decoder.weight": _WORD_EMBEDDINGS,
    "cls.predictions.decoder.bias": _MLM_BIAS,
}
_POSITION_IDS = "bert.embeddings.position_ids"  # a buffer 0, 1, 2, ... in older files

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What a checkpoint and the model do not have in common, by Hugging Face's names."""

    missing: tuple[str, ...]
    """Tensors of the model that the checkpoint lacks."""
    unexpected: tuple[str, ...]
    """Tensors of the checkpoint that the model has no place for."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected)

    def __str__(self) -> str:
        lists = (("missing", self.missing), ("unexpected", self.unexpected))
        return "; ".join(f"{label}: {', '.join(names)}" for label, names in lists if names)


def to_hf_state_dict(model: BertForPreTraining) -> dict[str, Tensor]:
    """The parameters under Hugging Face's names, as views where possible.

    The decoder's weight is left out, as in their files: it is the word embedding.
    """
    return {
        name: part
        for own_name, parameter in model.state_dict().items()
        for name, part in _hf_parts(own_name, parameter, model.config.vocab_size).items()
    }


def load_state_dict(
    model: BertForPreTraining, tensors: Mapping[str, Tensor], strict: bool = True
) -> LoadReport:
    """Copies tensors with Hugging Face's names into the model, converting their dtype.

    Takes the names of BertForPreTraining, BertForMaskedLM and the like, of the bare BertModel
    (without `bert.`), LayerNorm's older names (gamma, beta), and those of NVIDIA's
    DeepLearningExamples (dense_act). The model is changed only if every check passes.

    Args:
        model: the model to fill.
        tensors: name -> tensor.
        strict: raise if a tensor is missing or unexpected. Otherwise the report tells, and what
            is missing keeps its value.

    Returns:
        What was missing and unexpected.

    Raises:
        ValueError: strict and something is missing or unexpected; a shape does not fit; a tensor
            is not of floating point; the decoder is not tied to the word embedding.
    """
    report, pairs = _match(model, tensors, strict)
    for target, tensor in pairs:
        target.copy_(tensor)
    return report


def _match(
    model: BertForPreTraining, tensors: Mapping[str, Tensor], strict: bool
) -> tuple[LoadReport, list[tuple[Tensor, Tensor]]]:
    """What is missing and unexpected, and each tensor of the model with the one for it."""
    found = dict(_modern_names(tensors))
    _drop_derived(found)
    targets = {
        name: part
        for own_name, parameter in model.named_parameters()
        for name, part in _hf_parts(own_name, parameter.detach(), model.config.vocab_size).items()
    }
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
    """Checks that the tensors that `shapes` names have these shapes, and are of floating point.

    Raises:
        ValueError: they have not; the message names them.
    """
    wrong = [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in shapes.items()
        if tensors[name].shape != torch.Size(shape)
    ]
    if wrong:
        raise ValueError(f"tensors whose shape does not fit the configuration: {'; '.join(wrong)}")
    wrong = [
        f"{name} is {tensors[name].dtype}"
        for name in shapes
        if not tensors[name].is_floating_point()
    ]
    if wrong:
        raise ValueError(f"expected tensors of floating point, but {'; '.join(wrong)}")


def read_config(
    directory: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None
) -> BertConfig:
    """The configuration in `directory`, with some fields replaced.

    Raises:
        FileNotFoundError: no config.json there.
        ValueError: not a configuration of this model.
        TypeError: an override is no field of `BertConfig`.
    """
    config = BertConfig.from_json(Path(directory) / CONFIG_FILE)
    return dataclasses.replace(config, **(overrides or {}))


def load(
    make: Callable[[], BertForPreTraining], directory: str | os.PathLike[str], strict: bool = True
) -> BertForPreTraining:
    """Makes a model and fills it from model.safetensors, or from the shards that its index names.

    What does not fit is logged if not strict.

    Args:
        make: gives the model. Called first without memory for the weights, to see that they fit.
        directory: holds the files.
        strict: see `load_state_dict`, as for its errors.

    Raises:
        FileNotFoundError: no safetensors weights there, or a shard is missing.
        ValueError: also where a file is damaged, or the index names a file outside the folder.
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


def save(model: BertForPreTraining, directory: str | os.PathLike[str]) -> None:
    """Writes config.json and model.safetensors, which transformers' `from_pretrained` reads.

    Each file appears whole or not at all. The directory is made if need be.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.contiguous().cpu() for name, t in to_hf_state_dict(model).items()}
    with replacing(directory / WEIGHTS_FILE) as temporary:
        # transformers reads only files that say which framework they are from.
        save_file(tensors, temporary, metadata={"format": "pt"})
    extra = {k: v for k, v in model.config.extra.items() if k != "torch_dtype"} | {
        "architectures": ["BertForPreTraining"],
        # transformers loads in this dtype, whatever the file holds.
        "dtype": str(model.word_embeddings.dtype).removeprefix("torch."),
    }
    dataclasses.replace(model.config, extra=extra).to_json(directory / CONFIG_FILE)


def _hf_parts(name: str, tensor: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """One of our tensors as views under Hugging Face's names."""
    if packed := _QKV.fullmatch(name):
        prefix, kind = packed.groups()
        parts = zip(_QKV_PARTS, tensor.chunk(3), strict=True)
        return {f"{prefix}{part}.{kind}": view for part, view in parts}
    return {name: tensor[:vocab_size] if name in _VOCAB_PADDED else tensor}


def _modern_names(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    bare = not any(name.startswith(("bert.", "cls.")) for name in tensors)
    for name, tensor in tensors.items():
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        name = name.replace(".dense_act.", ".dense.")
        if bare and name.startswith(("embeddings.", "encoder.", "pooler.")):
            name = f"bert.{name}"
        yield name, tensor


def _drop_derived(found: dict[str, Tensor]) -> None:
    """Removes tensors that repeat others or follow from the shape, once seen to agree."""
    for name, source in _DUPLICATES.items():
        if name not in found:
            continue
        tensor = found.pop(name)
        if not torch.equal(tensor, found.setdefault(source, tensor)):
            raise ValueError(f"{name} differs from {source}: a decoder of its own is not supported")
    position_ids = found.get(_POSITION_IDS)
    if position_ids is not None and torch.equal(
        position_ids.flatten(), torch.arange(position_ids.numel())
    ):
        del found[_POSITION_IDS]
