"""Builds the extension modules with ninja, straight from file names.

What a file is called says how it is compiled, so that a new operator needs no build change:
  csrc/*.cpp, csrc/cpu/*.cpp                            once, into _C
  csrc/<family>/*_cpu.cpp                               several as one file, into _C
  csrc/<family>/*_simd.cpp                              once per CPU instruction set, into _C
  csrc/<family>/*_fp32.cpp                              the same, but not for those with bf16
  csrc/<family>/*_bf16.cpp                              once per set that multiplies bf16, into _C
  csrc/<family>/*.cu, csrc/**/*_cuda.cpp                by nvcc, into _C_cuda
  csrc/<family>/*_sm90a.cu                              the same, but for sm_90a alone
  csrc/{balancer,host,text}/*.cpp                       together, into _host (C functions; no torch)

setuptools' own CUDAExtension is not used: it imports torch, refuses to build CUDA under a CPU-only
PyTorch, and cannot compile one file for several instruction sets.

Paths of this tree are given to the compilers relative to the build folder, so that what is compiled
stays valid when the tree moves or is copied.
"""

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import cuda_choice
import ready_wheel
from setuptools import Extension
from setuptools.command.build_ext import build_ext
from torch_location import find_torch

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CUDA_MODULE = "_C_cuda"
HOST_MODULE = "_host"
BINDING_OBJECTS = 3  # that the *_cpu.cpp files are compiled to; each has to read PyTorch's headers
# What is compiled uses the part of Python's interface that 3.10 and all later versions have, but
# for those without a global lock, which have none.
ABI3 = not sysconfig.get_config_var("Py_GIL_DISABLED")
PYTHON_INTERFACE = ["-DPy_LIMITED_API=0x030a0000"] if ABI3 else []

# Instruction sets of the *_simd.cpp files, best last; csrc/cpu/isa.h must list the same names.
X86_SIMD = {
    "generic": ["-O1"],  # for CPUs older than 2013, which need not wait for the compiler
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        # g++ 12 warns of uninitialised values in its own AVX-512 headers (GCC bug 105593).
        *("-mprefer-vector-width=512", "-Wno-uninitialized"),
    ],
}
X86_FP32 = dict(X86_SIMD)
X86_SIMD["avx512_bf16"] = [*X86_SIMD["avx512"], "-mavx512bf16"]
X86 = {
    "simd": X86_SIMD,
    "fp32": X86_FP32,
    "bf16": {
        "avx512_bf16": X86_SIMD["avx512_bf16"],
        "amx": [*X86_SIMD["avx512_bf16"], "-DBU_AMX"],
    },
}

# NEON is in every aarch64 CPU, so `generic` has it. On aarch64 g++ moves all loads of a loop to its
# start before it gives out registers; a 6 x 4 tile of sums then does not fit in them.
AARCH64_GENERIC = ["-fno-schedule-insns", "-Wno-ignored-optimization-argument"]
AARCH64_BF16 = {"neon_bf16": [*AARCH64_GENERIC, "-march=armv8.2-a+bf16+i8mm"]}
AARCH64 = {
    "simd": {"generic": AARCH64_GENERIC, **AARCH64_BF16},
    "fp32": {"generic": AARCH64_GENERIC},
    "bf16": AARCH64_BF16,
}


