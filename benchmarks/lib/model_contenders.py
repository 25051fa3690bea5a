"""Who takes part in the model benchmark on a GPU, each with a model and an optimizer of its own.

Ours train as the trainer does: fp32 parameters, activations in bf16, `FusedAdam`. The peers are one
Hugging Face BERT: as it is on a padded batch, and unpadded, its modules on packed tokens with
FlashAttention-2 and logits at masked positions only; each of the two also by torch.compile. Their
vocabulary is padded to a multiple of 8 as ours is, for the tensor cores' sake, which a user has to
know of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.lib import model_steps
from benchmarks.lib.peers import Attend, PaddedInputs, Peers, by_flash, by_flash_attn
from bert_unpad import ops
from bert_unpad.batch import PackedInputs
from bert_unpad.batch.graph_shapes import GraphShapes
from bert_unpad.nn import BertForPreTraining
from bert_unpad.ops.delayed_scaling import DelayedScaling
from bert_unpad.optim import FusedAdam, decay_groups

__all__ = ["CONTENDERS", "OURS", "REFERENCE", "Contender", "Setup"]


@dataclass(frozen=True)
class Setup:
    """What all of them work on."""

    size: str
    """A name in `model_steps.SIZES`."""
    dropout: float
    max_length: int
    inputs: PackedInputs
    """On the host."""
    device: torch.device


@dataclass(frozen=True)
class Contender:
    step: Callable[[], None]
    optimizer: torch.optim.Optimizer
    dtype: str = "bfloat16"


def _ours(
    setup: Setup, fp8: bool = False, graphs: bool = False, delayed: bool = False
) -> Contender:
    with setup.device:
        model = BertForPreTraining(model_steps.config(setup.size, setup.dropout)).train()
    model.bert.encoder.fp8 = fp8
    optimizer = FusedAdam(decay_groups(model, 0.01), lr=model_steps.LEARNING_RATE)
    # As the trainer does.
    weights = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    in_8_bits = weights.intersection(model.bert.encoder.fp8_weights)
    optimizer.keep_rounded(in_8_bits, torch.float8_e4m3fn)
    optimizer.keep_rounded(weights - in_8_bits, torch.bfloat16)
    if graphs:
        step = _graph_step(setup, model, optimizer)
    else:
        step = model_steps.make_step(
            model_steps.our_loss(model), optimizer, setup.inputs, torch.bfloat16, setup.device
        )
    if delayed:
        step = _delayed(model.bert.encoder.delay_scaling(device=setup.device), step)
    return Contender(step, optimizer, "float8" if fp8 else "bfloat16")


def _delayed(scaling: DelayedScaling, step: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        step()
        scaling.update()

    return both


def _graph_step(
    setup: Setup, model: BertForPreTraining, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    """With forward and backward pass replayed, as `cuda_graphs: true` does in the trainer."""
    # The trainer's settings are read by packages that only this contender needs.
    from bert_unpad.pretrain.gradients.cuda_graphs import GraphRunner

    # Gradients stay where they are, so products may add to them.
    for module in model.modules():
        if isinstance(module, nn.Linear):
            ops.accumulate_in_place(module.weight)
    autocast = torch.autocast(setup.device.type, torch.bfloat16, cache_enabled=False)
    runner = GraphRunner(model, autocast)
    batch = setup.inputs.batch
    shapes = GraphShapes(batch.batch_size, setup.max_length, model_steps.MASKED)
    inputs = shapes.pad(setup.inputs)
    if setup.device.type == "cuda":
        inputs = inputs.pin_memory()
    scale = torch.tensor([1 / setup.inputs.num_masked, 1 / batch.batch_size], device=setup.device)

    def step() -> None:
        runner(inputs, scale, first=True)
        optimizer.step()

    return step


def _compile(setup: Setup, function: Callable[..., Any]) -> Callable[..., Any]:
    """By inductor; on a CPU, for a trial, without generating code, which would take a minute."""
    backend = "inductor" if setup.device.type == "cuda" else "aot_eager"
    return torch.compile(function, backend=backend)


def _stock(setup: Setup) -> nn.Module:
    vocab = model_steps.config(setup.size, setup.dropout).padded_vocab_size
    with setup.device:
        return model_steps.hugging_face(setup.size, setup.dropout, vocab)


def _padded(setup: Setup, compiled: bool = False) -> Contender:
    stock = _stock(setup)
    peers = Peers(_compile(setup, stock) if compiled else stock)
    return _peer(setup, stock, peers.padded, PaddedInputs.build(setup.inputs))


def _unpadded(setup: Setup, attend: Attend, compiled: bool = False) -> Contender:
    stock = _stock(setup)
    peers = Peers(stock)

    def loss(inputs: PackedInputs) -> torch.Tensor:
        return peers.unpadded(inputs, attend)

    return _peer(setup, stock, _compile(setup, loss) if compiled else loss, setup.inputs)


def _peer(setup: Setup, stock: nn.Module, loss: Callable[..., Any], inputs: Any) -> Contender:
    optimizer = model_steps.adamw(stock)
    step = model_steps.make_step(loss, optimizer, inputs, torch.bfloat16, setup.device)
    return Contender(step, optimizer)


# What all take turns with: the host is never what it waits for.
REFERENCE = "bert_unpad, graphs"
# In the order in which they run: first what the targets are about, last what may be cut off.
CONTENDERS: dict[str, Callable[[Setup], Contender]] = {
    REFERENCE: lambda s: _ours(s, graphs=True),
    "bert_unpad, fp8, delayed, graphs": lambda s: _ours(s, fp8=True, graphs=True, delayed=True),
    "hf unpadded, flash, torch.compile": lambda s: _unpadded(s, by_flash, compiled=True),
    "hf unpadded, flash_attn package": lambda s: _unpadded(s, by_flash_attn),
    "hf padded, torch.compile": lambda s: _padded(s, compiled=True),
    "bert_unpad, bfloat16": _ours,
    "hf unpadded, flash": lambda s: _unpadded(s, by_flash),
    "bert_unpad, fp8, graphs": lambda s: _ours(s, fp8=True, graphs=True),
    "hf padded": _padded,
    "bert_unpad, fp8": lambda s: _ours(s, fp8=True),
}
OURS = tuple(name for name in CONTENDERS if name.startswith("bert_unpad"))
