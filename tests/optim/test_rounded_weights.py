"""Weights that the optimizer writes in 16 bits too: the same bits, and never an old copy."""

import io
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.nn import EncoderConfig, EncoderForPreTraining
from bert_unpad.ops.matmul import CPU_MULTIPLIES_BF16
from bert_unpad.ops.rounded_weights import copies_of, rounded
from bert_unpad.optim import FusedAdam, FusedLAMB, FusedStableAdamW, Muon, OneBitAdam
from bert_unpad.pretrain.config import read_config
from bert_unpad.pretrain.update.optimizer import build_optimizer, round_weights_in_updates
from tests.support.seeds import derived

OPTIMIZERS = {
    "adam": partial(FusedAdam, max_grad_norm=1.0),
    "lamb": FusedLAMB,
    "lans": partial(FusedLAMB, nesterov=True),
    "stable_adamw": FusedStableAdamW,
}
DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(33, 7), (1, 1), (64, 48), (5, 300), (0, 4)]


def _params() -> list[nn.Parameter]:
    torch.manual_seed(derived(0))
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def _set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(derived(step))
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) and a.dtype == b.dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_states_keep_their_bits(name, dtype):
    ours, plain = _params(), _params()
    optimizers = [OPTIMIZERS[name](params, lr=0.1) for params in (ours, plain)]
    optimizers[0].keep_rounded(ours, dtype)
    for step in range(4):
        for params, optimizer in zip((ours, plain), optimizers, strict=True):
            _set_gradients(params, step)
            optimizer.step()
        for a, b in zip(ours, plain, strict=True):
            assert _same_bits(a, b)
        for p in ours:
            copy = rounded(p, dtype)
            assert copy is rounded(p, dtype)  # no new one
            assert _same_bits(copy, p.detach().to(dtype))
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for number, state in states[1].items():
        assert set(state) == set(states[0][number])
        assert all(_same_bits(state[key], states[0][number][key]) for key in state)


def test_a_weight_that_something_else_has_changed_is_rounded_again():
    (param, *_) = params = _params()
    optimizer = FusedAdam(params, lr=0.1, skip_non_finite=True)
    optimizer.keep_rounded([param], torch.bfloat16)
    copy = rounded(param, torch.bfloat16)
    with torch.no_grad():
        param.mul_(3)
    assert _same_bits(rounded(param, torch.bfloat16), param.detach().bfloat16())
    # An update that is left out renews the copy too; so does one.
    for bad in (True, False):
        with torch.no_grad():
            param.add_(1)
        _set_gradients(params, 0)
        if bad:
            param.grad[0, 0] = torch.inf
        optimizer.step()
        assert rounded(param, torch.bfloat16) is copy
        assert _same_bits(copy, param.detach().bfloat16())
    param.grad = None
    optimizer.step()
    assert rounded(param, torch.bfloat16) is copy
    param.data = torch.randn_like(param)  # other memory
    assert _same_bits(rounded(param, torch.bfloat16), param.detach().bfloat16())
    assert rounded(param, torch.float16).dtype == torch.float16


def test_a_backward_pass_after_the_update_is_an_error():
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer = FusedAdam([weight], lr=0.1)
    optimizer.keep_rounded([weight], torch.bfloat16)
    y = ops.linear(torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True), weight)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def _train(kept: bool) -> list[Tensor]:
    torch.manual_seed(derived(0))
    first, second = (nn.Parameter(torch.randn(s) * 0.2) for s in ((64, 32), (32, 64)))
    third, bias = nn.Parameter(torch.randn(16, 32) * 0.2), nn.Parameter(torch.zeros(64))
    optimizer = FusedAdam([first, second, third, bias], lr=0.01)
    if kept:
        optimizer.keep_rounded([first, second, third], torch.bfloat16)
    losses = []
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(9, 32).bfloat16()
            inner, skip = ops.mlp(x, first, bias, second)
            loss = ops.linear(inner + skip, third).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_training_keeps_its_bits():
    assert torch.equal(torch.stack(_train(True)), torch.stack(_train(False)))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], True),
        (["--optimizer.name=lamb"], True),
        (["--cuda_graphs=true"], True),
        (["--precision=fp32"], False),
        (["--optimizer.name=muon"], False),
        (["--optimizer.name=adamw"], False),
        (["--compile=true"], False),
        (["--comm.hook=post_local_sgd"], False),
    ],
)
def test_when_the_trainer_does_it(more, expected):
    needed = ["--batching.global_batch_size=8", "--schedule.total_steps=10", "--precision=bf16"]
    config = read_config([*needed, "--optimizer.name=fused_adam", *more])[0]
    model = EncoderForPreTraining(
        EncoderConfig(
            vocab_size=30,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
        )
    )
    optimizer = build_optimizer(model, config.optimizer)
    round_weights_in_updates(model, optimizer, config, torch.device("cpu"))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    found = [rounded(p, torch.bfloat16) is rounded(p, torch.bfloat16) for p in matrices]
    assert any(found) == (expected and CPU_MULTIPLIES_BF16)


def test_only_what_a_step_writes_counts_as_written():
    (param, other, *_) = _params()
    optimizer = FusedAdam([param, other], lr=0.1)
    optimizer.keep_rounded([param, other], torch.bfloat16)
    del optimizer.param_groups[0]["params"][1]
    for p in (param, other):
        p.grad = torch.ones_like(p)
    with torch.no_grad():
        other.add_(5)
    optimizer.step()
    for p in (param, other):
        assert _same_bits(rounded(p, torch.bfloat16), p.detach().bfloat16())


def test_copies_for_who_reads_them_without_asking():
    """As a replayed CUDA graph does."""
    weights = _params()
    optimizer = FusedAdam(weights, lr=0.1)
    optimizer.keep_rounded(weights[1:], torch.bfloat16)
    found = copies_of(weights)
    assert all(weight is given for (weight, _), given in zip(found, weights[1:], strict=True))
    optimizer.keep_rounded(weights[1:], torch.bfloat16)  # other copies, which updates write now
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    with torch.no_grad():
        weights[1].mul_(3)
    for weight, copy in found:
        memory = copy.tensor.data_ptr()
        copy.renew(weight)
        assert copy.tensor.data_ptr() == memory
        assert _same_bits(copy.tensor, weight.detach().bfloat16())


def test_a_saved_weight_brings_no_copy():
    weight = nn.Parameter(torch.randn(8, 8))
    FusedAdam([weight], lr=0.1).keep_rounded([weight], torch.bfloat16)
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    assert _same_bits(torch.load(file, weights_only=True), weight)  # no class of ours


def test_bad_input():
    params = _params()
    with pytest.raises(ValueError, match=r"^params: expected parameters of this optimizer"):
        FusedAdam(params).keep_rounded(_params(), torch.bfloat16)
    with pytest.raises(ValueError, match=r"^dtype: expected torch.bfloat16, torch.float16 or"):
        FusedAdam(params).keep_rounded(params, torch.float32)
    low = nn.Parameter(torch.randn(3, 3).bfloat16())
    with pytest.raises(ValueError, match=r"^params: expected float32 parameters"):
        FusedAdam([low]).keep_rounded([low], torch.bfloat16)
    for optimizer in (Muon([{"params": params, "use_muon": False}]), OneBitAdam(params)):
        with pytest.raises(NotImplementedError, match="keeps no rounded weights"):
            optimizer.keep_rounded(params, torch.bfloat16)
