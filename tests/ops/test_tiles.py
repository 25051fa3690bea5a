"""The kernels for AMX with a software model of its tiles, so that CPUs without AMX test them too.

On a CPU with AMX also the model against the instructions.
"""

import ctypes
import platform

import pytest
import torch
from torch import Tensor

from bert_unpad import _C, ops
from bert_unpad.ops.encoder_layer import pack_weight
from gpu_model import build
from tests.support.paths import ROOT
from tests.support.seeds import derived

SOURCE = ROOT / "tests" / "support" / "tile_kernels.cpp"
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
RNG = torch.tensor([11, 12])

_BUILT = _C.built_isas().split(",")
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or _BUILT.index(_C.cpu_isa()) < _BUILT.index("avx512"),
    reason="the rest of the kernels needs AVX-512",
)
needs_amx = pytest.mark.skipif(_C.cpu_isa() != "amx", reason="needs a CPU with AMX")


def compiled(isa: str, *flags: str) -> ctypes.CDLL:
    return build.load(SOURCE, [*AVX512, "-DBU_AMX", f"-DBERT_UNPAD_ISA={isa}", *flags])


@pytest.fixture(scope="module")
def model() -> ctypes.CDLL:
    # Without bf16 instructions: any CPU with AVX-512 runs it.
    return compiled("tile_model", '-DBU_TILE_MODEL="tests/support/tile_model.h"')


@pytest.fixture(scope="module")
def instructions() -> ctypes.CDLL:
    return compiled("tile_instructions", "-mavx512bf16")


def pointer(t: Tensor) -> ctypes.c_void_p:
    assert t.is_contiguous()
    return ctypes.c_void_p(t.data_ptr())


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


@needs_amx
@pytest.mark.parametrize("kind", ["normal", "denormal", "infinite"])
def test_the_model_is_that_of_the_hardware(model, instructions, kind: str) -> None:
    torch.manual_seed(derived(0))
    for _ in range(50):
        a, b, c = bf16(16, 32), bf16(16, 32), torch.randn(16, 16)
        if kind == "denormal":
            a, b, c = a * 2.0**-70, b * 2.0**-60, c * 2.0**-128
        if kind == "infinite":
            a[3, 5], b[7, 9], c[1, 1] = torch.inf, torch.nan, -torch.inf
        results = []
        for library in (model, instructions):
            out = c.clone()
            library.tile_product(pointer(a), pointer(b), pointer(out))
            results.append(out)
        torch.testing.assert_close(*results, atol=0, rtol=0, equal_nan=True)


def attention(library: ctypes.CDLL, qkv: Tensor, dout: Tensor, p: float) -> list[Tensor]:
    tokens, _, heads, head_dim = qkv.shape
    out, dqkv, lse = torch.empty_like(dout), torch.empty_like(qkv), torch.empty(heads, tokens)
    library.attention(
        *map(pointer, (qkv, dout, out, dqkv, lse)),
        *(tokens, heads, head_dim, ctypes.c_float(head_dim**-0.5), ctypes.c_double(p)),
        *map(ctypes.c_int64, RNG.tolist()),
    )
    return [out, dqkv]


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 1), (33, 32), (70, 40), (170, 64), (40, 128)])
def test_attention(model, tokens: int, head_dim: int, p: float) -> None:
    torch.manual_seed(derived(tokens))
    qkv, dout = bf16(tokens, 3, 2, head_dim), bf16(tokens, 2, head_dim)
    got = attention(model, qkv, dout, p)
    # The operator in fp32 draws the same masks.
    exact = qkv.float().requires_grad_()
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
    out = ops.varlen_attention(exact, cu_seqlens, tokens, dropout_p=p, rng=RNG)
    out.backward(dout.float())
    for name, a, b in zip(("out", "dqkv"), got, (out.detach(), exact.grad), strict=True):
        # Weights, the scores' gradients and the result are rounded once each.
        assert (a.float() - b).abs().max() <= 0.015 * b.abs().max(), name


@needs_amx
def test_attention_by_tiles_is_that_of_the_model(model) -> None:
    torch.manual_seed(derived(5))
    qkv, dout = bf16(90, 3, 2, 64), bf16(90, 2, 64)
    got = qkv.clone().requires_grad_()
    cu_seqlens = torch.tensor([0, 90], dtype=torch.int32)
    out = ops.varlen_attention(got, cu_seqlens, 90, dropout_p=0.1, rng=RNG)
    out.backward(dout)
    for a, b in zip(attention(model, qkv, dout, 0.1), (out.detach(), got.grad), strict=True):
        # Compilers may fuse other multiplications and additions: a unit in the last place of bf16.
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7 * b.abs().max().item() / 100)


