"""FSDP2: parameters, gradients and the optimizer's state of a model, shared out among all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from bert_unpad.distributed import BucketClip, ShardedClip
from bert_unpad.nn import Encoder, EncoderForPreTraining
from bert_unpad.pretrain.config import ClipConfig
from bert_unpad.pretrain.gradients.clipping import Clipping, GradientReport
from bert_unpad.pretrain.gradients.comm_hook import CommHook
from bert_unpad.pretrain.parallel.way import Way
from bert_unpad.pretrain.run import Run


class _Clipping(Clipping):
    """Clipping under FSDP2: of each group before its reduce-scatter, or of the average."""

    def _make_bucket(self) -> BucketClip | None:
        return None

    def attach(self, replica: nn.Module) -> None:
        """Replaces the reduce-scatters by ones that clip first, if that is asked for."""
        self._groups: ShardedClip | None = None
        if self._mode == "bucket":
            scale = None if self._loss_scale is None else self._loss_scale.value
            self._groups = ShardedClip(self._max_norm, "equal", scale).attach(replica)

    def clip(self) -> GradientReport:
        """Makes `.grad` this rank's shards of the clipped average."""
        if self._groups is None:
            return super().clip()
        report = self._groups.report()
        return GradientReport(report.norm, report.clipped, len(report.norms), report.finite)


class Fsdp(Way):
    """FSDP2 averages gradients within the backward pass and gathers weights before each use.

    Each encoder layer is a group of its own. All other parameters are the root's: the decoder is
    the word embedding, and the root keeps its parameters whole from its forward pass to the end of
    its backward pass. Parameters stay fp32; gradients travel in `clip.wire_dtype`.
    """

    waits_in_passes = shares_state = True
    clipping = _Clipping

    def shard(self, model: EncoderForPreTraining, clip: ClipConfig) -> None:
        mesh = init_device_mesh(self.ranks.device.type, (self.ranks.world_size,))
        wire = torch.bfloat16 if clip.wire_dtype == "bf16" else None
        policy = MixedPrecisionPolicy(reduce_dtype=wire)
        for encoder in (module for module in model.modules() if isinstance(module, Encoder)):
            for layer in encoder.layer:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def wrap(self, run: Run, clipping: Clipping, hook: CommHook, leaves_out: bool) -> nn.Module:
        clipping.attach(run.model)
        return run.model

    @contextmanager
    def no_sync(self, replica: nn.Module) -> Iterator[None]:
        assert isinstance(replica, FSDPModule)
        replica.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            replica.set_requires_gradient_sync(True)

    def whole(self, model: EncoderForPreTraining) -> EncoderForPreTraining:
        """A copy of the model on rank 0, and the sharded model on the others."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(model, options=options)
        if not self.ranks.is_first:
            return model
        copy = model.fresh()
        copy.load_state_dict(whole)
        return copy.to(self.ranks.device).train()
