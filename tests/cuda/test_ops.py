"""CUDA operators: on a GPU their values, everywhere that they are built and registered.

The GPU tests compare with float64: an error in a 16-bit dtype may be at most twice that of plain
PyTorch computing the same formula in that dtype on the same GPU.
"""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

import bert_unpad
from bert_unpad import ops
from tests.support.cuda_checks import (
    DTYPES,
    GPU_ONLY,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
)
from tests.support.seeds import derived

built = pytest.mark.skipif(find_spec("bert_unpad._C_cuda") is None, reason="built without nvcc")


@built
def test_kernels_are_built_and_registered():
    """In its own process: elsewhere the CUDA module is loaded under a CUDA PyTorch only."""
    code = """
import torch, bert_unpad
from bert_unpad import _C_cuda
print(_C_cuda.archs(), _C_cuda.cuda_version())
names = [
    "bias_gelu", "varlen_attention", "varlen_cross_attention", "masked_cross_entropy",
    "dropout_add_layer_norm", "embedding_layer_norm", "glu",
]
for op in [f"{name}{part}" for name in names for part in ("", "_backward")] + [
    "masked_cross_entropy_backward_", "linear", "linear_dgrad", "linear_wgrad", "linear_wgrad_",
    "bias_gelu_fp8", "bias_gelu_fp8_backward", "quantize_fp8", "quantize_weights_fp8_",
    "quantize_fp8_scaled", "fp8_product", "fp8_product_", "rotary", "rotary_",
    "dropout_add_norm_sum_backward", "dropout_add_layer_norm_fp8",
]:
    print(torch._C._dispatch_has_kernel_for_dispatch_key(f"bert_unpad::{op}", "CUDA"))
"""
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    module, *kernels = out.stdout.splitlines()
    assert re.fullmatch(r"\d+\.\d+[af]?(\+PTX)?(,\d+\.\d+[af]?(\+PTX)?)* \d+\.\d+", module)
    assert kernels == ["True"] * 30


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of PyTorch")
@built
def test_import_loads_the_cuda_module():
    assert bert_unpad._library.cuda_missing is None