def weight_gradient(
    library: ctypes.CDLL, dy: Tensor, x: Tensor, dweight: Tensor, accumulate: bool
) -> Tensor:
    """Computes dweight in place; returns the bias's gradient."""
    (tokens, out), width = dy.shape, x.shape[1]
    dbias = torch.empty(out)
    # Kernels store whole cache lines at addresses that are multiples of one.
    scratch = torch.empty(-(-tokens // 32) * 32 * (out + width), dtype=torch.bfloat16)
    library.weight_gradient(
        *map(pointer, (dy, x)),
        *map(ctypes.c_int64, (tokens, out, width)),
        accumulate,
        *map(pointer, (dweight, dbias, scratch)),
    )
    return dbias


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("tokens", [1, 32, 75])
def test_weight_gradient(model, tokens: int, accumulate: bool) -> None:
    torch.manual_seed(derived(tokens))
    dy, x, before = bf16(tokens, 64), bf16(tokens, 96), torch.randn(64, 96)
    dweight = before.clone()
    dbias = weight_gradient(model, dy, x, dweight, accumulate)
    want = dy.double().T @ x.double() + (before.double() if accumulate else 0)
    torch.testing.assert_close(dweight.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dbias.double(), dy.double().sum(0), rtol=1e-5, atol=1e-5)


@needs_amx
def test_the_model_of_bytes_is_that_of_the_hardware(model, instructions) -> None:
    a, b = torch.randint(256, (16, 64)).byte(), torch.randint(256, (16, 64)).byte()
    results = []
    for library in (model, instructions):
        c = torch.arange(256, dtype=torch.int32)
        library.tile_product_bytes(pointer(a), pointer(b), pointer(c))
        results.append(c)
    assert torch.equal(*results)


BLOCKS = [(0, 50, 0, 64), (0, 16, 64, 32), (7, 33, 32, 32), (49, 1, 0, 64), (18, 17, 64, 32)]
"""First row and rows, first column and columns of a product [50, 96]."""


def sizes(depth: int, block: tuple[int, ...]) -> tuple[ctypes.c_int64, ...]:
    return tuple(map(ctypes.c_int64, (depth, 96, *block)))


def parts(block: tuple[int, ...], want: Tensor) -> tuple[Tensor, Tensor]:
    """A result with a sentinel outside of the block, and what is expected there."""
    row, rows, column, columns = block
    expected = torch.full((50, 96), 7.0)
    area = slice(row, row + rows), slice(column, column + columns)
    expected[area] = want[area].float()
    return torch.full((50, 96), 7.0), expected


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("depth", [32, 96])
def test_product_of_bf16(model, depth: int, block: tuple[int, ...]) -> None:
    x, weight, bias, addend = bf16(66, depth), torch.randn(96, depth), *map(torch.randn, (96, 96))
    addend = addend.expand(50, 96).contiguous()
    panels = weight.bfloat16().view(6, 16, depth // 2, 2).transpose(1, 2).contiguous()
    want = x[:50].double() @ weight.bfloat16().double().T + bias + addend
    y, expected = parts(block, want)
    model.bf16_product(*map(pointer, (x, panels, bias, addend, y)), *sizes(depth, block))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("depth", [64, 192])
def test_product_of_8_bits(model, depth: int, block: tuple[int, ...]) -> None:
    packed = pack_weight(torch.randn(96, depth), torch.int8)
    panels = packed[: 128 * depth].view(torch.int8)
    scales, sums = packed[128 * depth :].view(torch.float32).split(128)
    sums = sums.view(torch.int32)
    x, zeros = torch.randint(256, (66, depth)).byte(), torch.randint(256, (50,)).int()
    row_scales, bias = torch.rand(50), torch.randn(96)
    addend = torch.randn(50, 96)
    whole = panels.view(2, depth // 4, 64, 4).permute(0, 2, 1, 3).reshape(128, depth)[:96]
    want = (x[:50].double() - zeros[:, None]) @ whole.double().T
    want = want * scales[:96].double() * row_scales[:, None].double() + bias + addend
    y, expected = parts(block, want)
    model.int8_product(
        *map(pointer, (x, row_scales, zeros, panels, scales, sums, bias, addend, y)),
        *sizes(depth, block),
    )
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-4)
