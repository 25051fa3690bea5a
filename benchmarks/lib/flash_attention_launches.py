"""The launches of FlashAttention-2 for a batch, for the model of an SM: what its
flash_fwd_launch_template.h and flash_bwd_launch_template.h start, with which parameters."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.lib import flash_attention_build as build
from gpu_model.sm.attention import QUANTUM, Batch, address
from gpu_model.sm.kernel import Kernel, Launch, Stage
from gpu_model.sm.state import Memory

ROWS = 128  # of queries, or keys in the backward pass, that a block takes


class FlashAttention:
    """Its kernels for one architecture, and the layout of what they take."""

    def __init__(self, folder: Path, arch: str):
        self.kernels: Mapping[str, Kernel] = build.load(folder, arch)
        self.layout = build.layout(folder)

    def forward(self, batch: Batch, dropout_p: float, even: bool = False) -> list[Stage]:
        """`even`: sequences of one length, not packed."""
        keys = 64 if dropout_p else 128
        shared = (ROWS + 2 * keys) * 2 * batch.head_dim
        launch = self._launch("FORWARD", batch, dropout_p, even, 128, shared)
        # q, k, v and out, and lse.
        size = batch.tokens * batch.heads * (4 * 2 * batch.head_dim + 4)
        return [Stage("forward", [launch], size)]

    def backward(self, batch: Batch, dropout_p: float, even: bool = False) -> list[Stage]:
        """The kernels before and after the main one only move data; they take what their bytes
        do. Of the main one's sums of dQ, which are read and written for every block of keys, half
        are taken to be in L2."""
        shared = self.layout["shared_backward"][1]
        launch = self._launch("BACKWARD", batch, dropout_p, even, 256, shared)
        row, rows = 2 * batch.head_dim, batch.tokens * batch.heads
        return [
            # out and dout; delta, and sums of dQ in fp32 set to zero.
            Stage("delta", [], rows * (2 * row + 4 + 2 * row)),
            # q, k, v, dout, lse, delta; dk and dv; the sums.
            Stage("backward", [launch], rows * (4 * row + 8 + 2 * row + 3 * row)),
            Stage("convert dQ", [], rows * (2 * row + row)),
        ]

    def _launch(
        self, direction: str, batch: Batch, dropout_p: float, even: bool, threads: int, shared: int
    ) -> Launch:
        longest = max(batch.lengths)
        if even and (min(batch.lengths) != longest or longest % ROWS):
            raise ValueError(f"even: expected one length, a multiple of {ROWS}")
        unit = build.Unit(direction, dropout_p > 0, even)
        blocks = -(-longest // ROWS)
        kinds = [
            (-(-min(max(n - ROWS * i, 0), ROWS) // QUANTUM), -(-n // QUANTUM) * (n > ROWS * i))
            for _ in range(batch.heads)
            for n in batch.lengths
            for i in range(blocks)
        ]
        grid = (blocks, len(batch.lengths), batch.heads)
        parameters = self._parameters(direction, batch, dropout_p, even)
        memory = Memory() if even else Memory({address(1): batch.cu_seqlens})
        kernel = self.kernels[unit.stem]
        return Launch(kernel, grid, threads, shared, parameters, kinds, memory)

    def _parameters(self, direction: str, batch: Batch, dropout_p: float, even: bool) -> bytes:
        h, d, longest = batch.heads, batch.head_dim, max(batch.lengths)
        rounded = -(-longest // 128) * 128
        values: dict[str, int | float] = {
            **{"h": h, "h_k": h, "h_h_k_ratio": 1, "b": len(batch.lengths), "d": d},
            **{"seqlen_q": longest, "seqlen_k": longest, "d_rounded": d},
            **{"seqlen_q_rounded": rounded, "seqlen_k_rounded": rounded, "num_splits": 1},
            **{"total_q": batch.tokens, "unpadded_lse": int(not even), "is_bf16": 1},
            **{"is_seqlens_k_cumulative": 1, "window_size_left": -1, "window_size_right": -1},
            "scale_softmax": 1 / math.sqrt(d),
            "scale_softmax_log2": math.log2(math.e) / math.sqrt(d),
            "p_dropout": 1 - dropout_p,
            "p_dropout_in_uint8_t": int((1 - dropout_p) * 255),
            "rp_dropout": 1 / (1 - dropout_p),
            "scale_softmax_rp_dropout": 1 / (1 - dropout_p) / math.sqrt(d),
        }
        if not even:
            values |= {"cu_seqlens_q": address(1), "cu_seqlens_k": address(1)}
        pointers = ("dq_accum_ptr", "dsoftmax_sum", "softmax_lse_ptr", "rng_state")
        for number, name in enumerate(("q", "k", "v", "o", "do", "dq", "dk", "dv")):
            row = h * d * (1 if name in ("o", "do") else 3)
            values |= {f"{name}_ptr": address(4 + number), f"{name}_row_stride": row}
            values |= {f"{name}_head_stride": d}
            values |= {f"{name}_batch_stride": row * longest if even else 0}
        values |= {name: address(20 + i) for i, name in enumerate(pointers)}
        size = self.layout[f"sizeof_{direction.lower()}"][1]
        data = np.zeros(size, np.uint8)
        for name, value in values.items():
            at, width = self.layout[name]
            if at + width > size:
                continue  # a field of the backward pass only
            code = "<f" if isinstance(value, float) else {1: "<b", 4: "<i", 8: "<q"}[width]
            if width == 1:
                value, code = value & 255, "<B"
            data[at : at + width] = np.frombuffer(struct.pack(code, value), np.uint8)
        return data.tobytes()
