"""The record of what nvcc makes of each kernel, and the registers that kernels may use."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.lib.cuda_kernels import Kernel
from benchmarks.lib.harness import RESULTS

RECORD = RESULTS / "model" / "cuda_kernels.json"

# Registers that a thread of the kernels with these names may use, on the architectures that they
# were tuned for: the last step before one block of 128 threads less fits on an SM. Launch bounds
# promise less than that. Kernels without a step within reach have no entry; what they use is in
# the record.
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
    """The record in JSON, a line a kernel: its threads, registers, bytes of static shared memory,
    and bytes of local memory, which are spills and stack."""
    found = {"nvcc": version}
    for k in kernels:
        if not LEFT_OUT.search(k.readable):
            local = k.stack + k.spill_stores + k.spill_loads
            row = [threads.get((k.name, k.arch), 0), k.registers, k.shared, local]
            found[f"{k.readable} {k.arch}"] = row
    return (
        "{\n" + ",\n".join(f"{json.dumps(x)}: {json.dumps(y)}" for x, y in found.items()) + "\n}\n"
    )


def difference(path: Path, table: str) -> str:
    """What keeps the file from being current; "" where it is, or was made by another nvcc."""
    if not path.is_file():
        return f"{path} is missing"
    recorded = path.read_text()
    old, new = (json.loads(text)["nvcc"] for text in (recorded, table))
    if recorded == table:
        return ""
    if old != new:
        print(f"{path} is of nvcc {old}; this is {new}: not compared")
        return ""
    both = [text.replace(",\n", "\n").splitlines() for text in (recorded, table)]
    lines = [f"- {x}" for x in both[0] if x not in both[1]]
    lines += [f"+ {x}" for x in both[1] if x not in both[0]]
    return "\n".join([f"{path} is not current:", *(lines or ["the order of its lines"])])
