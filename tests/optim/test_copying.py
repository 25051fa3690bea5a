"""Deep copies and pickles of optimizers: they go on with the same bits, and have all there is."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bert_unpad.experimental import MERIT, MTDAO
from bert_unpad.ops.rounded_weights import copies_of
from bert_unpad.optim import FusedAdam, FusedLAMB, FusedStableAdamW, Muon
from tests.support.one_bit_runs import OPTIMIZERS, STEPS, Run
from tests.support.processes import run_ranks

SHAPES = [(16, 32), (9,), (4, 3)]
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(FusedAdam, max_grad_norm=0.5),
    "adam_bf16": partial(FusedAdam, master_weights=True, skip_non_finite=True),
    "lamb": partial(FusedLAMB, max_grad_norm=0.5, nesterov=True),
    "stable_adamw": partial(FusedStableAdamW, max_grad_norm=0.5),
    "merit": MERIT,
    "mt_dao": partial(MTDAO, fast_beta=0.5, period=3, start=2),
    "muon": lambda params, **options: Muon(
        [{"params": [params[0], params[2]], "use_muon": True}, {"params": [params[1]]}],
        ns_dtype="bf16",
        **options,
    ),
}


def _by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _by_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = pytest.mark.parametrize("copied", [copy.deepcopy, _by_pickle, _by_file])


def _steps(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, start: int) -> None:
    for step in range(start, start + 3):
        for p in params:
            p.grad = torch.cos(torch.arange(p.numel()) + step).view(p.shape).to(p.dtype)
            if step == 1 and getattr(optimizer, "skip_non_finite", False):
                p.grad.fill_(torch.nan)
        optimizer.step()


@WAYS
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_on_with_the_same_bits(kind, copied):
    dtype = torch.bfloat16 if kind == "adam_bf16" else torch.float32
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    optimizer = KINDS[kind](params, lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # which puts a wrapper in place of `step`
    _steps(params, optimizer, 0)
    others, other = copied((params, optimizer))
    assert getattr(other, "max_grad_norm", None) == getattr(optimizer, "max_grad_norm", None)
    assert getattr(other, "skipped_steps", 0) == (kind == "adam_bf16")
    kept = [p.detach().clone() for p in params]
    _steps(others, other, 3)
    assert all(map(torch.equal, params, kept))
    _steps(params, optimizer, 3)
    assert all(map(torch.equal, params, others))
    assert not any(map(torch.equal, params, kept))


@WAYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_copy_keeps_rounded_weights(dtype, copied):
    params = [nn.Parameter(torch.randn(16, 32))]
    optimizer = FusedAdam(params, lr=0.1)
    optimizer.keep_rounded(params, dtype)
    _steps(params, optimizer, 0)
    others, other = copied((params, optimizer))
    ((_, before),) = copies_of(others)
    assert before.fits(others[0])
    _steps(others, other, 3)
    _steps(params, optimizer, 3)
    ((_, ours),), ((_, theirs),) = copies_of(params), copies_of(others)
    assert theirs is before
    assert ours.fits(params[0])
    assert theirs.fits(others[0])
    name = "tensors" if dtype == torch.float8_e4m3fn else "tensor"
    for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True):
        assert torch.equal(a.float(), b.float())


def _one_bit(rank: int, world_size: int, group_of_its_own: bool) -> list[tuple[str, int, int]]:
    """Copies after which a run goes another way: in the warm-up, after it, within an interval."""
    group = dist.new_group(list(range(world_size))) if group_of_its_own else None
    ways = [copy.deepcopy] if group_of_its_own else [copy.deepcopy, _by_pickle, _by_file]
    wrong = []
    for kind in OPTIMIZERS:
        for at in (3, 9, 14):
            for number, copied in enumerate(ways):
                run = Run(kind, group=group)
                for step in range(at):
                    run.step(step)
                other = copied(run)
                same = other.optimizer.bytes_sent == run.optimizer.bytes_sent
                for one in (run, other):
                    for step in range(at, STEPS):
                        one.step(step)
                    one.optimizer.synchronise()
                pairs = zip(run.everything(), other.everything(), strict=True)
                if not (same and all(torch.equal(a, b) for a, b in pairs)):
                    wrong.append((kind, at, number))
    return wrong


@pytest.mark.parametrize("group_of_its_own", [False, True])
def test_copies_of_ranks_go_on_with_the_same_bits(group_of_its_own):
    assert run_ranks(_one_bit, 2, group_of_its_own) == [[], []]


def test_hooks_of_a_step_run_once():
    for kind in KINDS:  # as each class, and so the base class of another, has its hooks by then
        params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        optimizer = KINDS[kind](params, lr=0.1)
        calls = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("post"))
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert calls == ["pre", "post"], kind
