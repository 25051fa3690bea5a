"""FSDP2: parameters, gradients and the optimizer's state of a model, shared out among all ranks."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from bert_unpad.distributed import ShardedClip
from bert_unpad.nn import Encoder, EncoderForPreTraining
from bert_unpad.pretrain.gradients.clipping import GradientReport, wire_dtype
from bert_unpad.pretrain.parallel.way import Way


class Fsdp(Way):
    """FSDP2 averages gradients within the backward pass and gathers weights before each use.

    Each encoder layer is a group of its own. All other parameters are the root's: the decoder is
    the word embedding, and the root keeps its parameters whole from its forward pass to the end of
    its backward pass. Parameters stay fp32; gradients travel in `clip.wire_dtype`. Each group is
    clipped before its reduce-scatter, or the average is.
    """

    waits_in_passes = shares_state = True
    _groups: ShardedClip | None

    def shard(self) -> None:
        mesh = init_device_mesh(self.run.device.type, (self.run.ranks.world_size,))
        policy = MixedPrecisionPolicy(reduce_dtype=wire_dtype(self.run.config.clip))
        model = self.run.model
        for encoder in (module for module in model.modules() if isinstance(module, Encoder)):
            for layer in encoder.layer:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def _wrap(self, leaves_out: bool) -> nn.Module:
        model, self._groups = self.run.model, None
        if self._mode == "bucket":
            scale = None if self.loss_scale is None else self.loss_scale.value
            bound = self.run.config.clip.max_norm
            self._groups = ShardedClip(bound, "equal", scale).attach(model)
        return model

    def _pass(self, last: bool) -> AbstractContextManager[None]:
        assert isinstance(self._replica, FSDPModule)
        self._replica.set_requires_gradient_sync(last)
        return nullcontext()

    def _clip(self) -> GradientReport:
        """Makes `.grad` this rank's shards of the clipped average."""
        return super()._clip() if self._groups is None else GradientReport.of(self._groups.report())

    def whole(self) -> EncoderForPreTraining:
        """A copy of the model on rank 0, and the sharded model on the others."""
        model = self.run.model
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(model, options=options)
        if not self.run.ranks.is_first:
            return model
        copy = model.fresh()
        copy.load_state_dict(whole)
        return copy.to(self.run.device).train()
