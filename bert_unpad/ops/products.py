"""The matrix products of a linear layer, forward and backward, and who computes them.

On a GPU, 16-bit products are cuBLASLt's, with what surrounds them done in their epilogues
(csrc/linear/matmul.h): the bias and the tanh GELU, the GELU's derivative, the bias's gradient, the
sum with a residual's gradient, the sum with a gradient that is already there. All other products
are PyTorch's.

The numbers of a CPU without 16-bit instructions are widened: on one with AVX-512 but no bf16,
PyTorch's bf16 matmul reaches 50 GFLOP/s where its fp32 matmul reaches 240. The product is taken in
fp32 and its result rounded once, which is also more accurate.
"""

import functools
import os
import platform
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from bert_unpad.ops.registration import register_cpu, register_fake

_ops = torch.ops.bert_unpad


@functools.cache
@torch.compiler.assume_constant_result  # a compiler could not look into what it calls
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has bf16 matrix or dot-product instructions."""
    from bert_unpad import _C

    if platform.machine() in ("x86_64", "AMD64"):
        return _C.cpu_isa() == "avx512_bf16"
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that x is multiplied in."""
    if x.device.type != "cpu" or (x.dtype == torch.bfloat16 and cpu_multiplies_bf16()):
        return x.dtype
    return torch.float32


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Keeps autocast from giving products another dtype than was chosen here."""
    available = torch.amp.is_autocast_available(device_type)  # on the meta device it is not
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


@functools.cache
def _cublaslt_wanted() -> bool:
    """BERT_UNPAD_CUBLASLT=0 leaves all products to PyTorch."""
    value = os.environ.get("BERT_UNPAD_CUBLASLT", "1")
    if value not in ("0", "1"):
        raise ValueError(f"BERT_UNPAD_CUBLASLT must be 0 or 1, got {value!r}")
    return value == "1"


def fused(x: Tensor, weight: Tensor) -> bool:
    """Whether cuBLASLt takes the products of x [..., in] and weight [out, in].

    Tensor cores read 8 numbers at once, so it wants multiples of 8. BERT's own layers are such; the
    next-sentence head, with its 2 outputs, is not.
    """
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[0] % 8 == 0
        and weight.shape[1] % 8 == 0
        and weight.numel() > 0
        and _cublaslt_wanted()
    )


def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias: [tokens, in] and [out, in] of `product_dtype(x)` -> [tokens, out]."""
    product = _ops.linear if fused(x, weight) else _forward
    return product(x, weight, bias, False)[0]


def dgrad(dy: Tensor, weight: Tensor, addend: Tensor | None = None) -> Tensor:
    """dy weight [+ addend]: [tokens, out] and [out, in] -> [tokens, in] of dy's dtype."""
    product = _ops.linear_dgrad if fused(dy, weight) else _dgrad
    return product(dy, weight, addend, None)


