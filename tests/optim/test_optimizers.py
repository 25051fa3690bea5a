"""FusedAdam, FusedLAMB and FusedStableAdamW: 200 steps, state dicts, groups, and skipped steps."""

import copy

import pytest
import torch
from torch import Tensor, nn

from bert_unpad.optim import FusedAdam, FusedLAMB, FusedStableAdamW, decay_groups
from tests.support.optim_reference import Rule, Truth
from tests.support.seeds import derived

SIZES = [(40, 30), (30,), (7, 11), (1,)]
KINDS = [FusedAdam, FusedLAMB, FusedStableAdamW]


def draw(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(derived(seed))
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def set_gradients(params: list[nn.Parameter], step: int, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(derived(1000 + step))
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype or p.dtype)


def assert_close(got: list[Tensor], want: list[Tensor], atol: float = 1e-6) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.detach().double(), b.detach().double(), rtol=1e-6, atol=atol)


@pytest.mark.parametrize("master", [False, True])
def test_200_steps_of_adam_against_float64_and_adamw(master: bool) -> None:
    dtype = torch.bfloat16 if master else torch.float32
    params = draw(dtype)
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    truth = Truth(params, Rule("adam", **options))
    peers = [nn.Parameter(p.detach().float().clone()) for p in params]
    ours = FusedAdam(params, **options, master_weights=master)
    peer = torch.optim.AdamW(peers, **options)
    for step in range(200):
        set_gradients(params, step)
        for p, q in zip(params, peers, strict=True):
            q.grad = p.grad.float()
        truth.step([p.grad for p in params])
        ours.step()
        peer.step()
    weights = [ours.state[p]["master_param"] for p in params] if master else params
    # Of a way of up to 0.2, in 200 roundings.
    assert_close(weights, truth.params, 2e-5)
    assert_close(weights, peers, 3e-5)
    if master:
        assert all(torch.equal(p, w.bfloat16()) for p, w in zip(params, weights, strict=True))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("master", [False, True])
def test_200_steps_of_lamb_against_float64(master: bool, nesterov: bool) -> None:
    params = draw(torch.bfloat16 if master else torch.float32)
    rule = Rule("lamb", 1e-3, (0.9, 0.99), 1e-6, 0.1, 0.0 if nesterov else 1.0, nesterov=nesterov)
    truth = Truth(params, rule)
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, "nesterov": nesterov}
    ours = FusedLAMB(params, **options, master_weights=master)
    for step in range(200):
        set_gradients(params, step)
        truth.step([p.grad for p in params])
        ours.step()
    weights = [ours.state[p]["master_param"] for p in params] if master else params
    assert_close(weights, truth.params, 1e-5)


