"""Reports what this installation consists of and whether it works: `python -m bert_unpad.info`.

Look at it first, and paste it into a bug report, when an operator is missing or slow. If compiled
modules cannot be loaded, it still works and says why. With --check it runs every operator instead,
and compares the results with plain PyTorch.
"""

import argparse
import contextlib
import importlib
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import bert_unpad
from bert_unpad import _library
from bert_unpad._capability import reaches
from bert_unpad._closed_pipe import run_main

DISPATCH_KEYS = ("CPU", "CUDA", "Autograd")
UNKNOWN = "unknown (module not loaded)"


def collect() -> dict[str, Any]:
    """Collects the content of the report, as JSON-compatible data.

    Returns:
        A dict with the sections `versions`, `modules` (per compiled module: `loaded`, `files`, and
        `missing`, the reason why it is not loaded, or None), `cpu`, `cuda` and `operators` (per
        operator and dispatch key, whether a kernel is registered). Memory is in bytes. A value that
        only a missing module knows is None; `served` says whether the CUDA operators run on a GPU.
    """
    modules = _modules()
    archs = _names(_ask("_C_cuda", "archs", modules))
    return {
        "versions": {
            "bert_unpad": bert_unpad.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "torch_cuda": torch.version.cuda,
            "built_with_cuda": _ask("_C_cuda", "cuda_version", modules),
            "os": platform.platform(),
        },
        "modules": modules,
        "cpu": {
            "model": _cpu_model(),
            "logical_cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "instruction_set": _ask("_C", "cpu_isa", modules),
            "instruction_sets_built": _names(_ask("_C", "built_isas", modules)),
        },
        "cuda": {"architectures_built": archs, "gpus": _gpus(archs)},
        "operators": _operators(),
    }


def _modules() -> dict[str, dict[str, Any]]:
    missing = {"_C": _library.cpu_missing, "_C_cuda": _library.cuda_missing}
    missing["_host"] = None
    try:
        importlib.import_module("bert_unpad._host_calls")
    except (ImportError, OSError) as error:
        missing["_host"] = str(error)
    return {
        name: {"loaded": why is None, "missing": why, "files": _library.built_files(name)}
        for name, why in missing.items()
    }


def _ask(module: str, function: str, modules: dict[str, dict[str, Any]]) -> str | None:
    """Returns a compiled module's result or the text of its error; None if it is not loaded."""
    if not modules[module]["loaded"]:
        return None
    try:
        return getattr(importlib.import_module(f"bert_unpad.{module}"), function)()
    except RuntimeError as error:  # e.g. an unknown $BERT_UNPAD_ISA
        return f"error: {error}"


def _names(text: str | None) -> list[str] | None:
    return None if text is None else text.split(",")


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _runs_on(major: int, minor: int, archs: list[str]) -> bool:
    """Whether one of the built architectures, such as `8.0+PTX` or `9.0a`, serves a GPU."""
    for arch in archs:
        number = arch.removesuffix("+PTX")
        built = tuple(int(part) for part in number.rstrip("af").split("."))
        if number.endswith("a"):
            served = built == (major, minor)
        else:
            served = built[0] == major and built[1] <= minor
        if served or (
            arch.endswith("+PTX") and not number[-1].isalpha() and built <= (major, minor)
        ):
            return True
    return False


def _gpus(archs: list[str] | None) -> list[dict[str, Any]]:
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
                "served": None
                if archs is None
                else _runs_on(properties.major, properties.minor, archs),
            }
        )
    return gpus


def _operators() -> dict[str, dict[str, bool]]:
    # Importing ops registers autograd; if it fails, `modules` already says which file is missing.
    with contextlib.suppress(ImportError):
        importlib.import_module("bert_unpad.ops")
    names = sorted(
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("bert_unpad::")
    )
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name.removeprefix("bert_unpad::"): {key: has_kernel(name, key) for key in DISPATCH_KEYS}
        for name in names
    }


def _list(names: list[str] | None) -> str:
    return UNKNOWN if names is None else ", ".join(names)


def render(info: dict[str, Any]) -> str:
    """Formats the report as text for a terminal."""
    versions, cpu, cuda = info["versions"], info["cpu"], info["cuda"]
    rows = [
        ("bert_unpad", versions["bert_unpad"]),
        ("Python", versions["python"]),
        ("PyTorch", f"{versions['torch']} (CUDA {versions['torch_cuda'] or 'none'})"),
        ("operating system", versions["os"]),
        ("", ""),
    ]
    for name, module in info["modules"].items():
        rows.append((f"bert_unpad.{name}", "loaded" if module["loaded"] else module["missing"]))
    rows += [
        ("", ""),
        ("CPU", f"{cpu['model']}, {cpu['logical_cpus']} logical CPUs, {cpu['threads']} threads"),
        ("instruction set", cpu["instruction_set"] or UNKNOWN),
        ("  built", _list(cpu["instruction_sets_built"])),
        ("CUDA architectures", _list(cuda["architectures_built"])),
        ("  built with", versions["built_with_cuda"] or UNKNOWN),
        ("GPUs", "none visible" if not cuda["gpus"] else ""),
    ]
    for gpu in cuda["gpus"]:
        memory = f"{gpu['memory'] / 2**30:.0f} GiB"
        major, minor = map(int, gpu["compute_capability"].split("."))
        text = f"{gpu['name']}, sm {gpu['compute_capability']}, {memory}"
        if gpu["served"] is False:
            text += "; not among the architectures built (TORCH_CUDA_ARCH_LIST, 7.5 and later)"
        elif not reaches((major, minor), "bf16"):
            text += "; attention and linear layers in fp16 and fp32, not in bf16"
        rows.append(("", text))
    lines = [f"{label:<20} {value}".rstrip() for label, value in rows]
    lines += ["", f"{'operators':<36}" + "".join(f"{key:<10}" for key in DISPATCH_KEYS)]
    for name, kernels in info["operators"].items():
        marks = "".join(f"{'yes' if kernels[key] else '-':<10}" for key in DISPATCH_KEYS)
        lines.append(f"  {name:<34}{marks}".rstrip())
    if not info["operators"]:
        lines.append("  none registered")
    return "\n".join(line.rstrip() for line in lines)


def _check(kinds: list[str]) -> int:
    try:
        from bert_unpad import self_test
    except ImportError as error:  # the operators are not loaded
        print(f"check failed: {error}")
        return 1
    return 1 if self_test.run(kinds or None) else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bert_unpad.info", description=__doc__)
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--json", action="store_true", help="machine-readable output")
    actions.add_argument(
        "--check",
        nargs="*",
        choices=("cpu", "cuda"),
        help="run every operator on these devices (default: all available) and compare it with "
        "plain PyTorch in float64; exit code 1 if something is wrong",
    )
    arguments = parser.parse_args(argv)
    if arguments.check is not None:
        return _check(arguments.check)
    info = collect()
    print(json.dumps(info, indent=2) if arguments.json else render(info))
    return 0


if __name__ == "__main__":
    run_main(main)
