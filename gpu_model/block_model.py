"""Runs kernels of a library made by build.py, and says what they may touch and what is checked."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_model.ptx.interpreter import Program, core, program_of, set_timing

POLICIES = ("in_order", "uniform", "warp_first")
# The compute capability for which compiled kernels run in the place of sources.
_arch: str | None = None
# Compute capability -> bytes of shared memory that a block can have.
SHARED_BYTES = {
    (7, 5): 65536,
    (8, 0): 166912,
    (8, 6): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (12, 0): 101376,
}


@dataclass(frozen=True)
class Site:
    """A barrier or wait in kernel source that was passed; `passes` is summed over threads."""

    kind: str
    file: str
    line: int
    passes: int


@dataclass(frozen=True)
class Statistics:
    """Counts since the last reset. Bank conflicts are extra cycles of load_matrices."""

    mma: int
    load_matrices: int
    bank_conflict_cycles: int
    collectives: int
    switches: int


@contextmanager
def compiled_for(arch: str | None) -> Iterator[None]:
    """Within it every Model runs what nvcc makes of its kernels for a compute capability, such
    as "80", in the place of their sources; with None their sources."""
    global _arch
    before, _arch = _arch, arch
    try:
        yield
    finally:
        _arch = before


class Model:
    """One library and its state: policy, device, registered buffers.

    Kernels may touch registered tensors only, and tests say which of them they may write.
    """

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        self._chosen: Program | None = None  # by `running`
        self._timing = "seeded"
        library.bu_last_error.restype = ctypes.c_char_p
        library.bu_sites.restype = ctypes.c_char_p
        library.bu_configure.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_int]
        library.bu_register.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
        library.bu_ignore_site.argtypes = [ctypes.c_char_p, ctypes.c_uint]
        library.bu_use_compiled.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def configure(
        self,
        policy: str = "in_order",
        seed: int = 0,
        races: bool = True,
        timing: str = "seeded",
    ) -> None:
        """Sets which thread goes on when one waits (POLICIES; block.h says what they mean), the
        seed of every choice, whether shared memory is checked for races, and when compiled
        kernels' asynchronous work is done (TIMINGS of ptx/interpreter.py)."""
        self._timing = timing
        self.library.bu_configure(POLICIES.index(policy), seed, races)

    def set_device(self, capability: tuple[int, int] = (8, 0), multiprocessors: int = 4) -> None:
        """Sets what launchers learn about the device; its shared memory follows from the compute
        capability."""
        shared = SHARED_BYTES[capability]
        self.library.bu_set_device(multiprocessors, shared, *capability)

    def register(self, tensor: Tensor, writable: bool = True) -> Tensor:
        """Lets kernels read, and if `writable` write, a contiguous CPU tensor; returns it. The
        caller keeps it alive until `clear`."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError("the tensor must be contiguous and on the CPU")
        size = tensor.numel() * tensor.element_size()
        self._check(self.library.bu_register(tensor.data_ptr(), size, writable))
        return tensor

    def clear(self) -> None:
        """Forgets all registered tensors."""
        self.library.bu_clear()

    def call(self, function: str, *arguments: object) -> None:
        """Calls an exported function: tensors become pointers, None a null pointer, int int64_t,
        float float, bool int; other arguments go to ctypes as they are.

        Raises:
            RuntimeError: the function failed; the message names block, thread and source line.
        """
        self._select_program()
        self._check(getattr(self.library, function)(*map(_convert, arguments)))

    @contextmanager
    def running(self, program: Program) -> Iterator[None]:
        """Launches run these compiled kernels for the time of a `with` block."""
        self._chosen = program
        try:
            yield
        finally:
            self._chosen = None

    def _select_program(self) -> None:
        program = self._chosen
        if program is None and _arch is not None:
            program = program_of(self.library.source, _arch)
        # Every time: other Models may share the library.
        if program is not None:
            set_timing(self._timing)
        run = None if program is None else ctypes.cast(core().ptx_run, ctypes.c_void_p)
        self.library.bu_use_compiled(run, None if program is None else program.handle)

    def sites(self) -> list[Site]:
        """Barriers and waits passed since `forget_sites`, in the order of their first pass."""
        sites = []
        for line in self.library.bu_sites().decode().splitlines():
            kind, passes, number, file = line.split(" ", 3)
            sites.append(Site(kind, file, int(number), int(passes)))
        return sites

    def forget_sites(self) -> None:
        self.library.bu_forget_sites()

    def ignore_site(self, file: str, line: int) -> None:
        """Takes the barrier or wait at this line out of all kernels. `file` may leave out leading
        folders."""
        self.library.bu_ignore_site(file.encode(), line)

    def restore_sites(self) -> None:
        """Puts back what ignore_site took out."""
        self.library.bu_restore_sites()

    @contextmanager
    def without(self, site: Site) -> Iterator[None]:
        """Ignores a site for the time of a `with` block."""
        self.ignore_site(site.file, site.line)
        try:
            yield
        finally:
            self.restore_sites()

    def statistics(self, reset: bool = False) -> Statistics:
        values = (ctypes.c_int64 * 5)()
        self.library.bu_statistics(values)
        if reset:
            self.library.bu_reset_statistics()
        return Statistics(*values)

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self.library.bu_last_error().decode())


def _convert(argument: object) -> object:
    if argument is None or isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr() if argument is not None else None)
    if isinstance(argument, bool):
        return ctypes.c_int(argument)
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return argument
