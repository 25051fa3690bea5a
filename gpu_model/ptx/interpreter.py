"""Runs kernels as nvcc compiled them, by an interpreter of PTX (gpu_model/README.md)."""

import ctypes
import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

from torch import Tensor

from gpu_model import build
from gpu_model.ptx import compiler

# Each instruction is a loop over 32 lanes, to be made vector instructions; and a multiplication and
# an addition stay two roundings.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

# When asynchronous copies land and wgmma writes its sums: Timing of ptx/block.h.
TIMINGS = ("seeded", "late", "unchecked")


@cache
def core() -> ctypes.CDLL:
    """The interpreter's library; compiled on first use."""
    library = build.load(build.ROOT / "gpu_model" / "ptx" / "interpreter.cpp", FLAGS, pattern=False)
    library.ptx_program.restype = ctypes.c_void_p
    library.ptx_free.argtypes = [ctypes.c_void_p]
    library.ptx_add.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    library.ptx_decode.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.ptx_kernels.argtypes = [ctypes.c_void_p]
    library.ptx_register.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    library.ptx_launch.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.POINTER(LaunchSettings),
    ]
    for name in ("ptx_add", "ptx_decode", "ptx_kernels", "ptx_register", "ptx_launch"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


class LaunchSettings(ctypes.Structure):
    """Of gpu_model/block/compiled.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("argument_bytes", ctypes.POINTER(ctypes.c_uint32)),
        ("argument_count", ctypes.c_uint32),
        ("policy", ctypes.c_int),
        ("seed", ctypes.c_uint64),
    )


class Program:
    """PTX of one or more files, and its kernels."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        """`texts`: PTX by the name that messages give it.

        Raises:
            RuntimeError: the text is not understood.
        """
        self.texts = dict(texts)
        self.handle = ctypes.c_void_p(core().ptx_program())
        weakref.finalize(self, core().ptx_free, self.handle)
        for name, text in texts.items():
            _check(core().ptx_add(self.handle, name.encode(), text.encode()))

    def kernels(self) -> list[str]:
        """Mangled names."""
        return core().ptx_kernels(self.handle).decode().split()

    def decode(self, kernel: str) -> None:
        """Decodes a kernel, which its first launch does otherwise.

        Raises:
            RuntimeError: an instruction is not known; the message names the line.
        """
        _check(core().ptx_decode(self.handle, kernel.encode()))

    def launch(
        self,
        kernel: str,
        *arguments: Tensor | ctypes._SimpleCData,
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (32, 1, 1),
        shared_bytes: int = 0,
        policy: int = 0,
        seed: int = 0,
        timing: str = "seeded",
        read_only: Sequence[Tensor] = (),
    ) -> None:
        """Runs a kernel that has no launcher.

        Args:
            arguments: a tensor, contiguous and on the CPU, is passed by its address.
            grid, block: sizes in x, y, z.
            shared_bytes: of dynamic shared memory.
            policy: which warp goes on (0, 1, 2: POLICIES of block_model.py).
            seed: of every choice.
            timing: one of TIMINGS.
            read_only: the tensors that the kernel must not write.

        Raises:
            RuntimeError: a fault; the message names block, thread and line.
        """
        library = core()
        library.ptx_clear()
        for tensor in arguments:
            if isinstance(tensor, Tensor):
                size = tensor.numel() * tensor.element_size()
                writable = all(tensor is not other for other in read_only)
                _check(library.ptx_register(tensor.data_ptr(), size, writable))
        values = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = (ctypes.c_uint32 * len(values))(*map(ctypes.sizeof, values))
        settings = LaunchSettings(
            tuple(grid), tuple(block), shared_bytes, pointers, sizes, len(values), policy, seed
        )
        set_timing(timing)
        _check(library.ptx_launch(self.handle, kernel.encode(), ctypes.byref(settings)))


@cache
def program_of(library_source: Path, arch: str) -> Program | None:
    """The compiled kernels of a source of gpu_model/kernels, for a compute capability such as
    "80"; None if it has none.

    Raises:
        RuntimeError: there is no nvcc, or it reports an error.
    """
    sources = list(compiler.cuda_sources(library_source))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # nvcc works on one core
        texts = list(pool.map(partial(compiler.ptx, arch=arch), sources))
    names = [f"{source.stem}.ptx" for source in sources]
    return Program(dict(zip(names, texts, strict=True))) if texts else None


def set_timing(timing: str) -> None:
    """Of all launches that follow; one of TIMINGS."""
    core().ptx_set_timing(TIMINGS.index(timing))


def _check(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())
