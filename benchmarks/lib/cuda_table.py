"""The table of docs/development/cuda-kernels.md, and the registers that kernels may use."""

from __future__ import annotations

import os
import re
from pathlib import Path

from benchmarks.lib.cuda_kernels import Kernel

# Registers that a thread of the kernels with these names may use, on the architectures that they
# were tuned for: the last step before one block of 128 threads less fits on an SM. Launch bounds
# promise less than that. Kernels without a step within reach have no entry; what they use is in
# the table.
TUNED = ("sm_80", "sm_90a")
LIMITS = {
    r"attention_forward_kernel<\w+, 32,.*, AttentionLaunch>": 168,
    r"attention_forward_kernel<\w+, 64, 1,.*, AttentionLaunch>": 168,
    r"attention_backward_kernel<\w+, 32, 4, \w+, false,.*, AttentionLaunch>": 168,
    r"attention_backward_dq_kernel<\w+, 32,.*, AttentionLaunch>": 128,
    r"attention_backward_dq_kernel<\w+, 64, false,.*, AttentionLaunch>": 168,
    r"attention_fp32_forward_kernel<32, AttentionLaunch>": 128,
    r"attention_fp32_forward_kernel<64, AttentionLaunch>": 168,
    r"bias_gelu_kernel<": 64,
    r"bias_gelu_backward_kernel<": 80,
}
# fp16 kernels are the bf16 ones with other instructions; narrow ones serve odd sizes only.
LEFT_OUT = re.compile(
    r"<f16\b|bias_gelu\w+<\w+, 1,|masked_cross_entropy\w+<\w+, 1>|(rotary|glu)_\w+<\w+, 1,"
)

HEAD = """\
# CUDA kernels

What the compiler made of each kernel; written by `python -m benchmarks.cuda_build --table \
docs/development/cuda-kernels.md`, and checked in CI. Blocks per SM are those that registers and \
warps allow; shared memory that a launch asks for may allow fewer. Local memory counts spills and \
stack. fp16 kernels, which are the bf16 ones with other instructions, and the scalar paths of \
bias + GELU, gated linear units, the cross-entropy and rotary position embeddings are left out.

nvcc {version}

| kernel | arch | threads | registers | static shared, bytes | blocks per SM | local, bytes |
|---|---|---:|---:|---:|---:|---:|
"""


def over_limit(kernel: Kernel) -> int:
    """The limit that a kernel exceeds; 0 if none."""
    for pattern, limit in LIMITS.items():
        matches = kernel.arch in TUNED and re.match(pattern, kernel.readable)
        if matches and kernel.registers > limit:
            return limit
    return 0


def unused_limits(kernels: list[Kernel]) -> list[str]:
    """Limits for kernels that are no more, or have another name."""
    return [p for p in LIMITS if not any(re.match(p, k.readable) for k in kernels)]


def render(kernels: list[Kernel], threads: dict[tuple[str, str], int], version: str) -> str:
    rows = []
    for k in kernels:
        if LEFT_OUT.search(k.readable):
            continue
        size = threads.get((k.name, k.arch), 0)
        local = k.stack + k.spill_stores + k.spill_loads
        cells = [size or "?", k.registers, k.shared, k.blocks_per_sm(size) if size else "?", local]
        rows.append(f"| `{k.readable}` | {k.arch} | {' | '.join(map(str, cells))} |\n")
    return HEAD.format(version=version) + "".join(rows)


def version_of(table: str) -> str | None:
    found = re.search(r"^nvcc (.+)$", table, re.MULTILINE)
    return found[1] if found else None


def write(path: Path, table: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(table)
    os.replace(temporary, path)


def difference(path: Path, table: str) -> str:
    """What keeps the file from being current; "" where it is, or was made by another nvcc."""
    if not path.is_file():
        return f"{path} is missing"
    recorded = path.read_text()
    if recorded == table:
        return ""
    if version_of(recorded) != version_of(table):
        print(
            f"{path} is of nvcc {version_of(recorded)}; this is {version_of(table)}: not compared"
        )
        return ""
    old, new = recorded.splitlines(), table.splitlines()
    lines = [f"- {x}" for x in old if x not in new] + [f"+ {x}" for x in new if x not in old]
    return "\n".join([f"{path} is not current:", *(lines or ["the order of its lines"])])
