"""The layout of NVIDIA's DeepLearningExamples and MLPerf's reference: a PyTorch file.

Names are Hugging Face's, except `dense_act` for layers that include their activation. The file
holds the decoder's tied weight too, and the vocabulary is padded to a multiple of 8.
"""

import pickle
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_unpad._files import replacing
from bert_unpad.convert.conversion import Conversion
from bert_unpad.nn.config import BertConfig

# The linear layers that include their activation in DeepLearningExamples.
_ACTIVATED = re.compile(
    r"(bert\.encoder\.layer\.\d+\.intermediate|bert\.pooler|cls\.predictions\.transform)\.dense\."
)
_WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
_DECODER = "cls.predictions.decoder.weight"
_MLM_BIAS = "cls.predictions.bias"
_VOCAB = (_WORD_EMBEDDINGS, _DECODER, _MLM_BIAS)

# Errors that PyTorch raises for a damaged file: it runs the file's instructions, which can only
# make tensors and plain values, but does not check their arguments.
_DAMAGE = (
    *(pickle.UnpicklingError, RuntimeError, EOFError, struct.error, MemoryError, AssertionError),
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
)


def from_nvidia(tensors: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Renames tensors from NVIDIA's to Hugging Face's names.

    The vocabulary is cut to `config.vocab_size` rows, which drops the rows that pad it to a
    multiple of 8. Embedding and decoder must be equal, because they are one tensor.

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
        if name in found and found[name].shape[:1] == (config.padded_vocab_size,):
            found[name] = found[name][: config.vocab_size]
    return found


def to_nvidia(tensors: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Renames tensors from Hugging Face's to NVIDIA's names, and adds the decoder's weight.

    The vocabulary is padded with zeros to a multiple of 8, as in NVIDIA's models.
    """
    given = dict(tensors)
    if _WORD_EMBEDDINGS in given:
        given[_DECODER] = given[_WORD_EMBEDDINGS]
    found = {}
    for name, tensor in given.items():
        if name in _VOCAB:
            rows = config.padded_vocab_size - tensor.shape[0]
            tensor = torch.cat([tensor, tensor.new_zeros((rows, *tensor.shape[1:]))])
        found[_ACTIVATED.sub(r"\1.dense_act.", name)] = tensor
    return found


def read(path: Path, config_path: Path | None = None) -> Conversion:
    """Reads a file of weights; an optimizer's state in it is left out.

    Args:
        path: the file.
        config_path: the JSON file of the configuration, which this layout does not include.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the configuration is missing, or the file is damaged or holds something else.
    """
    if config_path is None:
        raise ValueError("layout nvidia holds no configuration: give --config")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected a file of torch.save")
    config = BertConfig.from_json(config_path)
    loaded = _load(path)
    # DeepLearningExamples wraps the weights together with the optimizer's state.
    tensors = loaded.get("model", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(tensors, dict) or not all(map(_is_named_tensor, tensors.items())):
        raise ValueError(f"{path} holds no state dict of tensors, each stored as a whole")
    found = from_nvidia(tensors, config)
    before = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    notes = [
        f"{name}: left out {len(before[name]) - len(found[name])} rows that pad the vocabulary"
        for name in _VOCAB
        if name in found and name in before and before[name].shape != found[name].shape
    ]
    if tensors is not loaded:
        notes += [f"left out: {name}" for name in loaded if name != "model"]
    return Conversion(found, config, tuple(notes))


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except _DAMAGE as error:
        # The other lines are PyTorch's advice to trust the file.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path}: expected a complete file of tensors ({reason})") from error


def _is_named_tensor(item: tuple[object, object]) -> bool:
    """Whether this is a name and a dense tensor with all values; a small file may declare more."""
    name, tensor = item
    return (
        isinstance(name, str)
        and isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_nested)
        and tensor.nbytes <= tensor.untyped_storage().nbytes()
    )


def write(conversion: Conversion, path: Path) -> None:
    """Writes the file, and the configuration into the same folder as <name>.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        torch.save({"model": to_nvidia(conversion, conversion.config)}, temporary)
    conversion.config.to_json(path.with_suffix(".json"))
