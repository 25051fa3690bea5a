"""Reads PyTorch's distributed checkpoints without running what is in them.

PyTorch unpickles `.metadata` and every entry that is no tensor, and a pickle can call any function.
Here the metadata may only name the classes that such a file is made of, and entries are read as
`torch.load(weights_only=True)` does; tensors are read so by PyTorch itself.
"""

import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

Keys = tuple[str | int, ...]

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, f"{name}StorageMetadata") for name in ("Bytes", "Chunk", "Tensor")),
    *((_METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    # Where the checkpoint was written; Python 3.13 names another module.
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
_NAMES = "names {}, which is nothing that a checkpoint contains"


def _memory_format(kind: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    """What stands for `getattr`, by which Python 3.11.2 writes a member of an enumeration."""
    if kind is not _MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it {_NAMES.format('builtins.getattr')}")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it {_NAMES.format(f'{module}.{name}')}")
        return super().find_class(module, name)


class CheckpointReader(FileSystemReader):
    """PyTorch's reader, with metadata that cannot call functions."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The content of `.metadata`.

        Raises:
            pickle.UnpicklingError: it is no metadata; the message names the file, and a class that
                does not belong there.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            try:
                metadata = _MetadataUnpickler(file).load()
            except pickle.UnpicklingError as error:
                raise pickle.UnpicklingError(f"{path}: {error}") from None
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{path}: it is no metadata of a checkpoint")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def make_room(self, state: dict[str, Any], wanted: Callable[[Keys], bool]) -> None:
        """Puts empty tensors and None into a state where the checkpoint has tensors and values.

        Args:
            state: nested; filled in place.
            wanted: which entries, by the keys that lead to them.

        Raises:
            pickle.UnpicklingError: see `read_metadata`.
        """
        metadata = self.read_metadata()
        for name, keys in metadata.planner_data.items():
            if wanted(keys):
                room, entry = None, metadata.state_dict_metadata[name]
                if isinstance(entry, TensorStorageMetadata):
                    room = torch.empty(entry.size, dtype=entry.properties.dtype)
                set_element(state, keys, room)


class CheckpointPlanner(DefaultLoadPlanner):
    """PyTorch's planner, with entries that cannot call functions."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts an entry that is no tensor into the state.

        Raises:
            pickle.UnpicklingError: the entry holds other things than plain values and tensors.
        """
        name = read_item.dest_index.fqn
        try:
            entry = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            assert self.metadata is not None  # once the planner is set up
            file = self.metadata.storage_data[read_item.storage_index].relative_path
            # PyTorch's own message goes on to say how to load it all the same.
            named = re.search(r"GLOBAL (\S+)", str(error))
            reason = f"it {_NAMES.format(named[1])}" if named else "it is damaged"
            raise pickle.UnpicklingError(f"{file}: entry {name}: {reason}") from None
        set_element(self.original_state_dict, self.mappings[name], entry)
