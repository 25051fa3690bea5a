"""FSDP2: parameters, gradients and the optimizer's state of a model, shared out among all ranks."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from bert_unpad.nn import Encoder, EncoderForPreTraining
from bert_unpad.pretrain.config import PretrainConfig
from bert_unpad.pretrain.ranks import Ranks

__all__ = ["shard_model", "whole_model"]


def shard_model(model: EncoderForPreTraining, config: PretrainConfig, ranks: Ranks) -> None:
    """Shards a model with FSDP2, in place, if `optimizer.shard` asks for it.

    Each encoder layer is a group of its own. All other parameters are the root's: the decoder is
    the word embedding, and the root keeps its parameters whole from its forward pass to the end of
    its backward pass. Parameters stay fp32; gradients travel in `clip.wire_dtype`.
    """
    if config.optimizer.shard != "fsdp" or ranks.world_size == 1:
        return
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    wire = torch.bfloat16 if config.clip.wire_dtype == "bf16" else None
    policy = MixedPrecisionPolicy(reduce_dtype=wire)
    for encoder in (module for module in model.modules() if isinstance(module, Encoder)):
        for layer in encoder.layer:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def whole_model(model: EncoderForPreTraining, ranks: Ranks) -> EncoderForPreTraining:
    """The model with whole parameters, on rank 0; all ranks must call it.

    Returns:
        The model itself if it is not sharded; otherwise a copy on rank 0, and the sharded model on
        the others.
    """
    if not isinstance(model, FSDPModule):
        return model
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if not ranks.is_first:
        return model
    copy = model.fresh()
    copy.load_state_dict(whole)
    return copy.to(ranks.device).train()
