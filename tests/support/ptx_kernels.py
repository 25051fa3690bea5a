"""Small kernels in PTX for tests of the interpreter (gpu_model/ptx)."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_model.ptx.interpreter import Program

POLICIES = (0, 1, 2)
HEADER = ".version 8.6\n.target sm_90\n.address_size 64\n"
# Registers by the width of the values, and how they are loaded and stored.
REGISTERS = {1: ("h", "u8"), 2: ("h", "b16"), 4: ("r", "b32"), 8: ("d", "b64")}


def program(body: str, pointers: int = 1, *, shared: int = 0, extra: str = "") -> Program:
    """One kernel `test` with `pointers` parameters, loaded into %p0, %p1, ...; %tid.x is in %t.

    `shared`: bytes of shared memory, called `memory`."""
    parameters = ", ".join(f".param .u64 p{i}" for i in range(pointers))
    loads = "\n".join(f"ld.param.u64 %p{i}, [p{i}];" for i in range(pointers))
    memory = f".shared .align 16 .b8 memory[{shared}];" if shared else ""
    text = f"""{HEADER}
{memory}
{extra}
.visible .entry test({parameters})
{{
.reg .pred %q<16>;
.reg .b16 %h<32>;
.reg .b32 %r<64>;
.reg .b32 %t, %c;
.reg .b64 %d<32>;
.reg .b64 %p<16>;
.reg .b64 %a<32>;
{loads}
mov.u32 %t, %tid.x;
mov.u32 %c, %ctaid.x;
{body}
ret;
}}
"""
    return Program({"test.ptx": text})


def evaluate(instructions: str, inputs: Sequence[Tensor], *outputs: torch.dtype) -> list[Tensor]:
    """Runs instructions on each element of 1-d tensors. They find element i of the inputs in x0,
    x1, ... and leave results in y0, y1, ..., which are registers as wide as the values."""
    n = len(inputs[0])
    padded = -(-n // 32) * 32
    operands = [torch.nn.functional.pad(x, (0, padded - n)) for x in inputs]
    results = [torch.zeros(padded, dtype=dtype) for dtype in outputs]
    body = ["mad.lo.u32 %r63, %c, 32, %t;"]
    names: dict[str, str] = {}
    for k, x in enumerate([*operands, *results]):
        kind, width = REGISTERS[x.element_size()]
        name = f"%{kind}{k}"
        names[f"x{k}" if k < len(operands) else f"y{k - len(operands)}"] = name
        body.append(f"mul.wide.u32 %a{k}, %r63, {x.element_size()};")
        body.append(f"add.u64 %a{k}, %a{k}, %p{k};")
        if k < len(operands):
            body.append(f"ld.global.{width} {name}, [%a{k}];")
    body.append(re.sub(r"\b[xy]\d+\b", lambda name: names[name[0]], instructions))
    for k, x in enumerate(results, len(operands)):
        kind, width = REGISTERS[x.element_size()]
        body.append(f"st.global.{width} [%a{k}], %{kind}{k};")
    tensors = [*operands, *results]
    kernel = program("\n".join(body), len(tensors))
    kernel.launch("test", *tensors, grid=(padded // 32, 1, 1), read_only=operands)
    return [y[:n] for y in results]


# For `program` with two pointers and shared memory: the address of the thread's word in shared
# memory in %r0, in global memory in %a0 and %a1.
ADDRESSES = """
mov.u32 %r0, memory; mad.lo.u32 %r0, %t, 4, %r0;
mul.wide.u32 %a2, %t, 4; add.u64 %a0, %p0, %a2; add.u64 %a1, %p1, %a2;
"""


def launch_all(kernel: Program, *tensors: Tensor, warps: int = 2, **options: object) -> None:
    """Runs a kernel by all policies."""
    for policy in POLICIES:
        kernel.launch("test", *tensors, block=(32 * warps, 1, 1), policy=policy, seed=1, **options)
