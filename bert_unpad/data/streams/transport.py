"""Carries the examples of a step between ranks: lengths to all, then each example to its new rank.

Everything goes over separate gloo groups, never over that of training. Who gets what follows from
the lengths that all ranks share, so every rank knows the size of each message beforehand and
examples travel in one all-to-all without sizes or acknowledgements. `two_level` takes two. For the
rank with local number i of another node, an example first goes to local number i of its own node,
and then to the other node. A rank then talks to (ranks of a node) + (nodes) others instead of to
all.
"""

import contextlib
import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from bert_unpad.data.store.example_batch import ExampleBatch

SCOPES = ("none", "node", "world", "two_level")


class Transport:
    """The gloo groups of an exchange; making one is collective.

    Args:
        scope: how far examples travel: "none", "node" (within a node), "world", or "two_level" (as
            far as world, in two hops).
        node_size: ranks of a node, which are neighbours in number; None: all.
        timeout: seconds after which an operation that some rank does not join fails.
    """

    def __init__(self, scope: str, node_size: int | None, timeout: float) -> None:
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.num_ranks = dist.get_world_size() if joined else 1
        if scope not in SCOPES:
            raise ValueError(f"scope: expected one of {', '.join(SCOPES)}, got {scope!r}")
        node_size = self.num_ranks if node_size is None else node_size
        if node_size < 1 or self.num_ranks % node_size:
            raise ValueError(
                f"node_size: expected a divisor of the number of ranks ({self.num_ranks}), got "
                f"{node_size}"
            )
        self.scope = scope
        self.node_size = node_size
        self.bytes_sent = 0
        self._groups: list[dist.ProcessGroup] = []
        self._world = self._node = self._place = None
        if self.num_ranks == 1:
            return
        everyone = np.arange(self.num_ranks).reshape(-1, node_size)
        # Each rank has to take part in making every group, its own or not.
        self._world = self._group(everyone.reshape(1, -1), timeout)
        if scope in ("node", "two_level"):
            self._node = self._group(everyone, timeout)
        if scope == "two_level":
            self._place = self._group(everyone.T, timeout)

    def _group(
        self, members: NDArray[np.int64], timeout: float
    ) -> tuple[dist.ProcessGroup, list[int]]:
        """Makes a group of each row; returns this rank's own and its members."""
        for row in members.tolist():
            group = dist.new_group(row, timeout=datetime.timedelta(seconds=timeout), backend="gloo")
            if self.rank in row:
                self._groups.append(group)
                found = group, row
        return found

    @property
    def group_ranks(self) -> int:
        """Size of the groups of neighbouring ranks that examples stay in."""
        return {"none": 1, "node": self.node_size}.get(self.scope, self.num_ranks)

    def share(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Every rank's row: int64 [n] in, [ranks, n] out."""
        if self._world is None:
            return row[None]
        rows = torch.empty(self.num_ranks, len(row), dtype=torch.int64)
        dist.all_gather(list(rows), torch.from_numpy(row), group=self._world[0])
        return rows.numpy()

    def share_object(self, value: Any) -> list[Any]:
        """Every rank's small picklable object."""
        if self._world is None:
            return [value]
        values = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._world[0])
        return values

    def exchange(
        self,
        examples: ExampleBatch,
        lengths: NDArray[np.int64],
        holders: NDArray[np.int64],
        receivers: NDArray[np.int64],
        mask_counts: NDArray[np.int64] | None = None,
    ) -> ExampleBatch:
        """Brings every example of a step from the rank that holds it to the one that gets it.

        Args:
            examples: those that this rank holds, in the order of the arrays below.
            lengths: int64 [N], of all ranks' examples.
            holders: int64 [N], which rank holds each.
            receivers: int64 [N], which rank gets each.
            mask_counts: int64 [N], given masks of each; None if examples do not bring any.

        Returns:
            Those that this rank gets, in the order of the arrays.
        """
        if self._world is None or self.scope == "none":
            return examples
        if self._node is None or self._place is None:
            hop = self._node or self._world
            return self._hop(hop, examples, lengths, holders, receivers, mask_counts)
        between = holders // self.node_size * self.node_size + receivers % self.node_size
        examples = self._hop(self._node, examples, lengths, holders, between, mask_counts)
        return self._hop(self._place, examples, lengths, between, receivers, mask_counts)

    def _hop(
        self,
        hop: tuple[dist.ProcessGroup, Sequence[int]],
        examples: ExampleBatch,
        lengths: NDArray[np.int64],
        holders: NDArray[np.int64],
        receivers: NDArray[np.int64],
        mask_counts: NDArray[np.int64] | None,
    ) -> ExampleBatch:
        group, members = hop
        token_dtype = examples.tokens.dtype
        sizes = ExampleBatch.num_bytes(lengths, token_dtype, mask_counts)
        held = np.flatnonzero(holders == self.rank)
        coming = np.flatnonzero(receivers == self.rank)
        outgoing, incoming, given, taken, origins = [], [], [], [], []
        for member in members:
            out = np.flatnonzero(receivers[held] == member)
            came = coming[holders[coming] == member]
            if member == self.rank:
                kept, kept_places = examples[out], came
                out = came = np.empty(0, np.int64)
            given.append(int(sizes[held[out]].sum()))
            taken.append(int(sizes[came].sum()))
            if len(out):
                outgoing.append(examples[out].to_bytes())
            origins.append(came)
        sent = np.concatenate([np.empty(0, np.uint8), *outgoing])
        received = torch.empty(sum(taken), dtype=torch.uint8)
        dist.all_to_all_single(received, torch.from_numpy(sent), taken, given, group=group)
        self.bytes_sent += len(sent)
        ends = np.cumsum(taken)
        data = received.numpy()
        for places, end, size in zip(origins, ends, taken, strict=True):
            if len(places):
                masks = None if mask_counts is None else mask_counts[places]
                part = data[end - size : end]
                incoming.append(ExampleBatch.from_bytes(part, lengths[places], token_dtype, masks))
        order = np.argsort(np.concatenate([kept_places, *origins]))
        return ExampleBatch.concatenate([kept, *incoming])[order]

    def abort(self) -> None:
        """Makes operations under way fail, where this PyTorch can do that; the groups end."""
        for group in self._groups:
            with contextlib.suppress(AttributeError, RuntimeError):
                group.abort()

    def close(self) -> None:
        """Gives up the groups; no operation may be under way."""
        for group in self._groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._groups.clear()
