"""What the operators' functions check before PyTorch's own code touches a tensor.

C++ operators check all that they read (csrc/common/checks.h). But PyTorch's copies and products,
which run before or instead of them, crash where a storage was freed, and take a tensor on another
device for one whose memory they can read.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What activations may have."""

_PLAIN = (Tensor, nn.Parameter)
_NONE: Mapping[str, Tensor | None] = {}


def check_tensors(
    function: str,
    required: Mapping[str, Tensor],
    optional: Mapping[str, Tensor | None] = _NONE,
    *,
    read: bool = False,
) -> None:
    """Checks that arguments are tensors whose memory PyTorch can copy.

    Args:
        function: the name that the message begins with.
        required: arguments by name.
        optional: the same, which may be None.
        read: PyTorch's own code reads them, not an operator of C++, which would check them: check
            contiguous ones too, and that all are on one device.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: the storage of one was freed, or with `read` they are on several devices.
    """
    eager = not torch.compiler.is_compiling()
    for tensors, expected in ((required, "a tensor"), (optional, "a tensor or None")):
        for argument, t in tensors.items():
            if t is None and tensors is optional:
                continue
            if not isinstance(t, Tensor):
                raise TypeError(f"{function}: {argument}: expected {expected}, got {shown(t)}")
            if eager and (read or not t.is_contiguous()):
                check_storage(function, argument, t)
    if read:
        check_devices(function, {**required, **optional})


def shown(value: Any) -> str:
    """An argument of a wrong type as a message shows it: short ones with their value."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    text, kind = repr(value), type(value).__name__
    return f"{text} ({kind})" if len(text) <= 60 else f"a value of type {kind}"


def check_storage(function: str, argument: str, t: Tensor) -> None:
    """Raises a RuntimeError if the storage has less memory than sizes and strides describe, as in
    csrc/common/checks.h. Subclasses, such as those of a trace, have their own kinds of storage."""
    if type(t) not in _PLAIN:
        return
    try:
        there = t.untyped_storage().nbytes()
    except NotImplementedError:  # within torch.func
        return
    contiguous = t.is_contiguous()
    if contiguous and there >= t.nbytes and not t.storage_offset():
        return
    elements = t.numel()
    if not contiguous:  # so there are elements
        elements = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    needed = (t.storage_offset() + elements) * t.itemsize if elements else 0
    if there < needed:
        raise RuntimeError(
            f"{function}: {argument} must have a storage of at least {needed} bytes for shape "
            f"{list(t.shape)}, got one of {there}; was it freed?"
        )


def check_devices(function: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raises a RuntimeError unless all tensors are on the device of the first, which is not None.

    Args:
        function: the name that the message begins with.
        tensors: arguments by name.
    """
    first = device = None
    for argument, t in tensors.items():
        if t is None:
            continue
        if device is None:
            first, device = argument, t.device
        elif t.device != device:
            raise RuntimeError(
                f"{function}: {argument}: expected a tensor on {device} like {first}, "
                f"got one on {t.device}"
            )