@pytest.mark.parametrize("master", [False, True])
def test_200_steps_of_stable_adamw_against_float64(master: bool) -> None:
    params = draw(torch.bfloat16 if master else torch.float32)
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    truth = Truth(params, Rule("stable", **options))
    ours = FusedStableAdamW(params, **options, master_weights=master)
    for step in range(200):
        set_gradients(params, step)
        for p in params:
            p.grad *= 5.0 if step % 20 == 0 else 1.0
        truth.step([p.grad for p in params])
        ours.step()
    weights = [ours.state[p]["master_param"] for p in params] if master else params
    assert_close(weights, truth.params, 2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_to_adamw_and_back(kind) -> None:
    options = {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.2}
    params, peers = draw(), draw()
    ours, peer = kind(params, **options), torch.optim.AdamW(peers)
    for step in range(3):
        set_gradients(params, step)
        ours.step()
    for p, q in zip(params, peers, strict=True):
        q.data.copy_(p)
    peer.load_state_dict(ours.state_dict())
    set_gradients(peers, 3)
    peer.step()
    assert peer.param_groups[0]["betas"] == (0.8, 0.95)
    assert peer.state[peers[0]]["step"] == 4
    again = draw()
    back = kind(again, **options)
    back.load_state_dict(peer.state_dict())
    for p, q in zip(again, peers, strict=True):
        q.grad = None
        p.data.copy_(q)
        assert torch.equal(back.state[p]["exp_avg"], peer.state[q]["exp_avg"])
    if kind is FusedAdam:
        for optimizer, tensors in ((back, again), (peer, peers)):
            set_gradients(tensors, 4)
            optimizer.step()
        assert_close(again, peers)


def test_a_resumed_run_has_the_same_bits() -> None:
    params = draw(torch.bfloat16)
    ours = FusedAdam(params, lr=1e-3, master_weights=True)
    for step in range(3):
        set_gradients(params, step)
        ours.step()
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = FusedAdam(others, lr=1e-3, master_weights=True)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert other.state[others[0]]["exp_avg_sq"].dtype == torch.float32
    for step in (3, 4):
        for optimizer, tensors in ((ours, params), (other, others)):
            set_gradients(tensors, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    for p, q in zip(params, others, strict=True):
        assert torch.equal(ours.state[p]["master_param"], other.state[q]["master_param"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_skipped_and_counted(kind) -> None:
    params = draw()
    ours = kind([{"params": params[:2]}, {"params": params[2:]}], skip_non_finite=True)
    set_gradients(params, 0)
    ours.step()
    before = [p.detach().clone() for p in params]
    params[3].grad.fill_(torch.nan)
    ours.step()
    assert ours.skipped_steps == 1
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert ours.state[params[0]]["step"] == 1


def test_mixed_dtypes_missing_gradients_and_closures() -> None:
    params = [*draw(torch.bfloat16), *draw(torch.float32, 1)]
    ours = FusedAdam(params, lr=1.0)  # so that bf16 shows every update
    set_gradients(params, 0)
    params[1].grad = None
    before = [p.detach().clone() for p in params]
    assert ours.step(lambda: torch.tensor(3.0)) == 3
    same = [torch.equal(p, b) for p, b in zip(params, before, strict=True)]
    assert same == [i == 1 for i in range(8)]
    ours.zero_grad()
    assert all(p.grad is None for p in params)
    ours.step()


def test_parameters_without_decay_get_no_trust_ratio() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))
    groups = decay_groups(model, 0.1)
    assert [len(group["params"]) for group in groups] == [1, 3]
    bias = model[0].bias
    for always in (False, True):
        start = bias.detach().clone()
        groups = decay_groups(model, 0.1)
        ours = FusedLAMB(groups, lr=0.1, max_grad_norm=None, always_adapt=always)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        ours.step()
        moved = (start - bias).detach()
        # u is 1 in the first step.
        ratio = start.norm() / 2 if always else 1.0
        torch.testing.assert_close(moved, torch.full((4,), 0.1) * ratio, rtol=1e-4, atol=1e-6)


def test_a_backward_pass_notices_an_update() -> None:
    p = nn.Parameter(torch.ones(4))
    loss = (p * p).sum()
    p.grad = torch.ones(4)
    FusedAdam([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr: expected a number of 0 or more, got -1.0"),
        ({"lr": "x"}, "lr: expected a number of 0 or more, got 'x'"),
        ({"betas": (0.9, 1.0)}, r"betas: expected two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"betas": (0.9, 0.99, 0.999)}, "betas: expected two numbers in"),
        ({"betas": 0.9}, "betas: expected two numbers in"),
        ({"betas": ("x", 0.9)}, "betas: expected two numbers in"),
        ({"eps": -1.0}, "eps: expected a number of 0 or more"),
        ({"weight_decay": -0.1}, "weight_decay: expected a number of 0 or more"),
        ({"weight_decay": True}, "weight_decay: expected a number of 0 or more, got True"),
        ({"max_grad_norm": 0.0}, "max_grad_norm: expected a number above 0 or None"),
        ({"max_grad_norm": "x"}, "max_grad_norm: expected a number above 0 or None, got 'x'"),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match=message):
            kind(draw(), **options)


def test_what_is_not_supported() -> None:
    with pytest.raises(ValueError, match="amsgrad: expected False"):
        FusedAdam(draw(), amsgrad=True)
    peer = torch.optim.AdamW(draw(), amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad: expected False"):
        FusedAdam(draw()).load_state_dict(peer.state_dict())
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.eye(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        FusedAdam([p]).step()


def test_gradients_whose_squares_overflow() -> None:
    """As in PyTorch: the second moment becomes infinite, and the weight stays finite."""
    sizes = torch.tensor([1.0, 1e18, 1.8e19, 1.9e19, 1e20, 3e38]).repeat(7)
    ours, theirs = (nn.Parameter(torch.ones_like(sizes)) for _ in range(2))
    for p, kind in ((ours, FusedAdam), (theirs, torch.optim.AdamW)):
        p.grad = sizes.clone()
        kind([p], lr=0.1, betas=(0.9, 0.0)).step()
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
