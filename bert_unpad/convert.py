"""Converts BERT pretraining checkpoints between the layouts in use: `python -m bert_unpad.convert`.

    python -m bert_unpad.convert pytorch_model.bin out --from nvidia --config bert_config.json
    python -m bert_unpad.convert out model.pt --to nvidia

| layout | what it is |
|---|---|
| hf | a directory: config.json and model.safetensors, as transformers and this package write it |
| nvidia | a PyTorch file with the names of NVIDIA's DeepLearningExamples and MLPerf's reference: |
|        | `dense_act` for the layers with an activation, the decoder's tied weight written out |

All conversions go through Hugging Face's names. A tensor is never dropped silently: what a layout
does not know, or lacks, ends the conversion with its name, or is listed with `--allow-partial`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bert_unpad._files import replacing
from bert_unpad.nn import weights
from bert_unpad.nn.config import BertConfig

__all__ = ["Conversion", "from_nvidia", "main", "read", "to_nvidia", "write"]

LAYOUTS = ("hf", "nvidia")

# The linear layers that DeepLearningExamples joins with their activation.
_ACTIVATED = re.compile(
    r"(bert\.encoder\.layer\.\d+\.intermediate|bert\.pooler|cls\.predictions\.transform)\.dense\."
)
_WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
_DECODER = "cls.predictions.decoder.weight"
_MLM_BIAS = "cls.predictions.bias"
_VOCAB = (_WORD_EMBEDDINGS, _DECODER, _MLM_BIAS)


class Conversion(dict[str, Tensor]):
    """Tensors under Hugging Face's names, and the configuration that belongs to them."""

    def __init__(
        self, tensors: Mapping[str, Tensor], config: BertConfig, notes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(tensors)
        self.config = config
        self.notes = notes
        """What was left out on purpose, for the user to read."""

    def report(self) -> weights.LoadReport:
        """What such a BertForPreTraining lacks here, and what it has no place for."""
        wanted = expected_shapes(self.config)
        return weights.LoadReport(
            missing=tuple(sorted(wanted.keys() - self.keys())),
            unexpected=tuple(sorted(self.keys() - wanted.keys())),
        )

    def check_shapes(self) -> None:
        """Raises a ValueError that names the tensors whose shape is not the configuration's."""
        wanted = expected_shapes(self.config)
        wrong = [
            f"{name} is {list(self[name].shape)}, expected {list(wanted[name])}"
            for name in sorted(wanted.keys() & self.keys())
            if tuple(self[name].shape) != wanted[name]
        ]
        if wrong:
            raise ValueError(
                f"tensors whose shape does not fit the configuration: {'; '.join(wrong)}"
            )


def expected_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names of all parameters of BertForPreTraining -> their shapes."""
    from bert_unpad.nn import BertForPreTraining

    with torch.device("meta"):
        model = BertForPreTraining(config)
    return {name: tuple(t.shape) for name, t in weights.to_hf_state_dict(model).items()}


def from_nvidia(tensors: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """NVIDIA's names -> Hugging Face's.

    The vocabulary is cut to `config.vocab_size` rows, which drops the rows that pad it to a
    multiple of 8; they must be alike in embedding and decoder, which are one tensor.

    Raises:
        ValueError: two names mean the same tensor, or the decoder is not the word embedding.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        renamed = name.removeprefix("module.").replace(".dense_act.", ".dense.")
        if renamed in found:
            raise ValueError(f"{name} and another tensor both mean {renamed}")
        found[renamed] = tensor
    decoder = found.pop(_DECODER, None)
    if decoder is not None and not torch.equal(decoder, found.get(_WORD_EMBEDDINGS, decoder)):
        raise ValueError(f"{_DECODER} differs from {_WORD_EMBEDDINGS}: an untied decoder")
    if decoder is not None:
        found.setdefault(_WORD_EMBEDDINGS, decoder)
    for name in _VOCAB:
        if name in found and found[name].shape[0] == _padded(config.vocab_size):
            found[name] = found[name][: config.vocab_size]
    return found


def to_nvidia(tensors: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Hugging Face's names -> NVIDIA's, with the decoder's weight written out.

    The vocabulary is padded with zeros to a multiple of 8, as their models have it.
    """
    given = dict(tensors)
    if _WORD_EMBEDDINGS in given:
        given[_DECODER] = given[_WORD_EMBEDDINGS]
    found = {}
    for name, tensor in given.items():
        if name in _VOCAB:
            rows = _padded(config.vocab_size) - tensor.shape[0]
            tensor = torch.cat([tensor, tensor.new_zeros((rows, *tensor.shape[1:]))])
        found[_ACTIVATED.sub(r"\1.dense_act.", name)] = tensor
    return found


def read(path: Path, layout: str, config_path: Path | None = None) -> Conversion:
    """Reads a checkpoint.

    Args:
        path: the directory (hf) or file (nvidia).
        layout: one of LAYOUTS.
        config_path: the configuration's JSON file, where the layout holds none.

    Raises:
        FileNotFoundError, ValueError: a file is missing, or not what it should be.
    """
    if layout == "hf":
        config = BertConfig.from_json(config_path or path / weights.CONFIG_FILE)
        return Conversion(_read_safetensors(path), config)
    if config_path is None:
        raise ValueError(f"layout {layout} holds no configuration: give --config")
    config = BertConfig.from_json(config_path)
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    # DeepLearningExamples wraps the weights together with the optimizer's state.
    tensors = loaded.get("model", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"{path} holds no state dict of tensors")
    found = from_nvidia(tensors, config)
    before = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    notes = tuple(
        f"{name}: left out {before[name].shape[0] - found[name].shape[0]} rows that pad the "
        "vocabulary"
        for name in _VOCAB
        if name in found and name in before and before[name].shape[0] > found[name].shape[0]
    )
    return Conversion(found, config, notes)


def _read_safetensors(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in weights._weight_files(directory):
        tensors.update(load_file(file))
    found = dict(weights._modern_names(tensors))
    weights._drop_derived(found)
    return found


def write(conversion: Conversion, path: Path, layout: str) -> None:
    """Writes a checkpoint; each file appears whole or not at all."""
    config = conversion.config
    if layout == "hf":
        path.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.contiguous() for name, t in conversion.items()}
        with replacing(path / weights.WEIGHTS_FILE) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
        values = config.to_dict() | {"architectures": ["BertForPreTraining"]}
        dtypes = {str(t.dtype).removeprefix("torch.") for t in tensors.values()}
        if len(dtypes) == 1:
            values["dtype"] = dtypes.pop()
        BertConfig.from_dict(values).to_json(path / weights.CONFIG_FILE)
        return
    with replacing(path) as temporary:
        torch.save({"model": to_nvidia(conversion, config)}, temporary)
    config.to_json(path.with_suffix(".json"))


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // 8) * 8


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bert_unpad.convert",
        description=__doc__.split("\n")[0],
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--from", dest="source_layout", choices=LAYOUTS, default="hf")
    parser.add_argument("--to", dest="target_layout", choices=LAYOUTS, default="hf")
    parser.add_argument("--config", type=Path, help="config.json of a source that holds none")
    parser.add_argument(
        "--allow-partial",
        action="store_true",
        help="list what is missing or unknown and convert all the same, unknown tensors too",
    )
    args = parser.parse_args(argv)
    try:
        conversion = read(args.source, args.source_layout, args.config)
        conversion.check_shapes()
    except (OSError, ValueError, json.JSONDecodeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    report = conversion.report()
    for label, names in (("missing", report.missing), ("unknown", report.unexpected)):
        for name in names:
            print(f"{label}: {name}", file=sys.stderr)
    if report and not args.allow_partial:
        print(f"{parser.prog}: nothing written; --allow-partial converts the rest", file=sys.stderr)
        return 1
    for note in conversion.notes:
        print(note, file=sys.stderr)
    write(conversion, args.target, args.target_layout)
    print(f"{len(conversion)} tensors written to {args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
