"""What all contenders of the model benchmark have in common: sizes, one batch, and what a step is.

A step is forward, backward and update, without a bound on the gradient. Inputs lie on the host and
are sent to the device in every step, from page-locked memory where that is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.data.sampling.histogram import sample_lengths
from bert_unpad.nn import BertConfig
from bert_unpad.optim import FusedAdam

if TYPE_CHECKING:
    import transformers

VOCAB = 30522
# hidden size, layers, heads
SIZES = {
    "large": (1024, 24, 16),
    "base": (768, 12, 12),
    "small": (256, 4, 4),
    "tiny": (64, 2, 2),
}
MASKED = 0.15  # of the tokens
LEARNING_RATE = 1e-5

Inputs = TypeVar("Inputs")


def make_inputs(
    sequences: int, max_length: int, seed: int, vocab: int, even: bool = False
) -> PackedInputs:
    """A packed batch of random tokens, 15 % of them masked, longest sequence first.

    `even` masks that share of each sequence, as BERT's data does; otherwise chance decides.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = sorted(
        (min(int(n), max_length) for n in sample_lengths(sequences, seed)), reverse=True
    )
    # The padded peers get max_length columns, as fixed-length pretraining data does.
    mask = torch.arange(max_length) < torch.tensor(lengths)[:, None]
    batch = VarlenBatch.from_mask(mask)
    ids = torch.randint(1000, vocab, (batch.total,), generator=generator)
    if even:
        masked = torch.cat([_even_mask(n, generator) for n in lengths])
    else:
        masked = torch.rand(batch.total, generator=generator) < MASKED
        masked[batch.cu_seqlens[:-1].long()] = False
    positions = masked.nonzero().flatten()
    return PackedInputs.build(
        batch=batch,
        input_ids=ids.index_fill(0, positions, 103),
        masked_positions=positions,
        masked_labels=ids[positions],
        next_sentence_labels=torch.randint(0, 2, (sequences,), generator=generator),
    )


def _even_mask(length: int, generator: torch.Generator) -> Tensor:
    """bool [length]; never the first token."""
    count = min(max(1, round(MASKED * length)), length - 1)
    chosen = 1 + torch.randperm(length - 1, generator=generator)[:count]
    return torch.zeros(length, dtype=torch.bool).index_fill(0, chosen, True)


def fields(size: str, dropout: float) -> dict[str, Any]:
    """Of a BertConfig, ours or Hugging Face's."""
    hidden, layers, heads = SIZES[size]
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }


def config(size: str, dropout: float) -> BertConfig:
    return BertConfig(**fields(size, dropout), vocab_size=VOCAB)


def hugging_face(
    size: str, dropout: float, vocab: int | None = None
) -> transformers.BertForPreTraining:
    """In training mode, with sdpa, on PyTorch's default device.

    Raises:
        ImportError: transformers is not installed.
    """
    import transformers

    return transformers.BertForPreTraining(
        transformers.BertConfig(
            **fields(size, dropout), vocab_size=vocab or VOCAB, attn_implementation="sdpa"
        )
    ).train()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def fused_adam(model: torch.nn.Module, dtype: torch.dtype) -> FusedAdam:
    """As the trainer makes it: for bf16 it keeps the weights of products rounded too."""
    adam = FusedAdam(model.parameters(), lr=LEARNING_RATE)
    if dtype == torch.bfloat16:
        linear = {m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)}
        adam.keep_rounded(linear, dtype)
    return adam


def our_loss(model: torch.nn.Module) -> Callable[[PackedInputs], Tensor]:
    """The mean over masked tokens plus that over next-sentence pairs."""

    def loss(x: PackedInputs) -> Tensor:
        out = model(x)
        return out.mlm_loss_sum / len(x.masked_labels) + out.nsp_loss_sum / x.batch.batch_size

    return loss


def make_step(
    loss: Callable[[Inputs], Tensor],
    optimizer: torch.optim.Optimizer,
    inputs: Inputs,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Callable[[], None]:
    """A training step, mixed precision by autocast; leaves no gradients."""
    device = torch.device(device)
    if device.type == "cuda":
        inputs = inputs.pin_memory()

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            value = loss(inputs.to(device, non_blocking=True))
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
