"""Linear layers side by side: one product, or several into one buffer."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bert_unpad.hf import plain_modules
from tests.support.seeds import derived

WIDTH, FEATURES = 64, 96


@pytest.fixture(params=["concatenated", "several", "concatenated, no bias", "several, no bias"])
def modules(request, monkeypatch) -> list[nn.Linear]:
    """Three layers; the way in which bf16 products are computed does not depend on this CPU."""
    bf16 = request.param.startswith("concatenated")
    monkeypatch.setattr(
        plain_modules, "product_dtype", lambda x: x.dtype if bf16 else torch.float32
    )
    torch.manual_seed(derived(0))
    bias = not request.param.endswith("no bias")
    return [nn.Linear(WIDTH, FEATURES, bias) for _ in range(3)]


def gradients(f, modules: list[nn.Linear], x: Tensor) -> list[Tensor | None]:
    """Of the square sum of f's result: x, then weights and biases."""
    x = x.detach().requires_grad_()
    for module in modules:
        module.zero_grad(set_to_none=True)
    f(x).float().square().sum().backward()
    return [x.grad, *(p.grad for module in modules for p in module.parameters())]


def plain(modules: list[nn.Linear], x: Tensor) -> Tensor:
    biases = [None if m.bias is None else m.bias.to(x.dtype) for m in modules]
    return torch.cat(
        [
            functional.linear(x, m.weight.to(x.dtype), bias)
            for m, bias in zip(modules, biases, strict=True)
        ],
        1,
    )


@pytest.mark.parametrize("tokens", [0, 1, 50])
@pytest.mark.parametrize("frozen", ["nothing", "weights", "one weight", "all"])
def test_values_and_gradients(modules: list[nn.Linear], tokens: int, frozen: str) -> None:
    for i, module in enumerate(modules):
        module.weight.requires_grad_(frozen == "nothing" or (frozen == "one weight" and i != 1))
        if module.bias is not None:
            module.bias.requires_grad_(frozen != "all")
    x = torch.randn(tokens, WIDTH).bfloat16()
    got = plain_modules.project_side_by_side(tuple(modules), x)
    assert got.shape == (tokens, 3 * FEATURES)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, plain(modules, x), rtol=0.02, atol=0.02)
    ours = gradients(lambda x: plain_modules.project_side_by_side(tuple(modules), x), modules, x)
    theirs = gradients(lambda x: plain(modules, x), modules, x)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and a.numel():
            assert a.dtype == b.dtype
            assert (a.float() - b.float()).abs().max() <= 0.02 * b.abs().max()


def test_a_gradient_that_is_one_number(modules: list[nn.Linear]) -> None:
    x = torch.randn(8, WIDTH).bfloat16().requires_grad_()
    out = plain_modules.project_side_by_side(tuple(modules), x)
    out.sum().backward()  # dy has strides of 0
    want = sum(m.weight.detach().bfloat16().float().sum(0) for m in modules).expand(8, WIDTH)
    torch.testing.assert_close(x.grad.float(), want, rtol=0.02, atol=0.05)
