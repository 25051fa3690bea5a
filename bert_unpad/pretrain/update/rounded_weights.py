"""Which weights an optimizer keeps rounded beside those that it updates."""

from __future__ import annotations

import torch
from torch import nn

from bert_unpad.nn import Encoder
from bert_unpad.ops.matmul import product_dtype
from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.pretrain.config import PretrainConfig
from bert_unpad.pretrain.config.limits import MODELS_DIFFER
from bert_unpad.pretrain.parallel import WAYS


def round_weights_in_updates(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: PretrainConfig, device: torch.device
) -> None:
    """Lets the optimizer write the linear layers' weights as their products take them too, in 16 or
    8 bits, which saves every forward pass to round them: where it can, and nothing else changes
    weights."""
    if (
        config.precision == "fp32"
        or not (isinstance(optimizer, FusedOptimizer) and optimizer.rounds)
        or WAYS[config.optimizer.shard].shares_state
        or config.comm.hook in MODELS_DIFFER
        or config.compile
    ):
        return
    weights = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    weights = {w for w in weights if w.requires_grad}
    encoders = [m for m in model.modules() if isinstance(m, Encoder)]
    in_8_bits = weights.intersection(w for encoder in encoders for w in encoder.fp8_weights)
    optimizer.keep_rounded(in_8_bits, torch.float8_e4m3fn)
    dtype = torch.float16 if config.precision == "fp16" else torch.bfloat16
    if product_dtype(torch.empty(0, dtype=dtype, device=device)) == dtype:
        optimizer.keep_rounded(weights - in_8_bits, dtype)
