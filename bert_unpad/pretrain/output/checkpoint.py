"""Checkpoints that a run killed at any moment can resume from.

PyTorch's distributed checkpointing writes them: the state is copied to host memory, training goes
on, and a background thread writes the copy, each rank its share. The files go to a folder with a
temporary name, which rank 0 renames once every rank has finished and checksums are written
(checkpoint_files.py), so nothing incomplete is ever named `step-<n>`. Contents: model, optimizer
state as it is (update/state.py; hyperparameters come from the configuration), and a JSON text with
everything else. Any number of ranks can load what any other number has saved, from a folder that
all of them see.
"""

import io
import json
import os
import pickle
import shutil
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.utils._pytree import tree_leaves

from bert_unpad._files import sync_folder
from bert_unpad._full_disk import named_if_full
from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.output.checkpoint_files import (
    all_checkpoints,
    checkpoint_name,
    set_damaged_aside,
    write_checksums,
)
from bert_unpad.pretrain.output.checkpoint_reader import CheckpointPlanner, CheckpointReader
from bert_unpad.pretrain.output.run_lock import RunLock
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.update.state import (
    check_state,
    group_state,
    load_group_state,
    load_named_state,
    named_state,
    parameter_names,
)

_SAVING, _DELETING = ".saving-", ".deleting-"


