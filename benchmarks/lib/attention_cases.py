"""The batches that attention is timed on, and what each pass must compute and move at least.

BERT-large's heads. Operations are those of the matrix products on real tokens: two forward, five
backward (one of them recomputes the scores), as in Dao et al., "FlashAttention" (2022). Bytes are
those of the operands, each read or written once.
"""

from __future__ import annotations

from dataclasses import dataclass

from bert_unpad.data.sampling.histogram import sample_lengths

PASSES = ("forward", "backward", "both")


@dataclass(frozen=True)
class AttentionCase:
    name: str
    lengths: tuple[int, ...]
    dropout_p: float
    heads: int = 16
    head_dim: int = 64

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def padded_share(self) -> float:
        """Real tokens as a share of the padded batch's."""
        return self.tokens / (len(self.lengths) * max(self.lengths))

    def flops(self, which: str) -> int:
        """Of one pass: "forward" or "backward"."""
        products = {"forward": 2, "backward": 5}[which]
        return products * 2 * sum(n * n for n in self.lengths) * self.heads * self.head_dim

    def bytes(self, which: str) -> int:
        """With 16-bit elements; the row statistics are fp32."""
        # forward: q, k, v -> out; backward: q, k, v, out, dout -> dq, dk, dv
        operands = {"forward": 4, "backward": 8}[which]
        rows = self.tokens * self.heads
        return operands * rows * self.head_dim * 2 + rows * 4

    def floor(self, which: str, flops_per_second: float, bytes_per_second: float) -> float:
        """Seconds that no implementation can beat, by these two limits."""
        if which == "both":
            return sum(
                self.floor(one, flops_per_second, bytes_per_second)
                for one in ("forward", "backward")
            )
        return max(self.flops(which) / flops_per_second, self.bytes(which) / bytes_per_second)


def attention_cases(batch_size: int, seed: int) -> list[AttentionCase]:
    """Lengths as in Wikipedia, then all alike; each with and without dropout."""
    mixed = tuple(int(n) for n in sample_lengths(batch_size, seed))
    batches = {"lengths of Wikipedia": mixed}
    batches |= {f"all of length {n}": (n,) * batch_size for n in (128, 256, 512)}
    return [
        AttentionCase(name, lengths, p) for name, lengths in batches.items() for p in (0.1, 0.0)
    ]
