"""The CUDA kernels of rotary position embeddings, run on the model of a block."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from gpu_model.block_model import POLICIES
from gpu_model.build import compiler
from tests.support import reference
from tests.support.model_checks import DTYPES, load_kernels
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

MAX_PAIRS = 128


class RotaryCudaParams(ctypes.Structure):
    """Of csrc/rotary/rotary_cuda.h."""

    _fields_ = (
        ("dtype", ctypes.c_int),
        ("interleaved", ctypes.c_bool),
        ("wide_positions", ctypes.c_bool),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "pairs")),
        *((name, ctypes.c_void_p) for name in ("positions", "x")),
        *((name, ctypes.c_int64) for name in ("x_token_stride", "x_head_stride")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("out_token_stride", "out_head_stride")),
        ("steps", ctypes.c_uint64 * MAX_PAIRS),
    )


@pytest.fixture(scope="module")
def kernels():
    return load_kernels("rotary", "rotary_params_size", RotaryCudaParams)


def steps_of(theta: float, rotary_dim: int, scale: float) -> list[int]:
    """Turns from one position to the next in units of 2^-64, as csrc/rotary/arguments.h has
    them."""
    turns = [scale * theta ** (-2 * i / rotary_dim) / math.tau for i in range(rotary_dim // 2)]
    return [int(math.ldexp(turn % 1.0, 64)) for turn in turns]


def rotate(
    kernels, x: Tensor, positions: Tensor, out: Tensor | None = None, *, heads: int,
    theta: float = 10000.0, rotary_dim: int | None = None, interleaved: bool = False,
    position_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """x [tokens, N, head_dim], rotated in place or into `out`."""
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    out = x if out is None else out
    kernels.clear()
    for tensor in (positions, x, out)[: 2 if out is x else 3]:
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        kernels.register(memory, writable=tensor is out)
    steps = (ctypes.c_uint64 * MAX_PAIRS)(*steps_of(theta, rotary_dim, position_scale))
    params = RotaryCudaParams(
        DTYPES[x.dtype], interleaved, positions.dtype == torch.int64, len(x), heads,
        rotary_dim // 2, positions.data_ptr(), x.data_ptr(), *x.stride()[:2], out.data_ptr(),
        *out.stride()[:2], steps,
    )  # fmt: skip
    kernels.call("rotary_rotate", ctypes.byref(params))
    return out


# Several tokens in a block, and several in a thread; whole vectors, and one pair a thread; more
# pairs than fit a warp; one head of several in a thread.
SHAPES = [(37, 6, 64, None), (5, 9, 40, 32), (3, 2, 256, None), (9, 24, 16, None),
          (11, 3, 34, None), (6, 5, 7, 6), (2, 1, 2, None), (1, 40, 128, None)]  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_reference(kernels, shape, dtype, interleaved):
    tokens, heads, head_dim, rotary_dim = shape
    torch.manual_seed(derived(head_dim))
    kernels.set_device(multiprocessors=1)
    x = torch.randn(tokens, heads, head_dim).to(dtype)
    positions = torch.randint(-40_000, 40_000, (tokens,))
    settings = {
        "heads": max(heads - 1, 1),
        "rotary_dim": rotary_dim,
        "interleaved": interleaved,
        "theta": 160000.0,
        "position_scale": 0.7,
    }
    want = reference.rotary(x.double(), positions, **settings)
    for ids in (positions, positions.int()):
        results = []
        for policy in POLICIES:
            kernels.configure(policy, seed=1)
            results.append(rotate(kernels, x.clone(), ids, **settings))
        # A rounding, beside one of cosine and sine.
        close = {"rtol": torch.finfo(dtype).eps / 2 + 1e-6, "atol": 1e-6}
        torch.testing.assert_close(results[0].double(), want, **close)
        for result in results[1:]:
            assert torch.equal(result, results[0])
        # On the CPU the same angles, and the same formula but for fused roundings.
        on_cpu = ops.rotary_(x.clone(), ids, **settings)
        rtol = torch.finfo(dtype).eps * 2
        torch.testing.assert_close(results[0], on_cpu, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_unaligned_views(kernels, dtype, interleaved):
    """In place, and into a tensor of its own: nothing but the rotated heads is written."""
    torch.manual_seed(derived(0))
    positions, settings = torch.arange(6) * 5, {"heads": 3, "interleaved": interleaved}
    views = [
        lambda qkv: qkv[:, 1],
        lambda qkv: qkv.view(6, 12, 16)[:, 2:9],
        lambda qkv: qkv.view(12, 6, 16).transpose(0, 1),
    ]
    for offset in (0, 3):
        for view in views:
            store = torch.randn(6 * 3 * 4 * 16 + 3).to(dtype)
            x = view(store[offset : len(store) - 3 + offset].view(6, 3, 4, 16))
            want = rotate(kernels, x.clone(), positions, **settings)
            before = store.clone()
            out = rotate(kernels, x, positions, torch.zeros(x.shape, dtype=dtype), **settings)
            assert torch.equal(out[:, :3], want[:, :3])
            assert not out[:, 3:].any()
            assert torch.equal(store, before)
            assert torch.equal(rotate(kernels, x, positions, **settings), want)
            assert (store != before).sum() <= 6 * 3 * 16


def test_nothing_to_do(kernels):
    for shape, heads in (((0, 3, 8), 3), ((4, 3, 8), 0)):
        x = torch.ones(shape)
        rotate(kernels, x, torch.arange(shape[0]), heads=heads)
        assert torch.equal(x, torch.ones(shape))