def wgrad(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias, of their own dtypes: dy^T x and the sum of dy's rows.

    The first is None where it has been added to `weight.grad` (see `accumulate_in_place`), the
    second where there is no bias.
    """
    target = _target(weight)
    if target is not None:
        add = _ops.linear_wgrad_ if fused(x, weight) else _add_wgrad
        dweight, dbias = None, add(dy, x, target, bias is not None)
    else:
        new = _ops.linear_wgrad if fused(x, weight) else _new_wgrad
        dweight, dbias = new(dy, x, bias is not None, weight.dtype)
    return dweight, None if bias is None else dbias.to(bias.dtype)


def accumulate_in_place(weight: Tensor, enabled: bool = True) -> None:
    """Lets backward passes add a linear layer's weight gradient to `weight.grad` in the product.

    Autograd would write the gradient to memory of its own, read it again and add it. This leaves
    that out where `.grad` is there already: in the second and later passes of an accumulation, and
    in all if gradients are zeroed and not dropped (with DDP's gradient_as_bucket_view they then go
    straight into the buckets). Autograd sees no gradient there, so hooks on the weight are given
    None (those after accumulation, and DDP's, run as ever), and `torch.autograd.grad` must not be
    asked for it.

    Args:
        weight: a parameter, [out, in].
        enabled: False takes it back.
    """
    weight._bert_unpad_accumulates = enabled


def time_algorithms(path: str | os.PathLike[str] | None) -> None:
    """Lets cuBLASLt's algorithms be timed, once for each kind of product, and keeps the best.

    A kind is a shape (tokens rounded up to 128), dtypes, epilogue and alignment on one sort of
    device. The first product of a kind that is not in the file makes the host wait, for some
    milliseconds; while a CUDA graph is captured nothing is timed. Without this, cuBLASLt's first
    guess is taken.

    Args:
        path: where choices are kept, for later runs too: the same file gives the same algorithms,
            and so the same bits. Its folder is made. None stops timing.

    Raises:
        RuntimeError: there is something else in the file, or it cannot be written.
        ImportError: bert_unpad was built without CUDA.
    """
    from bert_unpad import _C_cuda

    if path is not None:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    _C_cuda.set_linear_algorithm_file("" if path is None else os.fspath(path))


def _target(weight: Tensor) -> Tensor | None:
    """Where to add the weight's gradient, or None if autograd takes it."""
    if torch.compiler.is_compiling() or not getattr(weight, "_bert_unpad_accumulates", False):
        return None
    grad = weight.grad
    usable = grad is not None and grad.is_contiguous() and not torch.is_grad_enabled()
    return grad if usable and grad.dtype in (torch.float32, weight.dtype) else None


@register_fake("linear")
def _(x, weight, bias, gelu):
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape if gelu else (0,))


@register_fake("linear_dgrad")
def _(dy, weight, addend, pre):
    return dy.new_empty((dy.shape[0], weight.shape[1]))


@register_fake("linear_wgrad")
def _(dy, x, bias, dtype):
    sizes = (dy.shape[1], x.shape[1])
    return dy.new_empty(sizes, dtype=dtype), dy.new_empty((sizes[0] if bias else 0,), dtype=dtype)


@register_fake("linear_wgrad_")
def _(dy, x, dweight, bias):
    return dweight.new_empty((dy.shape[1] if bias else 0,))


# What the operators do on a CPU, by PyTorch's products.


def _wgrad(dy: Tensor, x: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    wide = product_dtype(x)
    dy, x = dy.to(wide), x.to(wide)
    return dy.t() @ x, dy.sum(0, dtype=torch.float32) if bias else dy.new_empty(0)


def _new_wgrad(dy: Tensor, x: Tensor, bias: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    dweight, dbias = _wgrad(dy, x, bias)
    return dweight.to(dtype), dbias.to(dtype)


def _add_wgrad(dy: Tensor, x: Tensor, dweight: Tensor, bias: bool) -> Tensor:
    added, dbias = _wgrad(dy, x, bias)
    dweight.add_(added)
    return dbias.to(dweight.dtype)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> tuple[Tensor, Tensor]:
    wide = product_dtype(x)
    pre = functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    if not gelu:
        return pre.to(x.dtype), x.new_empty(0)
    return functional.gelu(pre, approximate="tanh").to(x.dtype), pre.to(x.dtype)


def _dgrad(dy: Tensor, weight: Tensor, addend: Tensor | None, pre: Tensor | None) -> Tensor:
    wide = product_dtype(dy)
    dx, weight = dy.to(wide), weight.to(wide)
    dx = dx @ weight if addend is None else torch.addmm(addend.to(wide), dx, weight)
    if pre is not None:
        dx = torch.ops.aten.gelu_backward(dx, pre.to(wide), approximate="tanh")
    return dx.to(dy.dtype)


for _name, _function in (
    ("linear", _forward),
    ("linear_dgrad", _dgrad),
    ("linear_wgrad", _new_wgrad),
    ("linear_wgrad_", _add_wgrad),
):
    register_cpu(_name)(_function)