class Checkpointer:
    """Saves and loads the checkpoints of one run.

    Args:
        directory: where they are; made if missing.
        keep_last: how many complete ones stay.
        ranks: the processes of the run; every one of them has to make the same calls.
        lock: of the run, on rank 0; kept as long as a checkpoint is being written.
    """

    def __init__(
        self, directory: Path, keep_last: int, ranks: Ranks, lock: RunLock | None = None
    ) -> None:
        self.directory = directory
        self._keep_last = keep_last
        self._ranks = ranks
        self._lock = lock
        self._future: Future | None = None
        self._published = threading.Event()
        self._writing, self._bytes = directory, 0
        self._error: BaseException | None = None
        if ranks.world_size == 1:
            # One process is what is meant, so there is nothing to warn of.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        if ranks.is_first:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.iterdir():
                if path.name.startswith((_SAVING, _DELETING)):
                    shutil.rmtree(path)
        ranks.barrier()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rest: dict[str, Any],
        local: dict[str, Any] | None = None,
    ) -> None:
        """Starts to save; returns when the state is copied, before it is written.

        Args:
            step: updates made so far.
            model: the bare model, not wrapped in DDP.
            optimizer: of that model.
            rest: anything that JSON can hold; rank 0's is saved.
            local: tensors and plain values of this rank alone, for as many ranks as there are now.
        """
        self.wait()
        name = checkpoint_name(step)
        temporary = self.directory / (_SAVING + name)
        self._published.clear()
        check_state(optimizer)
        state = _state(model, optimizer)
        if self._ranks.is_first:  # what several ranks hand in, any one of them may get to write
            state["rest"] = json.dumps(rest)
        if local is not None:
            buffer = io.BytesIO()
            torch.save(local, buffer)
            state[self._local_key] = buffer.getvalue()
        tensors = (leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))
        self._writing, self._bytes = temporary, sum(tensor.nbytes for tensor in tensors)
        saving = dcp.async_save(
            state,
            checkpoint_id=temporary,
            process_group=self._ranks.checkpoint_group,
            no_dist=self._ranks.world_size == 1,
        )
        assert isinstance(saving, Future)  # as it is where staging is PyTorch's own
        self._future = saving
        if self._lock is not None:
            self._lock.retain()
        saving.add_done_callback(
            lambda future: self._publish(future, temporary, self.directory / name)
        )

    def wait(self) -> None:
        """Waits until the checkpoint being saved, if any, is complete on disk.

        Raises:
            FullDiskError: there is no room for it.
            Exception: whatever else has kept it from being written.
        """
        if self._future is None:
            return
        self._future = None
        self._published.wait()
        if self._error is not None:
            last = all_checkpoints(self.directory)[-1:]
            needed = sum(file.stat().st_size for path in last for file in path.iterdir())
            with named_if_full(self._writing, needed or self._bytes):
                raise self._error

    def read(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `save` was given as `rest`, which says what model and optimizer to load into, and as
        `local` on this rank: nothing if there were not as many ranks then."""
        state: dict[str, Any] = {"rest": ""}
        self._read(path, state, no_dist=self._ranks.world_size == 1)
        rest, key = json.loads(state["rest"]), self._local_key
        if key not in CheckpointReader(path).read_metadata().state_dict_metadata:
            return rest, {}
        state = {key: b""}
        # Each rank reads what no other one does.
        self._read(path, state, no_dist=True)
        local = io.BytesIO(state[key])
        return rest, torch.load(local, map_location="cpu", weights_only=True)

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Loads a checkpoint into the bare model and its optimizer, in place.

        The run goes on from it, so newer ones, which `newest_checkpoint` has found damaged, are
        renamed.

        Raises:
            ConfigError: the checkpoint holds what may not be unpickled.
            CheckpointException: it does not fit the model or the optimizer.
        """
        state = {"model": model.state_dict(), "optimizer": {}, "optimizer_groups": {}}
        names = parameter_names(model, optimizer)
        with _named_errors(path):
            # What the checkpoint has of the optimizer, for the parameters that this rank updates.
            CheckpointReader(path).make_room(
                state,
                lambda keys: (
                    keys[0] == "optimizer_groups" or (keys[0] == "optimizer" and keys[1] in names)
                ),
            )
        self._read(path, state, no_dist=self._ranks.world_size == 1)
        model.load_state_dict(state["model"])
        load_named_state(model, optimizer, state["optimizer"])
        load_group_state(optimizer, state["optimizer_groups"])
        if self._ranks.is_first:
            set_damaged_aside(x for x in all_checkpoints(self.directory) if x.name > path.name)

    def _read(self, path: Path, state: dict[str, Any], no_dist: bool) -> None:
        """Fills the state from a checkpoint, in place."""
        reader = CheckpointReader(path)
        with _named_errors(path):
            reader.read_metadata()  # PyTorch would look for other metadata if this failed
            dcp.load(
                state,
                storage_reader=reader,
                planner=CheckpointPlanner(),
                process_group=self._ranks.checkpoint_group,
                no_dist=no_dist,
            )

    @property
    def _local_key(self) -> str:
        return f"local.{self._ranks.rank}-of-{self._ranks.world_size}"

    def _publish(self, future: Future, temporary: Path, final: Path) -> None:
        # Runs in the writing thread. On rank 0 the future ends after all ranks have written.
        try:
            future.result()
            if self._ranks.is_first:
                written = CheckpointReader(temporary).read_metadata().storage_data.values()
                write_checksums(temporary, (item.relative_path for item in written))
                if os.path.lexists(final):
                    set_damaged_aside([final])
                os.rename(temporary, final)
                sync_folder(self.directory)
                for old in all_checkpoints(self.directory)[: -self._keep_last]:
                    doomed = old.with_name(_DELETING + old.name)
                    os.rename(old, doomed)
                    shutil.rmtree(doomed)
        except BaseException as error:  # raised again by wait(), in the training thread
            self._error = error
            if self._ranks.is_first:  # where the disk is full, the room is needed
                shutil.rmtree(temporary, ignore_errors=True)
        finally:
            if self._lock is not None:
                self._lock.release()
            self._published.set()


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Turns a refusal to unpickle what is in a checkpoint into an error of the configuration."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ConfigError("resume", str(error)) from error
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, pickle.UnpicklingError):
                raise ConfigError("resume", f"{path}/{failure}") from error
        raise


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        # By the parameters' names: ranks that keep some of the states hand in, and ask for, these.
        "optimizer": named_state(model, optimizer),
        "optimizer_groups": group_state(optimizer),
    }
