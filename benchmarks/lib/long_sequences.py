"""A ModernBERT, ours and Hugging Face's, and batches of long sequences for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from benchmarks.lib import model_steps
from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn import PRESETS, EncoderConfig

SIZES: dict[str, dict[str, int]] = {
    "base": {},
    "tiny": {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 2},
}
MASKED = 0.3


def config(size: str, windows: bool = True) -> EncoderConfig:
    more: dict[str, Any] = {} if windows else {"window_pattern": (-1,)}
    if not windows:
        more["model_type"] = "bert_unpad"  # the family has windows
    return EncoderConfig(**PRESETS["modernbert-base"] | SIZES[size] | more)


def masked_batch(lengths: Sequence[int], size: str, seed: int) -> PackedInputs:
    """Random tokens; MASKED of them, 30 %, are to be predicted."""
    generator = torch.Generator().manual_seed(seed)
    batch = VarlenBatch.from_lengths(lengths)
    vocab = config(size).vocab_size
    ids = torch.randint(1000, vocab - 1000, (batch.total,), generator=generator)
    chosen = torch.rand(batch.total, generator=generator) < MASKED
    positions = chosen.nonzero().flatten()
    return PackedInputs.build(
        batch=batch,
        input_ids=ids.index_fill(0, positions, vocab - 1),
        masked_positions=positions,
        masked_labels=ids[positions],
    )


@cache
def hugging_face(size: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Hugging Face's model of the same sizes, with sdpa, and its optimizer."""
    import transformers

    torch.manual_seed(0)
    values = config(size).to_dict() | {"attn_implementation": "sdpa"}
    model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**values)).train()
    return model, model_steps.adamw(model)


def our_loss(model: torch.nn.Module) -> Callable[[PackedInputs], torch.Tensor]:
    return lambda x: model(x).mlm_loss_sum / len(x.masked_labels)
