"""The matrix products of a linear layer, forward and backward, and which library computes them.

On a GPU, 16-bit products use cuBLASLt, whose epilogues also do the work around them
(csrc/linear/matmul.h): the bias and the tanh GELU, the GELU's derivative, the gradient of the bias,
and the sum with a residual's gradient or with a gradient that exists already. All other products
use PyTorch, with two exceptions on CPUs, both where measured faster:

- Weight gradients in bf16, and in fp32 where MKL is slow, are products of our own
  (csrc/linear/wgrad_bf16.cpp, wgrad_fp32.cpp), which transpose nothing, write an fp32 gradient and
  add up the bias's.
- MKL, which PyTorch takes for fp32, uses AVX-512 on Intel's CPUs only. Where it does not, other
  fp32 products are our own too (csrc/linear/product_fp32.cpp). oneDNN would be as fast, but keeps
  0.4 MB for every number of tokens. In bf16, PyTorch takes oneDNN, but adds the bias in another
  pass, so there we call it ourselves.

On a CPU without 16-bit instructions the products are computed in fp32. On a CPU with AVX-512 but no
bf16, PyTorch's bf16 matmul reaches 50 GFLOP/s and its fp32 matmul 240. The result is then rounded
only once, which is also more accurate.
"""

import functools
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from bert_unpad._C import cpu_isa, fast_bf16_dot_products, mkl_leaves_avx512_unused
from bert_unpad.ops import matrix_checks
from bert_unpad.ops.registration import register_cpu, register_fake, register_in_place

_ops = torch.ops.bert_unpad


# Constants of the machine, asked for once: torch.compile cannot trace calls into C++.
CPU_MULTIPLIES_BF16: bool = cpu_isa() in ("avx512_bf16", "amx", "neon_bf16")
"""Whether this CPU has bf16 matrix or dot-product instructions."""

_AVX512_UNUSED: bool = mkl_leaves_avx512_unused()
"""Whether this CPU has AVX-512 that MKL does not use."""

_PACKED_DTYPES: tuple[torch.dtype, ...] = (torch.float32,) * _AVX512_UNUSED + (torch.bfloat16,) * (
    cpu_isa() == "amx" or (_AVX512_UNUSED and fast_bf16_dot_products())
)
"""The dtypes in which our own product of weight gradients is faster than the libraries'."""


_NO_CHANGE = nullcontext()


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which x is multiplied."""
    if not x.is_cpu or (x.dtype == torch.bfloat16 and CPU_MULTIPLIES_BF16):
        return x.dtype
    return torch.float32


def autocasts(device_type: str) -> bool:
    """Whether autocast is on; the meta device has none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Keeps autocast from computing products in another dtype than the one chosen here."""
    return torch.autocast(device_type, enabled=False) if autocasts(device_type) else _NO_CHANGE


def as_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `t.to(dtype)`, without the call of PyTorch's operator where t has that dtype."""
    return t if t.dtype == dtype else t.to(dtype)


@functools.cache
def _cublaslt_wanted() -> bool:
    """Whether to use cuBLASLt; BERT_UNPAD_CUBLASLT=0 leaves all products to PyTorch."""
    value = os.environ.get("BERT_UNPAD_CUBLASLT", "1")
    if value not in ("0", "1"):
        raise ValueError(f"BERT_UNPAD_CUBLASLT: expected 0 or 1, got {value!r}")
    return value == "1"


def fused(x: Tensor, weight: Tensor) -> bool:
    """Whether cuBLASLt computes the products of x [..., in] and weight [out, in].

    Tensor cores read 8 numbers at once, so both sizes of the weight must be multiples of 8. They
    are in BERT's layers, but not in the next-sentence head with its 2 outputs.
    """
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[0] % 8 == 0
        and weight.shape[1] % 8 == 0
        and weight.numel() > 0
        and _cublaslt_wanted()
    )