def bias_gelu_inputs(shape, dtype, bias_dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(derived(seed))

    def normal(*size):
        return torch.randn(*size, generator=generator, device="cuda")

    x, dy = (normal(*shape).mul(2).to(dtype) for _ in range(2))
    bias = None if bias_dtype is None else normal(shape[-1]).to(bias_dtype)
    return x, bias, dy


def bias_gelu_results(function, x, bias, dy):
    """y, dx and dbias (float32 zeros [0] without a bias)."""
    x = x.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    y = function(x, bias)
    y.backward(dy)
    return y.detach(), x.grad, x.new_zeros(0) if bias is None else bias.grad


def check_bias_gelu(x, bias, dy, approximate):
    def plain(x, bias):
        return F.gelu(x if bias is None else x + bias.to(x.dtype), approximate=approximate)

    def ours(x, bias):
        return ops.bias_gelu(x, bias, approximate=approximate)

    wide = [None if t is None else t.double() for t in (x, bias, dy)]
    want = bias_gelu_results(plain, *wide)
    baseline = bias_gelu_results(plain, x, bias, dy)
    got = bias_gelu_results(ours, x, bias, dy)
    for name, a, b, w in zip(("y", "dx", "dbias"), got, baseline, want, strict=True):
        if w.numel() == 0:
            assert a.numel() == 0
            continue
        scale = w.abs().max().clamp(min=1e-30)
        error, allowed = ((t.double() - w).abs().max() / scale for t in (a, b))
        allowed = 1e-5 if x.dtype == torch.float32 else max(2 * allowed, torch.finfo(x.dtype).eps)
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


class TestBiasGelu:
    pytestmark = GPU_ONLY

    @pytest.mark.sanitizer
    @pytest.mark.parametrize("approximate", ["none", "tanh"])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "shape",
        [
            *[
                (1, 5),  # of one number a bound would be that of its own size
                (3, 7),
                (5, 64),
                (300, 65),
                (1000, 3072),
                (2049, 4096),
                (4, 8192),
                (70_000, 8),
            ],
            *[(70_000, 8), (2, 3, 40), (33,), (0, 16), (5, 0)],
        ],
        ids=str,
    )
    def test_values(self, shape, dtype, approximate):
        for bias_dtype in {None, dtype, torch.float32}:
            x, bias, dy = bias_gelu_inputs(shape, dtype, bias_dtype)
            check_bias_gelu(x, bias, dy, approximate)

    @pytest.mark.sanitizer
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_addresses_that_do_not_allow_vector_loads(self, dtype):
        x, bias, dy = bias_gelu_inputs((100, 256), dtype, dtype)
        store = torch.empty(100 * 256 + 1, dtype=dtype, device="cuda")
        shifted = store[1:].view(100, 256)
        shifted.copy_(x)
        assert shifted.data_ptr() % 16 != 0
        check_bias_gelu(shifted, bias, dy, "none")
        check_bias_gelu(x, store[1:257], dy, "none")

    def test_same_bits_every_time(self):
        x, bias, dy = bias_gelu_inputs((4097, 1024), torch.bfloat16, torch.float32)
        first = bias_gelu_results(ops.bias_gelu, x, bias, dy)
        for _ in range(5):
            again = bias_gelu_results(ops.bias_gelu, x, bias, dy)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    @pytest.mark.parametrize("approximate", ["none", "tanh"])
    def test_agrees_with_the_cpu(self, approximate):
        x, bias, dy = bias_gelu_inputs((50, 200), torch.float32, torch.float32)

        def ours(x, bias):
            return ops.bias_gelu(x, bias, approximate=approximate)

        on_cpu = bias_gelu_results(ours, x.cpu(), bias.cpu(), dy.cpu())
        for a, b in zip(bias_gelu_results(ours, x, bias, dy), on_cpu, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())

    def test_runs_on_the_current_stream(self):
        x, bias, _ = bias_gelu_inputs((64, 1024), torch.float32, torch.float32)
        assert_runs_on_the_current_stream(lambda late: [ops.bias_gelu(late, bias)], x)

    def test_can_be_captured_in_a_graph(self):
        x, bias, dy = bias_gelu_inputs((64, 1024), torch.bfloat16, torch.bfloat16)
        op = torch.ops.bert_unpad
        assert_graph_takes_new_values(
            lambda: [op.bias_gelu(x, bias, False), *op.bias_gelu_backward(dy, x, bias, False)],
            x.neg_,
        )

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_runs_on_the_device_of_its_tensors(self):
        x, bias, _ = bias_gelu_inputs((64, 1024), torch.float32, torch.float32)
        y = ops.bias_gelu(x.to("cuda:1"), bias.to("cuda:1"))
        assert torch.equal(y.cpu(), ops.bias_gelu(x, bias).cpu())

    def test_opcheck(self):
        x, bias, dy = bias_gelu_inputs((6, 24), torch.float32, torch.float32)
        op = torch.ops.bert_unpad
        torch.library.opcheck(op.bias_gelu, (x.requires_grad_(), bias.requires_grad_(), False))
        torch.library.opcheck(op.bias_gelu_backward, (dy, x.detach(), bias.detach(), True))

    def test_wrong_arguments_are_named(self):
        x, bias, _ = bias_gelu_inputs((6, 24), torch.float32, torch.float32)
        for wrong, message in [
            (bias[:-1], "bias must have shape"),
            (bias.cpu(), "bias must be on the same device"),
            (bias.half(), "bias must be float32"),
        ]:
            with pytest.raises(RuntimeError, match=message):
                ops.bias_gelu(x, wrong)
        with pytest.raises(RuntimeError, match="float32, bfloat16 or float16"):
            ops.bias_gelu(x.double())

    @pytest.mark.large(12)
    def test_more_than_2_to_the_31_elements(self):
        rows, columns = 2**19 + 3, 4096
        x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
        x[-3:] = torch.randn(3, columns, device="cuda")
        y = ops.bias_gelu(x)
        assert torch.equal(y[-3:], ops.bias_gelu(x[-3:].clone()))
        assert not y[:-3].any()
