"""Muon: iterations against an SVD, steps against plain float64 and PyTorch, several ranks."""

import copy
import math
import random

import pytest
import torch
from torch import Tensor, nn

from bert_unpad.nn import BertConfig, BertForPreTraining
from bert_unpad.optim import Muon, muon_groups
from bert_unpad.optim import muon as module
from bert_unpad.optim.muon import assign, orthogonalize
from tests.support.optim_reference import Rule, Truth
from tests.support.processes import run_ranks
from tests.support.seeds import derived

SHAPES = [(24, 16), (16, 24), (20, 20), (1, 9), (7, 1), (1, 1)]
OTHERS = [(11, 6), (13,), (1,)]
STACKED = [9, 6, 3]  # rows of the matrices in one parameter


def _quintic(s: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def _by_svd(matrix: Tensor, steps: int = 5) -> Tensor:
    """The iterations act on the singular values alone."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ torch.diag(_quintic(s / (matrix.double().norm() + 1e-7), steps)) @ vh


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 5, 7])
def test_iterations_act_on_the_singular_values(shape, steps):
    matrix = torch.randn(shape)
    got = orthogonalize(matrix, steps)
    assert got.shape == shape
    torch.testing.assert_close(got.double(), _by_svd(matrix, steps), atol=1e-4, rtol=1e-4)


def test_singular_values_come_near_one():
    matrix = torch.randn(40, 64)
    values = torch.linalg.svdvals(orthogonalize(matrix))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    in_bf16 = torch.linalg.svdvals(orthogonalize(matrix.bfloat16()).float())
    assert 0.5 < float(in_bf16.min()) <= float(in_bf16.max()) < 1.4


def test_batches_and_zeros():
    matrices = torch.randn(2, 3, 8, 5)
    matrices[1, 2] = 0
    got = orthogonalize(matrices)
    assert not got[1, 2].any()
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(got[i, j], orthogonalize(matrices[i, j]))


def test_work_is_dealt_out_evenly_and_alike():
    draw = random.Random(derived(0))
    for ranks in (1, 2, 3, 7):
        work = [draw.choice([1, 4, 4, 9, 30]) for _ in range(40)]
        owners = assign(work, ranks)
        assert owners == assign(list(work), ranks)
        loads = [sum(w for w, o in zip(work, owners, strict=True) if o == r) for r in range(ranks)]
        assert max(loads) - min(loads) <= max(work)
    assert sorted(assign([5, 5], 4)) == [0, 1]
    assert assign([], 3) == []


class _Plain:
    """The algorithm in float64, one matrix at a time."""

    def __init__(self, weights: list[Tensor], stacked: list[list[int]], nesterov: bool, rule: str):
        self.weights = [w.detach().double().clone() for w in weights]
        self.stacked, self.nesterov, self.rule = stacked, nesterov, rule
        self.momenta = [torch.zeros_like(w) for w in self.weights]

    def step(self, gradients: list[Tensor], lr: float, decay: float, mu: float) -> None:
        for i, (weight, gradient) in enumerate(zip(self.weights, gradients, strict=True)):
            g = gradient.double()
            self.momenta[i] = m = mu * self.momenta[i] + (1 - mu) * g
            u = mu * m + (1 - mu) * g if self.nesterov else m
            weight *= 1 - lr * decay
            for part, of in zip(
                u.split(self.stacked[i]), weight.split(self.stacked[i]), strict=True
            ):
                rows, columns = part.shape
                size = 0.2 * math.sqrt(max(rows, columns))
                if self.rule == "original":
                    size = math.sqrt(max(1.0, rows / columns))
                of -= lr * size * _by_svd(part)


def _draw(seed: int = 0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(derived(seed))
    return [nn.Parameter(torch.randn(x, generator=draw)) for x in [*SHAPES, (18, 5), *OTHERS]]


def _groups(parameters: list[nn.Parameter]) -> list[dict]:
    return [
        {"params": parameters[: len(SHAPES)], "use_muon": True},
        {
            "params": parameters[len(SHAPES) : len(SHAPES) + 1],
            "use_muon": True,
            "stacked": STACKED,
        },
        {"params": parameters[len(SHAPES) + 1 :], "weight_decay": 0.0},
    ]


def _set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(derived(100 + step))
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=draw)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
def test_30_steps_against_float64(nesterov, rule):
    parameters = _draw()
    matrices = parameters[: len(SHAPES) + 1]
    plain = _Plain(matrices, [[rows] for rows, _ in SHAPES] + [STACKED], nesterov, rule)
    adam = Truth(parameters[len(matrices) :], Rule("adam", 2e-3, (0.9, 0.99), 1e-6, 0.0))
    optimizer = Muon(
        _groups(parameters),
        lr=4e-3,
        betas=(0.9, 0.99),
        eps=1e-6,
        weight_decay=0.1,
        momentum=0.8,
        nesterov=nesterov,
        adjust_lr=rule,
        adam_lr_share=0.5,
    )
    for step in range(30):
        _set_gradients(parameters, step)
        gradients = [p.grad for p in parameters]
        plain.step(gradients[: len(matrices)], 4e-3, 0.1, 0.8)
        adam.step(gradients[len(matrices) :])
        optimizer.step()
    for got, want in zip(parameters, [*plain.weights, *adam.params], strict=True):
        torch.testing.assert_close(got.detach().double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
def test_as_pytorchs_muon(nesterov, rule):
    ours = [nn.Parameter(torch.randn(x)) for x in SHAPES]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    common = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    mine = Muon([{"params": ours, "use_muon": True}], **common, adjust_lr=rule, ns_dtype="bf16")
    peer = torch.optim.Muon(theirs, **common, adjust_lr_fn=rule)
    for step in range(5):
        _set_gradients(ours, step)
        _set_gradients(theirs, step)
        mine.step()
        peer.step()
        for p, q in zip(ours, theirs, strict=True):
            momentum = peer.state[q]["momentum_buffer"]
            torch.testing.assert_close(mine.state[p]["momentum_buffer"], momentum)
            size = 1e-2 * max(0.2 * math.sqrt(max(p.shape)), math.sqrt(max(1, p.shape[0])))
            torch.testing.assert_close(p, q, rtol=0, atol=0.03 * size * (step + 1))


def _on_ranks(rank: int, world_size: int, distributed: bool) -> tuple[list[Tensor], int]:
    """Weights after 4 steps, and how many matrices this rank has computed in each."""
    counted = 0

    def count(matrices: Tensor, steps: int) -> Tensor:
        nonlocal counted
        counted += matrices.shape[0]
        return orthogonalize(matrices, steps)

    module.orthogonalize = count
    parameters = _draw()
    optimizer = Muon(_groups(parameters), lr=1e-2, distributed=distributed)
    for step in range(4):
        _set_gradients(parameters, step)
        parameters[1].grad = None if step == 2 else parameters[1].grad
        optimizer.step()
    return [p.detach() for p in parameters], counted


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_work(world_size, monkeypatch):
    monkeypatch.setattr(module, "orthogonalize", orthogonalize)
    want, all_of_it = _on_ranks(0, 1, True)
    found = run_ranks(_on_ranks, world_size, True)
    assert sum(counted for _, counted in found) == all_of_it == 4 * (len(SHAPES) + 3) - 1
    assert all(counted for _, counted in found)
    for weights, _ in found:
        for got, first, alone in zip(weights, found[0][0], want, strict=True):
            assert torch.equal(got, first)
            torch.testing.assert_close(got, alone, atol=1e-6, rtol=1e-5)


def test_ranks_that_do_not_share(monkeypatch):
    monkeypatch.setattr(module, "orthogonalize", orthogonalize)
    want, all_of_it = _on_ranks(0, 1, True)
    for weights, counted in run_ranks(_on_ranks, 2, False):
        assert counted == all_of_it
        assert all(map(torch.equal, weights, want))


def _overflow_on_ranks(rank: int, world_size: int) -> bool:
    parameters = _draw()
    optimizer = Muon(_groups(parameters), lr=1e-2)
    _set_gradients(parameters, 0)
    optimizer.step()
    before = copy.deepcopy([p.detach() for p in parameters])
    state = copy.deepcopy(optimizer.state_dict()["state"])
    for p in parameters:
        p.grad.fill_(torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(map(torch.equal, before, parameters))
    for number, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state[number][name]) for name, value in values.items())
    optimizer.found_inf = torch.zeros(())
    _set_gradients(parameters, 1)
    optimizer.step()
    return not any(map(torch.equal, before, parameters))


def test_a_step_is_left_out_on_the_device():
    assert _overflow_on_ranks(0, 1)
    assert run_ranks(_overflow_on_ranks, 2) == [True, True]


def test_gradients_that_are_not_finite_are_skipped_on_request():
    parameters = _draw()
    optimizer = Muon(_groups(parameters), lr=1e-2, skip_non_finite=True)
    _set_gradients(parameters, 0)
    parameters[-1].grad.fill_(torch.inf)
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(map(torch.equal, before, parameters))


def test_gradients_are_unscaled():
    one, other = _draw(), _draw()
    first, second = Muon(_groups(one), lr=1e-2), Muon(_groups(other), lr=1e-2)
    _set_gradients(one, 0)
    _set_gradients(other, 0)
    for p in other:
        p.grad.mul_(1024.0)
    second.grad_scale = torch.tensor(1024.0)
    first.step()
    second.step()
    for p, q in zip(one, other, strict=True):
        torch.testing.assert_close(p, q)


def test_a_state_dict_continues_with_the_same_bits():
    one, other = _draw(), _draw(seed=5)
    first, second = Muon(_groups(one), lr=1e-2), Muon(_groups(other), lr=1e-2)
    for step in range(3):
        _set_gradients(one, step)
        first.step()
    saved = copy.deepcopy(first.state_dict())
    second.load_state_dict(saved)
    for p, q in zip(one, other, strict=True):
        q.data.copy_(p)
    for parameters, optimizer in ((one, first), (other, second)):
        _set_gradients(parameters, 3)
        optimizer.step()
    assert all(map(torch.equal, one, other))


def test_stacked_matrices_are_updated_one_by_one():
    parameter = nn.Parameter(torch.randn(12, 5))
    rows = [6, 4, 2]
    parts = [nn.Parameter(x.clone()) for x in parameter.detach().split(rows)]
    gradient = torch.randn(12, 5)
    parameter.grad = gradient
    for part, of in zip(parts, gradient.split(rows), strict=True):
        part.grad = of.clone()
    Muon([{"params": [parameter], "use_muon": True, "stacked": rows}], lr=0.1).step()
    Muon([{"params": parts, "use_muon": True}], lr=0.1).step()
    torch.testing.assert_close(parameter.detach(), torch.cat([p.detach() for p in parts]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits(dtype):
    parameter = nn.Parameter(torch.randn(8, 6).to(dtype))
    wide = nn.Parameter(parameter.detach().float())
    for p in (parameter, wide):
        p.grad = torch.ones(8, 6).to(p.dtype)
        Muon([{"params": [p], "use_muon": True}], lr=0.1).step()
    assert parameter.dtype == dtype
    assert torch.equal(parameter.detach(), wide.detach().to(dtype))


def test_groups_of_a_model():
    sizes = BertConfig(40, 16, 2, 2, 32, max_position_embeddings=8)
    model = BertForPreTraining(sizes)
    names = {p: name for name, p in model.named_parameters()}
    alone, stacked, decayed, others, biases = groups = muon_groups(model, 0.1)
    assert [g["use_muon"] for g in groups] == [True, True, False, False, False]
    assert [g.get("stacked") for g in groups] == [None, (16,) * 3, None, None, (16,) * 3]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.1, 0.1, 0.0, 0.0]
    assert {names[p].split(".")[-2:] == ["qkv", "bias"] for p in biases["params"]} == {True}
    assert all(".encoder.layer." in names[p] for p in [*alone["params"], *stacked["params"]])
    assert len(alone["params"]) == 2 * 3
    assert [tuple(p.shape) for p in stacked["params"]] == [(48, 16)] * 2
    assert {names[p].split(".")[-2] for p in decayed["params"]} == {
        *("word_embeddings", "position_embeddings", "token_type_embeddings"),
        *("dense", "seq_relationship"),
    }
    assert not any(".encoder." in names[p] for p in decayed["params"])
    assert all(p.dim() == 1 for p in others["params"])
    everything = [p for group in groups for p in group["params"]]
    assert len(everything) == len(set(everything)) == len(names)
    model.bert.encoder.requires_grad_(False)
    frozen = muon_groups(model, 0.1)
    assert [g["params"] for g in frozen[:2]] == [[], []]
    left = [p for g in frozen for p in g["params"]]
    assert left == [p for p in everything if p.requires_grad]
    with pytest.raises(ValueError, match="model: expected linear layers in a module called encod"):
        muon_groups(nn.Sequential(nn.Linear(3, 3)), 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum: expected a number in"),
        ({"ns_steps": 0}, "ns_steps: expected an integer of 1 or more, got 0"),
        ({"ns_steps": 2.5}, "ns_steps: expected an integer of 1 or more, got 2.5"),
        ({"ns_dtype": "fp8"}, "ns_dtype: expected auto, bf16 or fp32, got 'fp8'"),
        ({"adjust_lr": "none"}, "adjust_lr: expected match_rms_adamw or original, got 'none'"),
        ({"adam_lr_share": -1}, "adam_lr_share: expected a number of 0 or more, got -1"),
        ({"lr": -1}, "lr: expected a number of 0 or more, got -1"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "use_muon": True}], **options)


def test_parameters_that_are_no_matrices():
    for shape in ((4,), (4, 2, 2)):
        group = {"params": [nn.Parameter(torch.ones(shape))], "use_muon": True}
        with pytest.raises(ValueError, match="params: expected matrices, got a param"):
            Muon([group])


def test_groups_that_do_not_say_what_muon_is_for():
    for given in (nn.Linear(3, 3).parameters(), [{"params": [nn.Parameter(torch.ones(2, 2))]}]):
        with pytest.raises(ValueError, match="params: expected groups with use_muon"):
            Muon(given)