def by_us(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` of x [..., in] and weight [out, in] takes another way than PyTorch's.

    Our own product in float32, where both sizes of the weight are multiples of 32; oneDNN in
    bfloat16.
    """
    return (
        _AVX512_UNUSED
        and x.is_cpu
        and x.dtype == weight.dtype
        and (_own_fits(weight) or (x.dtype == torch.bfloat16 and _onednn_wanted()))
        and weight.numel() > 0
        and not torch.compiler.is_exporting()
        and torch._C._get_tracing_state() is None  # exported programs run elsewhere too
    )


def _own_fits(weight: Tensor) -> bool:
    rows, columns = weight.shape
    return weight.dtype == torch.float32 and rows % 32 == 0 and columns % 32 == 0


def _onednn_wanted() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None
) -> Tensor:
    """Returns x weight^T + bias + addend by the library of choice, without a derivative.

    Args:
        x: [tokens, in].
        weight: [out, in], x's dtype; may be a transposed view.
        bias: [out] or None, x's dtype.
        addend: [tokens, out] or None, x's dtype; not with a bias.
    """
    if by_us(x, weight) and x.numel() > 0:
        if x.dtype == torch.float32:
            y = x.new_empty((x.shape[0], weight.shape[0]))
            _ops.packed_product_.default(y, x, weight, bias, addend)
            return y
        onednn = torch.ops.mkldnn._linear_pointwise
        if addend is None:
            return onednn(x, weight, bias, "none", [], "")
        return onednn.binary(x, addend, weight, bias, "add")
    if bias is not None:
        return functional.linear(x, weight, bias)
    # As functional.linear does, which dispatches two operators more.
    weight = weight.t()
    return torch.mm(x, weight) if addend is None else torch.addmm(addend, x, weight)


def product_into(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Writes x weight^T + bias to y, without a derivative, and returns y.

    Args:
        y: [tokens, out], x's dtype; its rows may lie apart.
        x, weight, bias: as of `product`.
    """
    if x.dtype == torch.float32 and by_us(x, weight):
        _ops.packed_product_.default(y, x, weight, bias, None)
        return y
    # Autocast does not change calls with `out`.
    if bias is None:
        return torch.mm(x, weight.t(), out=y)
    return torch.addmm(bias, x, weight.t(), out=y)


def _opaque(x: Tensor, weight: Tensor) -> bool:
    """Whether an operator of ours computes the product, which torch.compile does not look into."""
    return fused(x, weight) or (torch.compiler.is_compiling() and by_us(x, weight))


def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x weight^T + bias: [tokens, in], [out, in] of `product_dtype(x)` -> [tokens, out]."""
    if _opaque(x, weight):
        return _ops.linear.default(x, weight, bias, False)[0]
    return as_dtype(_wide_product(x, weight, bias), x.dtype)


def dgrad(dy: Tensor, weight: Tensor, addend: Tensor | None = None) -> Tensor:
    """Returns dy weight [+ addend]: [tokens, out] and [out, in] -> [tokens, in], of dy's dtype."""
    product = _ops.linear_dgrad.default if _opaque(dy, weight) else _dgrad
    return product(dy, weight, addend, None)


def wgrad(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of weight (dy^T x) and bias (the sum of dy's rows), in their dtypes.

    The first is None if it went to `weight.grad` (see `accumulate_in_place`), the second if there
    is no bias.
    """
    target = gradient_target(weight)
    if target is not None:
        write = _ops.linear_wgrad_.default if fused(x, weight) else _write_wgrad
        dweight, dbias = None, write(dy, x, *target, bias is not None)
    else:
        new = _ops.linear_wgrad.default if fused(x, weight) else cpu_wgrad
        dweight, dbias = new(dy, x, bias is not None, weight.dtype)
    return dweight, None if bias is None else as_dtype(dbias, bias.dtype)


def accumulate_in_place(weight: Tensor, enabled: bool = True) -> None:
    """Lets the backward pass add a linear layer's weight gradient directly to `weight.grad`.

    Autograd writes a gradient to new memory, reads it again and adds it. This saves that if `.grad`
    exists: in the second and later passes of an accumulation, and in all passes if gradients are
    zeroed instead of set to None. (With DDP's gradient_as_bucket_view the gradients then go
    straight into the buckets.) Autograd then sees no gradient of the weight. So hooks on the weight
    get None (DDP's hooks, and hooks after accumulation, run as usual), and `torch.autograd.grad`
    cannot return it.

    Args:
        weight: a parameter, [out, in].
        enabled: False turns it off again.
    """
    weight._bert_unpad_accumulates = enabled  # type: ignore[attr-defined]


class InPlaceGradients:
    """Watches which weight gradients the products of a pass may add in place, for a `with` block
    around its forward and backward pass; one at a time.

    Args:
        first: weights whose first gradient takes the place of what `.grad` holds, so that nothing
            has to set that to zero before. Autograd adds what it has itself after all products.

    Raises:
        RuntimeError: the block is within another, or no product wrote one of `first`.
    """

    current: ClassVar["InPlaceGradients | None"] = None

    def __init__(self, first: Iterable[Tensor] = ()) -> None:
        self._first = {id(weight): weight for weight in first}
        self._weights: dict[int, Tensor] = {}

    @property
    def weights(self) -> list[Tensor]:
        """Weights that `accumulate_in_place` was called for and that had a gradient."""
        return list(self._weights.values())

    def note(self, weight: Tensor) -> None:
        """A product computes a gradient of this weight."""
        self._weights[id(weight)] = weight

    def accumulates(self, weight: Tensor) -> bool:
        """Whether the gradient that comes now is added to what is there."""
        return self._first.pop(id(weight), None) is None

    def __enter__(self) -> "InPlaceGradients":
        if InPlaceGradients.current is not None:
            raise RuntimeError("InPlaceGradients: expected one block at a time, got another in it")
        InPlaceGradients.current = self
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        InPlaceGradients.current = None
        if error is None and self._first:
            shapes = [list(weight.shape) for weight in self._first.values()]
            raise RuntimeError(
                f"first: expected weights that products of this pass write, got others of {shapes}"
            )


def time_algorithms(enabled: bool = True, *, path: str | os.PathLike[str] | None = None) -> None:
    """Says how linear layers on a GPU choose among cuBLASLt's algorithms.

    By default cuBLASLt's best guesses are timed once for each kind of product, and the process uses
    the fastest from then on, in all threads. A kind of product has a shape (with tokens rounded up
    to 128), dtypes, an epilogue, an alignment and a model of GPU. The first product of a kind makes
    the host wait for some milliseconds, and takes up to 32 MiB and a second result for that time. A
    product that is first met while its CUDA graph is captured is not timed: it takes cuBLASLt's
    own first guess, as all do without timing.

    Earlier choices are forgotten; CUDA graphs keep theirs.

    Args:
        enabled: whether to time.
        path: file that keeps the choices, also for later runs: the same file gives the same
            algorithms, and so the same bits. Its folder is created. Without one, another run may
            choose another algorithm, whose results differ in their rounding.

    Raises:
        ValueError: a path without timing.
        TypeError: `enabled` is not a bool.
        RuntimeError: the file holds something else, or cannot be written.
        ImportError: bert_unpad was built without CUDA.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: expected a bool, got {enabled!r}")
    if path is not None and not enabled:
        raise ValueError(f"path: expected None where enabled is False, got {os.fspath(path)!r}")
    from bert_unpad import _C_cuda

    if path is not None:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    _C_cuda.set_linear_timing(enabled, "" if path is None else os.fspath(path))


def gradient_target(weight: Tensor) -> tuple[Tensor, bool] | None:
    """Returns the tensor that a product writes the weight's gradient to, and whether it adds to
    what is there; None if autograd should add it."""
    if torch.compiler.is_compiling() or not getattr(weight, "_bert_unpad_accumulates", False):
        return None
    watch = InPlaceGradients.current
    if watch is not None:
        watch.note(weight)
    gradient = weight.grad
    if torch.is_grad_enabled() or gradient is None or not takes_product(weight):
        return None
    return gradient, watch is None or watch.accumulates(weight)


def takes_product(weight: Tensor) -> bool:
    """Whether `.grad` is memory that a product can write."""
    grad = weight.grad
    dtypes = (torch.float32, weight.dtype)
    return grad is not None and grad.is_contiguous() and grad.dtype in dtypes


@register_fake("linear")
def _(x, weight, gelu):
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape if gelu else (0,))


@register_fake("linear_dgrad")
def _(dy, weight):
    return dy.new_empty((dy.shape[0], weight.shape[1]))


@register_fake("linear_wgrad")
def _(dy, x, bias, dtype):
    sizes = (dy.shape[1], x.shape[1])
    return dy.new_empty(sizes, dtype=dtype), dy.new_empty((sizes[0] if bias else 0,), dtype=dtype)


@register_fake("linear_wgrad_")
def _(dy, dweight, bias):
    return dweight.new_empty((dy.shape[1] if bias else 0,))


register_in_place("packed_product_")


@register_fake("packed_wgrad_")
def _(dy, dweight, bias):
    return dweight.new_empty((dy.shape[1] if bias else 0,))


# The operators on a CPU.


def _packed(dy: Tensor, x: Tensor) -> bool:
    """Whether our own product computes dy^T x."""
    return (
        dy.is_cpu
        and dy.dtype == x.dtype
        and dy.dtype in _PACKED_DTYPES
        and dy.shape[1] % 32 == 0
        and x.shape[1] % 32 == 0
    )


def _wgrad(dy: Tensor, x: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    wide = product_dtype(x)
    dy, x = as_dtype(dy, wide), as_dtype(x, wide)
    return torch.mm(dy.t(), x), dy.sum(0, dtype=torch.float32) if bias else dy.new_empty(0)


def cpu_wgrad(dy: Tensor, x: Tensor, bias: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns dy^T x and, if `bias`, the sum of dy's rows, else an empty tensor; in `dtype`."""
    if _packed(dy, x):
        dweight = dy.new_empty((dy.shape[1], x.shape[1]), dtype=torch.float32)
        dbias = _ops.packed_wgrad_.default(dy.contiguous(), x.contiguous(), dweight, False, bias)
    else:
        dweight, dbias = _wgrad(dy, x, bias)
    return as_dtype(dweight, dtype), as_dtype(dbias, dtype)


def _write_wgrad(dy: Tensor, x: Tensor, dweight: Tensor, accumulate: bool, bias: bool) -> Tensor:
    if _packed(dy, x) and dweight.dtype == torch.float32:
        return _ops.packed_wgrad_.default(
            dy.contiguous(), x.contiguous(), dweight, accumulate, bias
        )
    product, dbias = _wgrad(dy, x, bias)
    if accumulate:
        dweight.add_(product)
    else:
        dweight.copy_(product)
    return as_dtype(dbias, dweight.dtype)


def _wide_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = product_dtype(x)
    bias = None if bias is None else as_dtype(bias, wide)
    return product(as_dtype(x, wide), as_dtype(weight, wide), bias)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> tuple[Tensor, Tensor]:
    pre = _wide_product(x, weight, bias)
    if not gelu:
        return as_dtype(pre, x.dtype), x.new_empty(0)
    return functional.gelu(pre, approximate="tanh").to(x.dtype), pre.to(x.dtype)


def _dgrad(dy: Tensor, weight: Tensor, addend: Tensor | None, pre: Tensor | None) -> Tensor:
    wide = product_dtype(dy)
    addend = None if addend is None else as_dtype(addend, wide)
    dx = product(as_dtype(dy, wide), as_dtype(weight, wide).t(), None, addend)
    if pre is not None:
        dx = torch.ops.aten.gelu_backward(dx, pre.to(wide), approximate="tanh")
    return as_dtype(dx, dy.dtype)


for _name, _function, _check in (
    ("linear", _forward, matrix_checks.check_linear),
    ("linear_dgrad", _dgrad, matrix_checks.check_dgrad),
    ("linear_wgrad", cpu_wgrad, matrix_checks.check_wgrad),
    ("linear_wgrad_", _write_wgrad, matrix_checks.check_wgrad_),
):
    register_cpu(_name, _check)(_function)
