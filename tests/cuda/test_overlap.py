"""Updates beside the next forward pass on a GPU: the bits of updates before it.

The update is slowed down, so that a pass that does not wait for it would read old weights. Without
a GPU: tests/pretrain/update/test_overlap.py.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.support.cuda_checks import GPU_ONLY, assert_same_bits, raise_if_the_host_waits

pytest.importorskip("tqdm", reason="the trainer needs the extra `pretrain`")

from bert_unpad.distributed import BucketClip
from bert_unpad.optim import FusedAdam, decay_groups
from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.optim.parameter_lists import Update
from bert_unpad.pretrain.config import ClipConfig, OptimizerConfig, PretrainConfig
from bert_unpad.pretrain.model import add_gradients_in_products
from bert_unpad.pretrain.parallel import make_way
from bert_unpad.pretrain.parallel.way import seed_step
from bert_unpad.pretrain.ranks import HostSums, Ranks
from bert_unpad.pretrain.run import Run
from bert_unpad.pretrain.update import overlap
from bert_unpad.pretrain.update.optimizer import step_if
from bert_unpad.pretrain.update.overlap import OverlappedUpdater
from tests.cuda import test_graph_buckets
from tests.cuda.test_graphs import DROPOUT, ONE, make_step, padded_inputs, scaled
from tests.nn.test_bert import make_model

pytestmark = GPU_ONLY
CYCLES = 5_000_000  # a few milliseconds, for each chunk
nccl = test_graph_buckets.nccl


def _slow_down(optimizer: FusedOptimizer) -> None:
    update_all = optimizer._update_all

    def late(updates: Sequence[Update]) -> None:
        torch.cuda._sleep(CYCLES)
        update_all(updates)

    optimizer._update_all = late


def _state(model: torch.nn.Module, optimizer: FusedOptimizer) -> list[Tensor]:
    states = [x for p in model.parameters() for _, x in sorted(optimizer.state[p].items())]
    return [x.detach().clone() for x in (*model.parameters(), *states)]


def _trainer(
    overlapped: bool, graphs: bool, precision: str = "bf16", mode: str = "after"
) -> tuple[Callable[[int], Tensor], Callable[[], list[Tensor]]]:
    """What makes an update and returns its losses, and what returns weights and states."""
    ranks = Ranks(0, 1, torch.device("cuda", torch.cuda.current_device()), None)
    model = make_model(**DROPOUT).to(ranks.device).train()
    model.bert.encoder.fp8 = precision == "fp8"
    config = PretrainConfig(precision=precision, cuda_graphs=graphs)
    config.optimizer = OptimizerConfig(name="fused_adam", overlap=overlapped)
    config.clip = ClipConfig(mode=mode)
    add_gradients_in_products(model)
    way = make_way(Run(config, ranks, model))
    way.make_optimizer()
    way.begin()
    if overlapped:
        _slow_down(way.optimizer)
    step = make_step(padded=True).pin_memory()

    def update(number: int) -> Tensor:
        seed_step(1, number, 0)
        losses = way.accumulate(step, HostSums(ranks, step.counts)).clone()
        way.step(way.finish().finite & (number != 1), 1e-2 / (number + 1))
        return losses

    def results() -> list[Tensor]:
        way.synchronise()
        torch.cuda.synchronize()
        return _state(model, way.optimizer)

    return update, results


def _train(*arguments: bool | str) -> list[Tensor]:
    update, results = _trainer(*arguments)
    losses = [update(number) for number in range(5)]
    return [*losses, *results()]


@pytest.mark.parametrize("mode", ["after", "none"])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp8"])
@pytest.mark.parametrize("graphs", [False, True])
def test_training_keeps_its_bits(graphs, precision, mode):
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    both = [_train(overlapped, graphs, precision, mode) for overlapped in (True, False)]
    assert_same_bits(*both)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_pass_without_waiting_is_found(graphs, monkeypatch):
    plain = _train(False, graphs)
    monkeypatch.setattr(overlap.SideStream, "wait", lambda *_: None)
    late = _train(True, graphs)
    assert not all(torch.equal(a, b) for a, b in zip(late, plain, strict=True))


@pytest.mark.parametrize("graphs", [False, True])
def test_the_host_does_not_wait(graphs):
    update, results = _trainer(True, graphs)
    for number in range(3):
        update(number)
    with raise_if_the_host_waits():
        losses = [update(number) for number in range(3, 6)]
    assert all(x.isfinite().all() for x in (*losses, *results()))


@pytest.mark.usefixtures("nccl")
def test_a_captured_step_that_sends_buckets_keeps_its_bits():
    """Averages into the memory that the update of before has read."""
    both = []
    for overlapped in (True, False):
        model, buckets, run = test_graph_buckets.make(clip := BucketClip(0.5))
        optimizer = FusedAdam(decay_groups(model, 0.01), lr=0.01)
        updater = OverlappedUpdater(model, optimizer) if overlapped else None
        if overlapped:
            _slow_down(optimizer)
        for seed, lengths in enumerate(test_graph_buckets.BATCHES * 2):
            inputs = padded_inputs(lengths, seed).pin_memory()
            run(inputs, scaled(ONE, "cuda"), first=True)
            buckets.send()
            buckets.wait()
            finite = clip.report().finite
            if updater is None:
                step_if(optimizer, finite)
            else:
                updater.step(finite)
        if updater is not None:
            updater.wait()
        both.append(_state(model, optimizer))
    assert_same_bits(*both)
