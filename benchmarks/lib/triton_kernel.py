"""Attention's forward pass in Triton, compiled for an H100 without one: the online softmax of
"FlashAttention-2" (Dao, 2023), whole tiles only.

    python benchmarks/lib/triton_kernel.py FOLDER

writes FOLDER/kernel.cubin and FOLDER/kernel.json, the bytes of shared memory that a block asks for.
Needs the release of Triton that triton_forward.py names.
"""

import json
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, AttrsDescriptor

# The fastest in the model of an SM of 128 x 128 with 8 warps and 3 stages, 128 x 64 with 4 and 8
# warps and 3 stages, and 128 x 128 with 4 warps and 2 stages.
SHAPE = {"HEAD": 64, "ROWS": 128, "KEYS": 64}
OPTIONS = {"num_warps": 8, "num_stages": 3}


@triton.jit
def forward(
    q, k, v, out, lse, scale, length, row_stride,
    HEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1).to(tl.int64) * length * row_stride
    q_rows = tl.make_block_ptr(
        q + head, (length, HEAD), (row_stride, 1), (first, 0), (ROWS, HEAD), (1, 0)
    )
    out_rows = tl.make_block_ptr(
        out + head, (length, HEAD), (row_stride, 1), (first, 0), (ROWS, HEAD), (1, 0)
    )
    keys = tl.make_block_ptr(
        k + head, (HEAD, length), (1, row_stride), (0, 0), (HEAD, KEYS), (0, 1)
    )
    values = tl.make_block_ptr(
        v + head, (length, HEAD), (row_stride, 1), (0, 0), (KEYS, HEAD), (1, 0)
    )
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, HEAD], tl.float32)
    queries = tl.load(q_rows)
    for _ in range(0, length, KEYS):
        scores = tl.dot(queries, tl.load(keys))
        most = tl.maximum(top, tl.max(scores, 1) * scale)  # scale: of base-2 exponentials
        weights = tl.math.exp2(scores * scale - most[:, None])
        shrink = tl.math.exp2(top - most)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(tl.bfloat16), tl.load(values), sums * shrink[:, None])
        top = most
        keys = tl.advance(keys, (0, KEYS))
        values = tl.advance(values, (KEYS, 0))
    rows = first + tl.arange(0, ROWS)
    tl.store(lse + tl.program_id(1) * length + rows, top + tl.math.log2(total))
    tl.store(out_rows, (sums / total[:, None]).to(tl.bfloat16))


def main(folder: Path) -> None:
    types = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"lse": "*fp32", "scale": "fp32"}
    types |= {"length": "i32", "row_stride": "i32"}
    aligned = tuple(i for i, name in enumerate(types) if name != "scale")
    attributes = AttrsDescriptor(divisible_by_16=aligned, equal_to_1=())
    source = ASTSource(fn=forward, signature=types, constants=SHAPE, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)
    (folder / "kernel.json").write_text(json.dumps({"shared": compiled.metadata.shared}))
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
