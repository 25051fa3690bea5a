"""Calls of the C functions of `_host`, the compiled library that knows neither Python nor PyTorch.

They are called by ctypes, so one file serves every version of Python; ctypes lets other threads go
on meanwhile. What they get wrong arguments for is checked here or raised by them.
"""

import ctypes
import operator
import weakref
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import DTypeLike, NDArray

_ERRORS = {1: ValueError, 2: MemoryError, 3: RuntimeError}  # codes of csrc/host/c_interface.h


def _load() -> ctypes.CDLL:
    found = sorted(Path(__file__).parent.glob("_host.*so"))
    if not found:
        raise ImportError("bert_unpad._host is not built; install the package with `pip install .`")
    return ctypes.CDLL(str(found[-1]))


_library = _load()
_library.bu_error.restype = ctypes.c_char_p
_library.bu_bytes.restype = ctypes.c_int64
_library.bu_bytes.argtypes = [ctypes.c_void_p]
_library.bu_free.restype = None
_library.bu_free.argtypes = [ctypes.c_void_p]
_library.bu_take.restype = None
_library.bu_take.argtypes = [ctypes.c_void_p, ctypes.c_void_p]


class Array(ctypes.Structure):
    """A contiguous array as C functions take it; of size -1: none."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_int64))


NONE = Array(None, -1)


class Handle:
    """What a C function made, freed when nothing refers to it any more."""

    def __init__(self, pointer: ctypes.c_void_p) -> None:
        self._as_parameter_ = pointer
        weakref.finalize(self, _library.bu_free, pointer)


def call(name: str, *arguments: Any) -> None:
    """Calls a function.

    Raises:
        ValueError: it refuses an argument; the message names it.
    """
    code = getattr(_library, name)(*arguments)
    if code:
        raise _ERRORS[code](_library.bu_error().decode())


def vector(name: str, value: object, dtype: DTypeLike) -> Array:
    """Returns an array that the caller keeps, for a call.

    Raises:
        TypeError: it is none, or of another dtype or layout.
    """
    if not is_vector(value) or value.dtype != dtype:
        kind = np.dtype(dtype).name
        raise TypeError(f"{name}: expected a contiguous one-dimensional array of {kind}")
    return Array(address(value), value.size)


def is_vector(value: object) -> TypeGuard[NDArray[Any]]:
    """Whether a value is an array of one dimension without gaps."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.flags.c_contiguous


def address(array: NDArray[Any]) -> int:
    """Returns where an array's values are."""
    return array.__array_interface__["data"][0]


def characters(value: bytes) -> Array:
    """Returns bytes that the caller keeps, for a call."""
    return Array(ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p), len(value))


def integer(name: str, value: Any, low: int = -(2**63), high: int = 2**63) -> int:
    """Returns an integer of [low, high), by default one of 64 bits.

    Raises:
        TypeError: it is no integer.
        ValueError: it is another one.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None
    if not low <= number < high:
        raise ValueError(f"{name}: expected an integer from {low} to {high - 1}, got {number}")
    return number


def unsigned(name: str, value: Any) -> int:
    """Returns an integer of 64 bits from 0 on; see `integer`."""
    return integer(name, value, 0, 2**64)


def take(pointer: ctypes.c_void_p, dtype: DTypeLike) -> NDArray[Any]:
    """Returns the values of a handle as an array, and frees it."""
    kind = np.dtype(dtype)
    out = np.empty(_library.bu_bytes(pointer) // kind.itemsize, kind)
    _library.bu_take(pointer, address(out))
    return out


def pointers(count: int) -> list[ctypes.c_void_p]:
    """Returns places for handles; pass them by `ctypes.byref`."""
    return [ctypes.c_void_p() for _ in range(count)]
