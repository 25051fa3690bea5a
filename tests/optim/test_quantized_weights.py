"""Weights that the optimizer writes in 8 bits too: the bits of rounding in every forward pass."""

import pytest
import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.ops import fp8
from bert_unpad.ops.fp8 import QuantizedWeight, quantize_fp8
from bert_unpad.ops.matmul import CPU_MULTIPLIES_BF16
from bert_unpad.ops.rounded_weights import RoundedWeight, copies_of, find_copy
from bert_unpad.optim import FusedAdam, Muon, decay_groups
from bert_unpad.pretrain.config import read_config
from bert_unpad.pretrain.update.optimizer import build_optimizer, round_weights_in_updates
from tests.nn.test_bert import make_inputs, make_model
from tests.optim.test_rounded_weights import OPTIMIZERS
from tests.support.seeds import derived

E4M3 = torch.float8_e4m3fn


def _parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(derived(0))
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _is_up_to_date(weight: Tensor) -> bool:
    """Whether there is a copy that `ops.fp8_linear` takes; it must then be right."""
    copy = find_copy(weight, QuantizedWeight)
    if copy is None:
        return False
    for got, want in zip(copy.tensors, quantize_fp8(weight.detach(), False), strict=True):
        assert torch.equal(got.flatten().view(torch.uint8), want.flatten().view(torch.uint8))
    return True


def _train(name: str, recompute: str, kept: bool) -> list[Tensor]:
    """Losses and weights of a few updates of two passes each, resumed after the second."""
    model, saved, results = None, None, []
    for step in range(4):
        if step in (0, 2):
            model = make_model(hidden_size=32, num_attention_heads=2, intermediate_size=64).train()
            model.bert.encoder.fp8 = True
            model.bert.encoder.recompute = recompute
            optimizer = OPTIMIZERS[name](decay_groups(model, 0.01), lr=0.01)
            if saved is not None:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            if kept:
                optimizer.keep_rounded(model.bert.encoder.fp8_weights, E4M3)
        for number in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(make_inputs(seed=2 * step + number))
            loss = out.mlm_loss_sum + out.nsp_loss_sum
            loss.backward()
            results.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if kept:
            assert all(_is_up_to_date(weight) for weight in model.bert.encoder.fp8_weights)
        if step == 1:
            saved = model.state_dict(), optimizer.state_dict()
    return [*results, *model.parameters()]


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("adam", "none"), ("lamb", "gelu"), ("lans", "none"), ("stable_adamw", "layer")],
)
def test_training_keeps_its_bits(name, recompute):
    kept, plain = (_train(name, recompute, kept) for kept in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))


def test_a_weight_is_rounded_once_an_update(monkeypatch):
    first, second = _parameters((32, 16), (48, 32))
    optimizer = FusedAdam([first, second], lr=0.1)
    optimizer.keep_rounded([first, second], E4M3)
    seen: list[int] = []

    def spy(x: Tensor, *rest: bool) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(x.data_ptr())
        return quantize_fp8(x, *rest)

    monkeypatch.setattr(fp8, "quantize_fp8", spy)
    for _ in range(3):
        for _ in range(2):
            ops.fp8_linear(ops.fp8_linear(torch.randn(5, 16), first), second).sum().backward()
        optimizer.step()
    assert len(seen) == 3 * 2 * 4 + 3 * 2  # inputs and gradients in every pass, and the weights
    assert [seen.count(weight.data_ptr()) for weight in (first, second)] == [3, 3]


def test_a_weight_that_something_else_has_changed_is_rounded_again():
    (weight,) = _parameters((32, 16))
    optimizer = FusedAdam([weight], lr=0.1, skip_non_finite=True)
    optimizer.keep_rounded([weight], E4M3)
    x = torch.randn(5, 16)
    with torch.no_grad():
        weight.mul_(torch.randn(32, 16))
    assert not _is_up_to_date(weight)
    assert torch.equal(ops.fp8_linear(x, weight), ops.fp8_linear(x, weight.detach().clone()))
    # An update that is left out renews the copy too; so does one.
    for bad in (True, False):
        with torch.no_grad():
            weight.mul_(2)
        weight.grad = torch.full_like(weight, torch.inf if bad else 1.0)
        optimizer.step()
        assert _is_up_to_date(weight)
    # As a replayed CUDA graph does, which reads the same memory.
    ((_, copy),) = copies_of([weight])
    memory = [tensor.data_ptr() for tensor in copy.tensors]
    with torch.no_grad():
        weight.zero_()
    copy.renew(weight)
    assert _is_up_to_date(weight)
    assert [tensor.data_ptr() for tensor in copy.tensors] == memory


def test_a_backward_pass_after_the_update_is_an_error():
    (weight,) = _parameters((32, 16))
    optimizer = FusedAdam([weight], lr=0.1)
    optimizer.keep_rounded([weight], E4M3)
    y = ops.fp8_linear(torch.randn(3, 16, requires_grad=True), weight)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_weight_has_one_copy():
    (weight,) = _parameters((32, 16))
    optimizer = FusedAdam([weight], lr=0.1)
    for dtype, kind in ((torch.bfloat16, RoundedWeight), (E4M3, QuantizedWeight)) * 2:
        optimizer.keep_rounded([weight], dtype)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert [type(copy) for _, copy in copies_of([weight])] == [kind]
        assert find_copy(weight, kind) is not None


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], True),
        (["--optimizer.name=lamb", "--cuda_graphs=true"], True),
        (["--optimizer.name=muon"], False),
    ],
)
def test_when_the_trainer_does_it(more, expected):
    """The encoder's weights in 8 bits, those of the heads in 16 where products take so many."""
    needed = ["--batching.global_batch_size=8", "--schedule.total_steps=10", "--precision=fp8"]
    config = read_config([*needed, "--optimizer.name=fused_adam", *more])[0]
    model = make_model(hidden_size=32, num_attention_heads=2, intermediate_size=64)
    model.bert.encoder.fp8 = True
    optimizer = build_optimizer(model, config.optimizer)
    round_weights_in_updates(model, optimizer, config, torch.device("cpu"))
    in_8_bits = model.bert.encoder.fp8_weights
    assert len(in_8_bits) == 4 * 3
    assert all(_is_up_to_date(weight) == expected for weight in in_8_bits)
    others = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}.difference(in_8_bits)
    in_16_bits = expected and CPU_MULTIPLIES_BF16
    assert all((find_copy(w, RoundedWeight) is not None) == in_16_bits for w in others)


def test_bad_input():
    narrow, vector, good = _parameters((24, 16), (16,), (16, 16))
    optimizer = FusedAdam([narrow, vector])
    for weight in (narrow, vector):
        with pytest.raises(ValueError, match=r"^params: expected matrices with multiples of 16"):
            optimizer.keep_rounded([weight], E4M3)
    muon = Muon([{"params": [good], "use_muon": True}])
    with pytest.raises(NotImplementedError, match="keeps no rounded weights"):
        muon.keep_rounded([good], E4M3)
