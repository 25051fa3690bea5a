"""What the GPU tests of attention share: lengths, enough heads for every kernel, results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from tests.support.op_checks import RNG

# Around the edges of fragments, warps and blocks.
LENGTHS = [200, 0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513]
SCHEDULES = ["list", "groups"]
# A head of a sequence is a block of its own in the backward pass where there are enough of them.
FULL = pytest.mark.parametrize("full", [False, True], ids=["few heads", "full GPU"])


@pytest.fixture(params=["best", "any GPU's"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention on Hopper has its own kernels; there those of other GPUs are tested too."""
    if request.param != "best":
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("has no kernels with wgmma")
        monkeypatch.setenv("BERT_UNPAD_WGMMA", "0")


def heads_for(sequences: int, full: bool) -> int:
    """Two, or enough for a block on each multiprocessor."""
    if not full:
        return 2
    return -(-torch.cuda.get_device_properties().multi_processor_count // sequences)


def random_qkv(lengths: list[int], dtype: torch.dtype, heads: int = 2, head_dim: int = 64):
    """qkv and dout."""
    total = sum(lengths)
    qkv = torch.randn(total, 3, heads, head_dim, device="cuda").to(dtype)
    return qkv, torch.randn(total, heads, head_dim, device="cuda").to(dtype)


def results(qkv: Tensor, dout: Tensor, *batch, p: float = 0.1, **options) -> list[Tensor]:
    """out and dqkv."""
    x = qkv.detach().requires_grad_()
    rng = RNG.to(qkv.device)
    out = ops.varlen_attention(x, *batch, dropout_p=p, rng=rng, **options)
    out.backward(dout)
    return [out.detach(), x.grad]
