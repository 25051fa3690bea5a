"""Times a model's training step at several lengths, so that `ComputeCost.fit` can fit its cost.

Batches take turns, round by round, and the least time of each counts: what else the machine does
only ever adds. Lengths and numbers of tokens vary independently, or the parts of the cost that are
linear and quadratic in the length could not be told apart.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.costs.compute import ComputeCost
from bert_unpad.nn import BertConfig, EncoderForPreTraining
from bert_unpad.nn.flops import MASKED_FRACTION


def default_batches(max_seq_length: int) -> list[list[int]]:
    """Lengths of the sequences of 8 batches: four lengths, with one and four rows' worth of tokens.

    Args:
        max_seq_length: the longest, in tokens; at least 8.
    """
    lengths = [max_seq_length // part for part in (8, 4, 2, 1)]
    return [[s] * (rows * max_seq_length // s) for rows in (1, 4) for s in lengths]


def random_inputs(config: BertConfig, lengths: ArrayLike, seed: int = 0) -> PackedInputs:
    """Packed random tokens, 15 % of each sequence masked, on the CPU.

    Args:
        config: gives the vocabulary.
        lengths: integers [B], tokens of each sequence, at least 1.
        seed: of the tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = VarlenBatch.from_lengths(np.asarray(lengths, np.int64))
    ids = torch.randint(config.vocab_size, (batch.total,), generator=generator)
    begins = batch.cu_seqlens_host[:-1].tolist()
    positions = torch.cat(
        [
            begin + torch.randperm(size, generator=generator)[: round(MASKED_FRACTION * size)]
            for begin, size in zip(begins, np.asarray(lengths).tolist(), strict=True)
        ]
    )
    positions = positions.sort().values
    return PackedInputs.build(
        batch=batch,
        input_ids=ids,
        masked_positions=positions,
        masked_labels=ids[positions],
        next_sentence_labels=torch.randint(2, (batch.batch_size,), generator=generator),
    )


def run_pass(
    model: torch.nn.Module, inputs: PackedInputs, dtype: torch.dtype = torch.float32
) -> None:
    """A forward and backward pass of the mean loss of the batch's tokens; waits for a GPU.

    Args:
        model: a `EncoderForPreTraining`, or a wrapper of one.
        inputs: on the model's device.
        dtype: of the activations (autocast).
    """
    device = inputs.device
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        outputs = model(inputs)
    loss = outputs.mlm_loss_sum + outputs.nsp_loss_sum
    (loss / inputs.batch.total).backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def least_times(
    step: Callable[[int], None],
    count: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """The least time of each of `count` steps over some rounds, after one that does not count.

    Args:
        step: makes step number i and returns when it is done.
        count: steps of a round.
        rounds: how often each is timed.
        clock: in seconds.

    Returns:
        Seconds [count].
    """
    best = [float("inf")] * count
    for number in range(1 + rounds):
        for i in range(count):
            start = clock()
            step(i)
            seconds = clock() - start
            if number > 0:
                best[i] = min(best[i], seconds)
    return best


def fit_step_cost(
    config: BertConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rounds: int = 3,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[ComputeCost, list[dict[str, float]]]:
    """Times whole training steps (forward, backward, AdamW) of a new model and fits their cost.

    The batches are the `default_batches` of the model's positions.

    Args:
        config: the model.
        device: where.
        dtype: of the activations (autocast).
        rounds: how often each batch is timed.
        seed: of weights and tokens.
        clock: in seconds; `time.thread_time`, on a CPU with one thread, does not count what other
            programs take.

    Returns:
        The cost, and for each batch its sequences, tokens, measured and fitted seconds.

    Raises:
        ValueError: `rounds` is less than 1, or the times do not fit, see `ComputeCost.fit`.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected 1 or more, got {rounds}")
    batches = default_batches(config.max_length)
    device = torch.device(device)
    torch.manual_seed(seed)
    model = EncoderForPreTraining(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    inputs = [random_inputs(config, lengths, seed).to(device) for lengths in batches]

    def step(number: int) -> None:
        run_pass(model, inputs[number], dtype)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = least_times(step, len(inputs), rounds, clock)
    cost = ComputeCost.fit(batches, seconds)
    return cost, cost.compare(batches, seconds)
