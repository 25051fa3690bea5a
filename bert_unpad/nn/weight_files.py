"""Reads the safetensors files of a folder: model.safetensors, or the shards that an index names."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bert_unpad._files import read_json_object

WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Reads all tensors of a folder, by their names in the files.

    Raises:
        FileNotFoundError: the folder has no safetensors weights, or a shard is missing.
        ValueError: a file is damaged, or the index names a file outside the folder.
    """
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory):
        try:
            with safe_open(file, framework="pt") as opened:
                tensors.update((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{file}: expected a complete safetensors file ({error})") from error
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS_FILE).is_file():
        return [directory / WEIGHTS_FILE]
    index = directory / _INDEX_FILE
    if not index.is_file():
        raise FileNotFoundError(f"{directory}: expected {WEIGHTS_FILE} or {_INDEX_FILE} in it")
    shards = read_json_object(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ValueError(f"{index}: weight_map: expected an object, got {type(shards).__name__}")
    for name, shard in shards.items():
        # Check the name, not the target of a link: folders of Hugging Face's cache hold links to
        # files elsewhere.
        if not _is_file_name(shard):
            raise ValueError(
                f"{index}: weight_map: {name}: expected the name of a file in this folder, got "
                f"{shard!r}"
            )
    files = [directory / shard for shard in sorted(set(shards.values()))]
    lacking = [file.name for file in files if not file.is_file()]
    if lacking:
        raise FileNotFoundError(f"{index} names files that do not exist: {', '.join(lacking)}")
    return files


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or not 1 <= len(name) <= 255:
        return False
    return name not in (".", "..") and not set(name) & set("/\\\0")