def isas() -> dict[str, dict[str, list[str]]]:
    """By kind of file: the instruction sets that it is compiled for, and their options."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return X86
    if machine in ("aarch64", "arm64"):
        return AARCH64
    return {"simd": {"generic": []}, "fp32": {"generic": []}}


def sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in CSRC.glob(pattern))


def extensions() -> list[Extension]:
    """All modules. NativeBuild ignores everything in them but the names, and decides on _C_cuda."""
    names = ["_C", HOST_MODULE, CUDA_MODULE]
    return [Extension(f"bert_unpad.{name}", sources=[]) for name in names]


class NinjaFile:
    """Collects compile and link steps and writes them as a build.ninja."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.include = f"-I{os.path.relpath(CSRC, folder)}"
        self.lines = ["ninja_required_version = 1.5"]
        self.targets: list[str] = []
        self.written: dict[Path, str] = {}  # files that only include others, and what they say

    def rule(self, name: str, command: str, depfile: bool, describe: str) -> None:
        self.lines += [f"rule {name}", f"  command = {command}", f"  description = {describe} $out"]
        if depfile:
            self.lines += ["  depfile = $out.d", "  deps = gcc"]

    def compile(
        self, rule: str, source: Path, flags: list[str], variant: str = "", header: str = ""
    ) -> str:
        """An object. `header`: of `precompile`, with the same flags."""
        stem = str(source.relative_to(CSRC)).replace("/", "_")
        obj = f"{rule}_{variant + '_' if variant else ''}{stem}.o"
        path = _escape(os.path.relpath(source, self.folder))
        if header:
            path += f" | {header}.gch"
            flags = [*flags, "-Winvalid-pch", "-include", header]
        self.lines += [f"build {obj}: {rule} {path}", f"  flags = {_join(flags)}"]
        return obj

    def compile_together(self, rule: str, sources: list[Path], flags: list[str], name: str) -> str:
        """One object of several sources: most of their time goes into the headers they share."""
        path = self._including(f"{name}.cpp", sources)
        self.lines += [f"build {rule}_{path}.o: {rule} {path}", f"  flags = {_join(flags)}"]
        return f"{rule}_{path}.o"

    def precompile(self, rule: str, header: Path, flags: list[str], name: str) -> str:
        """A header that files are compiled with, and are not to read again each."""
        path = self._including(f"{name}.hpp", [header])
        self.lines += [f"build {path}.gch: {rule} {path}", f"  flags = {_join(flags)}"]
        return path

    def _including(self, name: str, sources: list[Path]) -> str:
        includes = [f'#include "{source.relative_to(CSRC)}"\n' for source in sources]
        self.written[self.folder / name] = "".join(includes)
        return name

    def link(self, rule: str, target: str, objects: list[str], flags: list[str]) -> None:
        self.lines += [f"build {target}: {rule} {' '.join(objects)}", f"  flags = {_join(flags)}"]
        self.targets.append(target)

    def run(self, jobs: int | None, verbose: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join([*self.lines, f"default {' '.join(self.targets)}", ""])
        path = self.folder / "build.ninja"
        command = [_ninja(), "-C", str(self.folder)]
        jobs = jobs or _max_jobs()
        command += ["-j", str(jobs)] if jobs else []
        command += ["-v"] if verbose else []
        # Two ninjas at once spoil its list of dependencies; the second build waits here.
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for file, content in {**self.written, path: text}.items():
                if not file.exists() or file.read_text() != content:
                    file.write_text(content)
            status = subprocess.run(command).returncode
        if status:
            raise SystemExit("bert_unpad: compilation failed; the compiler's message is above")


def _max_jobs() -> int | None:
    """How many compilers may run at once by $MAX_JOBS; None: as many as ninja starts.

    Raises:
        SystemExit: it is no number of 1 or more.
    """
    wish = os.environ.get("MAX_JOBS", "")
    if wish and not (wish.isdecimal() and int(wish) >= 1):
        raise SystemExit(f"MAX_JOBS: expected a number of 1 or more, got {wish!r}")
    return int(wish) if wish else None


def _escape(path: Path | str) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _join(flags: list[str]) -> str:
    return " ".join(f"'{f}'" if " " in f or "\\" in f else f for f in flags).replace(
        "$ORIGIN", "'$$ORIGIN'"
    )


def _ninja() -> str:
    try:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        found = shutil.which("ninja")
        if found is None:
            raise SystemExit("ninja was not found; install it with `pip install ninja`") from None
        return found


def _compiler() -> str:
    wanted = os.environ.get("CXX", "g++")
    cxx = shutil.which(wanted.split()[0])
    if cxx is None:
        raise SystemExit(
            f"no C++ compiler: {wanted!r} was not found; install g++ >= 11 "
            "(Debian/Ubuntu: apt-get install g++) or set CXX"
        )
    return " ".join([cxx, *wanted.split()[1:]])


def _python(source: Path) -> list[str]:
    """What only files that define a Python module need."""
    if not source.name.startswith("module_"):
        return []
    return [f"-I{sysconfig.get_path('include')}", *PYTHON_INTERFACE]


class NativeBuild(build_ext):
    """build_ext that writes one build.ninja for all modules and runs it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.wheel = ready_wheel.find_wheel()
        self.torch = find_torch()
        self.cuda_path = Path(self.get_ext_fullpath(f"bert_unpad.{CUDA_MODULE}"))
        if self.wheel is not None:
            self._finalize_from_wheel(self.wheel)
            return
        self.nvcc, self.why_no_cuda = cuda_choice.choose_nvcc(
            self.torch, already_built=bool(self.inplace) and self.cuda_path.exists()
        )
        if self.nvcc is None:
            self.extensions = [e for e in self.extensions if not e.name.endswith(CUDA_MODULE)]

    def _finalize_from_wheel(self, wheel: Path) -> None:
        """Leaves the extensions that the wheel has and $BERT_UNPAD_CUDA wants."""
        there = ready_wheel.modules_of(wheel, ROOT)
        wish = os.environ.get("BERT_UNPAD_CUDA", "")
        if wish == "1" and not any(CUDA_MODULE in name for name in there):
            raise SystemExit(f"BERT_UNPAD_CUDA=1: expected a wheel with {CUDA_MODULE}, got {wheel}")
        self.extensions = [
            extension
            for extension in self.extensions
            if self.get_ext_filename(extension.name) in there
            and not (wish == "0" and extension.name.endswith(CUDA_MODULE))
        ]
        if len(self.extensions) < 2:
            raise SystemExit(f"BERT_UNPAD_WHEEL: expected one for this Python, got {wheel}")

    def get_ext_filename(self, fullname: str) -> str:
        if not ABI3:
            return str(super().get_ext_filename(fullname))
        return str(Path(*fullname.split(".")).with_suffix(".abi3.so"))

    def run(self) -> None:
        if self.wheel is None:
            folder = self._compile()
            self._place(lambda name: (folder / f"{name.rpartition('.')[2]}.so").read_bytes())
        else:
            with zipfile.ZipFile(self.wheel) as archive:
                self._place(lambda name: archive.read(self.get_ext_filename(name)))

    def _place(self, content: Callable[[str], bytes]) -> None:
        """Writes the modules, by their names, to where they belong."""
        for extension in self.extensions:
            target = Path(self.get_ext_fullpath(extension.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            # Written, then renamed: a process that has the old module mapped keeps its own file.
            temporary = target.with_suffix(".tmp")
            temporary.write_bytes(content(extension.name))
            os.replace(temporary, target)
        if not self.inplace:
            Path(self.build_lib, ready_wheel.RECORD).write_text(ready_wheel.digest(ROOT))
        for other in self.cuda_path.parent.glob("*.cpython-*.so") if ABI3 else ():
            other.unlink()  # of an earlier build: Python would take these first
        if self.cuda_path.exists() and str(self.cuda_path) not in self._modules():
            # Of an earlier build: it may not fit the `_C` that it would now be loaded beside.
            self.cuda_path.unlink()
            print(f"bert_unpad: removed {self.cuda_path}, which was not rebuilt", file=sys.stderr)

    def _compile(self) -> Path:
        """The folder that the modules are linked in."""
        torch = self.torch
        if torch is None:
            raise SystemExit("no PyTorch >= 2.11 was found; install it with `pip install torch`")
        folder = ROOT / "build" / f"native-{sysconfig.get_platform()}"
        ninja = NinjaFile(folder)
        cpp = [
            *("-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden"),
            *("-Wall", "-Wno-psabi", "-Wno-maybe-uninitialized"),
            *("-fno-math-errno", "-fno-trapping-math"),
            *(
                '"-ffile-prefix-map=$$PWD=."',
                f"-ffile-prefix-map={os.path.relpath(ROOT, folder)}=.",
            ),
            ninja.include,
        ]
        stable = ["-isystem", str(torch / "include"), "-DTORCH_TARGET_VERSION=0x020b000000000000"]
        cxx = _compiler()
        ninja.rule("cxx", f"{cxx} -MD -MF $out.d $flags -c $in -o $out", True, "C++")
        ninja.rule("ld", f"{cxx} -shared $in $flags -o $out", False, "link")
        self._cpu_module(ninja, cpp + stable, torch)
        found = sources("balancer/*.cpp", "host/*.cpp", "text/*.cpp")
        objects = [ninja.compile_together("cxx", found, cpp, "host")]
        ninja.link("ld", f"{HOST_MODULE}.so", objects, ["-lpthread"])
        if self.nvcc:
            self._cuda_module(ninja, self.nvcc, stable, torch)
        else:
            print(f"bert_unpad: CPU operators only ({self.why_no_cuda})", file=sys.stderr)
        ninja.run(self.parallel or None, bool(os.environ.get("BERT_UNPAD_VERBOSE")))
        return folder

    def get_outputs(self) -> list[str]:
        record = [] if self.inplace else [str(Path(self.build_lib, ready_wheel.RECORD))]
        return [*self._modules(), *record]

    def _modules(self) -> list[str]:
        return [self.get_ext_fullpath(extension.name) for extension in self.extensions]

    def _cpu_module(self, ninja: NinjaFile, flags: list[str], torch: Path) -> None:
        objects = [
            ninja.compile("cxx", source, [*flags, *_python(source)])
            for source in sources("module_cpu.cpp", "cpu/*.cpp")
        ]
        # They check arguments and call kernels, nothing that -O2 would make faster.
        binding_flags = [*flags, "-O1"]
        bindings = sources("schemas.cpp", "*/*_cpu.cpp")
        size = -(-len(bindings) // BINDING_OBJECTS)
        objects += [
            ninja.compile_together(
                "cxx", bindings[i : i + size], binding_flags, f"bindings_{i // size}"
            )
            for i in range(0, len(bindings), size)
        ]
        headers: dict[str, str] = {}
        for kind, sets in isas().items():
            for isa, options in sets.items():
                # Kernels do not throw; what unwinding needs would be shared between the sets.
                own = [*flags, "-O3", *options, "-fno-exceptions", f"-DBERT_UNPAD_ISA={isa}"]
                # ccache would not cache what a precompiled header goes into.
                if isa not in headers and "ccache" not in _compiler():
                    header = CSRC / "cpu" / "simd.h"
                    headers[isa] = ninja.precompile("cxx", header, own, isa)
                objects += [
                    ninja.compile("cxx", source, own, isa, headers.get(isa, ""))
                    for source in sources(f"*/*_{kind}.cpp")
                ]
        ninja.link("ld", "_C.so", objects, [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lpthread"])

    def _cuda_module(self, ninja: NinjaFile, nvcc: str, stable: list[str], torch: Path) -> None:
        arch_list = cuda_choice.arch_list(nvcc)
        archs = cuda_choice.arch_flags(arch_list)
        common = [
            *("-O3", "-std=c++20", "--expt-relaxed-constexpr", "-Xptxas=-v"),
            *cuda_choice.compression(nvcc),
            "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall",
            ninja.include,
        ]
        flags = [*common, *archs]
        # Hopper's own instructions: code for no other architecture, chosen when it runs.
        hopper = [*common, *cuda_choice.arch_flags("9.0a")]
        # nvcc splits a macro's value at commas unless they are escaped.
        names = "\\,".join(cuda_choice.arch_names(arch_list))
        cpp = [*flags, *stable]
        cpp += [f"-DBERT_UNPAD_CUDA_ARCHS={names}"]
        # ptxas reports registers and spills on stderr; kept beside the object for
        # benchmarks/cuda_build.py.
        compile_command = f"{nvcc} -MD -MF $out.d $flags -c $in -o $out 2> $out.log"
        ninja.rule("nvcc", f"{compile_command} || (cat $out.log && false)", True, "CUDA")
        ninja.rule("nvld", f"{nvcc} -shared $in $flags -o $out", False, "link")
        objects = [
            ninja.compile("nvcc", source, hopper if source.stem.endswith("_sm90a") else flags)
            for source in sources("*/*.cu")
        ]
        objects += [
            ninja.compile("nvcc", source, [*cpp, *_python(source)])
            for source in sources("*_cuda.cpp", "*/*_cuda.cpp")
        ]
        # The CUDA runtime is linked in, and hidden: its symbols would otherwise be taken from the
        # libcudart that PyTorch loads globally, which may be of another CUDA version.
        options = ["--cudart=static", "-Xlinker=--exclude-libs,ALL", *archs]
        torch_cpu = [f"-L{torch / 'lib'}", "-ltorch_cpu"]
        ninja.link("nvld", "_C_cuda.so", objects, [*torch_cpu, *options])
