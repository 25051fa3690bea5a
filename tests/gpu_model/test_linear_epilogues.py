"""Products whose epilogue the model of cuBLASLt refuses: kernels do what it would."""

import ctypes

import pytest
import torch
import torch.nn.functional as F

from tests.support.model_checks import DTYPES
from tests.support.model_linear import own_library
from tests.support.seeds import derived

LOW = (torch.bfloat16, torch.float16)
# The numbers of csrc/linear/cublaslt.h.
BIAS, GELU_AUX_BIAS, DGELU, BGRADB = 4, 164, 192, 512
NAMES = {BIAS: "BIAS", GELU_AUX_BIAS: "GELU_AUX_BIAS", DGELU: "DGELU", BGRADB: "BGRADB"}
TOKENS, IN, OUT = 37, 40, 136  # more columns than a block has, a last block that is not full


@pytest.fixture
def library(tmp_path):
    model = own_library(tmp_path)
    model.call("set_timing", False, b"")
    return model


def heuristic_calls(library):
    values = (ctypes.c_int64 * 8)()
    library.call("library_counts", values)
    return values[0]


def aligned(x):
    """A copy that begins at a multiple of 256 bytes: the alignment is a part of what products are
    known by."""
    memory = x.new_empty(x.numel() + 256)
    first = -(memory.data_ptr() // x.element_size()) % (256 // x.element_size())
    return memory[first : first + x.numel()].view(x.shape).copy_(x)


def run(library, epilogue, dtype):
    """Pairs of results and what they should be, by a product with this epilogue."""
    generator = torch.Generator().manual_seed(derived(epilogue))
    library.clear()

    def draw(*shape):
        x = torch.randn(shape, generator=generator).to(dtype)
        return library.register(aligned(x), writable=False)

    def new(*shape, dtype=dtype):
        return library.register(aligned(torch.full(shape, torch.nan, dtype=dtype)))

    sizes = (DTYPES[dtype], TOKENS, IN, OUT)
    x, weight, bias = draw(TOKENS, IN), draw(OUT, IN), draw(OUT)
    dy, before = draw(TOKENS, OUT), draw(TOKENS, IN)
    if epilogue in (BIAS, GELU_AUX_BIAS):
        y, pre = new(TOKENS, OUT), new(TOKENS, OUT) if epilogue == GELU_AUX_BIAS else None
        library.call("linear_forward", *sizes, x, weight, bias, y, pre)
        want = x.double() @ weight.double().T + bias.double()
        if pre is None:
            return [(y, want)]
        return [(pre, want), (y, F.gelu(want, approximate="tanh"))]
    if epilogue == DGELU:
        dx = new(TOKENS, IN)
        library.call("linear_dgrad", *sizes, dy, weight, None, before, dx)
        leaf = before.double().requires_grad_()
        F.gelu(leaf, approximate="tanh").backward(dy.double() @ weight.double())
        return [(dx, leaf.grad)]
    pairs = []
    for out_dtype in (dtype, torch.float32):
        dweight, dbias = new(OUT, IN, dtype=out_dtype), new(OUT, dtype=out_dtype)
        dweight.fill_(1)
        library.call("linear_wgrad", *sizes, dy, x, True, dweight, DTYPES[out_dtype], dbias)
        pairs += [(dweight, dy.double().T @ x.double() + 1), (dbias, dy.double().sum(0))]
    return pairs


def check(pairs):
    """One rounding of a sum."""
    for got, want in pairs:
        tolerance = 2 * torch.finfo(got.dtype).eps
        if got.dtype == torch.float32:
            tolerance = 1e-5
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("epilogue", NAMES, ids=NAMES.values())
def test_kernels_do_what_a_refused_epilogue_would(library, capfd, epilogue, dtype):
    for other in NAMES:
        check(run(library, other, dtype))
    assert capfd.readouterr().err == ""
    # What has an algorithm loses it; then kinds of products that never had one.
    library.call("refuse_epilogue", epilogue)
    check(run(library, epilogue, dtype))
    library.call("set_timing", False, b"")
    for other in NAMES:
        check(run(library, other, dtype))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("bert_unpad: warning: linear: cuBLASLt has no algorithm")
    assert f" epilogue {NAMES[epilogue]} " in line


@pytest.mark.parametrize("epilogue", NAMES, ids=NAMES.values())
def test_a_refusal_is_remembered(library, epilogue):
    library.call("refuse_epilogue", epilogue)
    run(library, epilogue, torch.bfloat16)
    asked = heuristic_calls(library)
    assert asked == (4 if epilogue == BGRADB else 2)  # with the epilogue and without it
    check(run(library, epilogue, torch.bfloat16))
    assert heuristic_calls(library) == asked


@pytest.mark.parametrize("epilogue", NAMES, ids=NAMES.values())
def test_without_the_plain_product_it_is_an_error(library, capfd, epilogue):
    library.call("set_library", 0, False)
    with pytest.raises(RuntimeError, match=r"linear: cuBLASLt has no algorithm for m = \d+, n"):
        run(library, epilogue, torch.bfloat16)
    assert capfd.readouterr().err == ""
