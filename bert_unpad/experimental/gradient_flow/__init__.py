"""GradientFlow: averages only the chunks of a gradient that matter most, and keeps the others.

DDP needs annotations of `gradient_flow_hook` that are objects, not strings. So this module must not
use `from __future__ import annotations`.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class GradientFlow:
    """State of `gradient_flow_hook`: chunks of the gradient that are not sent yet, and their norms.

    Sun et al., "Optimizing network performance for distributed DNN training on GPU clusters:
    ImageNet/AlexNet training in 1.5 minutes" (2019), arXiv:1902.06855. Gradients are cut into
    chunks of equal size. All ranks send the same chunks, those with the largest L1 norms added up
    over the ranks, so an allreduce of dense numbers averages them. The other chunks arrive as
    zeros. Each rank keeps its own and adds them to its next gradient. Training starts with dense
    averages. The paper's lazy allreduce sends gradients together once they exceed a threshold;
    DDP's buckets do that, and `bucket_cap_mb` is the threshold.

    Chosen here:

    - Chunks are chosen within each bucket, by the norms of the pass before, which travel in the
      same message as the chunks. So a bucket takes one allreduce and waits for no other.
    - Norms are those of the gradient together with what has been kept.
    - Momentum correction serves any optimizer with a momentum m: what is kept is multiplied by m in
      each pass. A gradient g that is sent k passes late then counts m^k g, as in the momentum of an
      optimizer that got it at once. What it would have changed in these k updates is lost. Deep
      Gradient Compression, which needs an optimizer without momentum, adds that to what it sends.
    - After `start` passes with all chunks, the share falls from 1 to `share` exponentially, over
      as many passes again, as in that method (Lin et al., 2018, arXiv:1712.01887).

    Takes as much memory as the gradient. The choice is made on the device, and the host never
    waits.

    Args:
        share: share of the chunks that are sent, at least one of each bucket; in (0, 1].
        chunk_size: elements of a chunk.
        momentum: decay rate of the optimizer's momentum, `betas[0]` of Adam and LAMB, or 1 for one
            that has none: plain error feedback; in (0, 1].
        start: passes with all chunks.
        group: the ranks that average, those of the DDP model; None: all.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        share: float,
        chunk_size: int = 32768,
        momentum: float = 0.9,
        start: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share: expected a number in (0, 1], got {share}")
        if chunk_size < 1:
            raise ValueError(f"chunk_size: expected a number >= 1, got {chunk_size}")
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum: expected a number in (0, 1], got {momentum}")
        if start < 0:
            raise ValueError(f"start: expected a number >= 0, got {start}")
        self.share, self.chunk_size, self.momentum = share, chunk_size, momentum
        self.start, self.group = start, group
        self.restart(0)

    def restart(self, step: int) -> None:
        """Goes on after `step` passes with nothing kept; the next pass sends all chunks."""
        self.step = step
        # By bucket: this rank's gradient that is not sent yet, [chunks, chunk size] with zeros at
        # the end; and the chunks' L1 norms in the last pass, means over the ranks, [chunks].
        self._memory: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        self._chosen: dict[int, Tensor] = {}

    @property
    def current_share(self) -> float:
        """Share of the chunks that the next pass sends."""
        if self.step < self.start:
            return 1.0
        return self.share ** min((self.step - self.start) / max(self.start, 1), 1.0)

    @property
    def finite(self) -> Tensor:
        """bool []: whether all gradients of all ranks were finite in the last pass, sent or not.

        The same on all ranks.

        Raises:
            RuntimeError: there was no pass yet.
        """
        if not self._norms:
            raise RuntimeError("no gradient has been averaged yet")
        return torch.cat(list(self._norms.values())).isfinite().all()

    def forget_unless(self, finite: Tensor) -> None:
        """Drops what is kept if `finite`, bool [], is false, without a wait of the host."""
        for index, norms in self._norms.items():
            self._memory[index].masked_fill_(~finite, 0.0)
            norms.nan_to_num_(0.0, 0.0, 0.0)

    def state_dict(self) -> dict[str, dict[int, Tensor]]:
        """What this rank's next pass depends on besides `step`, by bucket."""
        return {"memory": dict(self._memory), "norms": dict(self._norms)}

    def load_state_dict(self, state: dict[str, dict[int, Tensor]]) -> None:
        """Continues from `state_dict`, with tensors on the model's device.

        A bucket whose chunks differ by now starts with nothing kept, and sends all of them once.
        """
        self._memory, self._norms = dict(state["memory"]), dict(state["norms"])

    def _sync_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer, index = bucket.buffer(), bucket.index()
        share = self.current_share
        if bucket.is_last():
            self.step += 1
        size = max(min(self.chunk_size, buffer.numel()), 1)
        shape = (-(-buffer.numel() // size), size)
        memory = self._memory.get(index)
        if memory is None or memory.shape != shape:
            share = 1.0
            memory = self._memory[index] = buffer.new_zeros(shape)
            self._norms[index] = buffer.new_zeros(shape[0])
        memory.mul_(self.momentum).view(-1)[: buffer.numel()] += buffer
        count = max(round(share * shape[0]), 1)
        # A stable order, so that ranks agree about equal norms. It is kept for the callback, whose
        # stream the allocator does not know.
        order = self._norms[index].argsort(descending=True, stable=True)
        chosen = self._chosen[index] = order[:count]
        norms = torch.linalg.vector_norm(memory, 1, dim=1)
        message = torch.cat([memory[chosen].view(-1), norms]).div_(dist.get_world_size(self.group))
        memory.index_fill_(0, chosen, 0.0)

        def unpack(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            values, norms = future.value()[0].split([count * size, shape[0]])
            self._norms[index].copy_(norms)
            chunks = torch.zeros_like(memory).index_copy_(0, chosen, values.view(count, size))
            return buffer.copy_(chunks.view(-1)[: buffer.numel()])

        return dist.all_reduce(message, group=self.group, async_op=True).get_future().then(unpack)


def gradient_flow_hook(
    state: GradientFlow, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook that averages the chunks that matter most; see its state."""
    return state._sync_bucket(bucket)
