"""MERIT against its algorithm element by element in float64, and edge cases."""

import pytest
import torch
from torch import Tensor, nn

from bert_unpad.experimental import MERIT

SHAPES = [(5, 7), (1, 4), (4, 1), (1, 1), (6,), (1,)]
OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def _truth(weight: Tensor, gradients: list[Tensor], **options) -> Tensor:
    """The weight after some steps, element by element."""
    lr, (beta1, beta2) = options["lr"], options["betas"]
    w = weight.detach().double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for gradient in gradients:
        g = gradient.double()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        u = m / (v.sqrt() + options["eps"]) + options["weight_decay"] * w
        new = w.clone()
        for place in torch.cartesian_prod(*(torch.arange(n) for n in w.shape)).view(-1, w.dim()):
            at = tuple(place.tolist())
            ranges = [(w, u)]
            if w.dim() == 2:
                ranges += [(w[at[0]], u[at[0]]), (w[:, at[1]], u[:, at[1]])]
            maxima = [(x.abs().max(), y.abs().max()) for x, y in ranges]
            checked = maxima[1:] if w.dim() == 2 else maxima
            ratio = 1.0
            if all(x > 0 and y > 0 for x, y in checked):
                ratio = max(x / y for x, y in maxima)
            new[at] -= lr * min(max(ratio * u[at], -1.0), 1.0)
        w = new
    return w


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_8_steps_against_float64(shape, scale):
    parameter = nn.Parameter(scale * torch.randn(shape))
    gradients = [torch.randn(shape) for _ in range(8)]
    want = _truth(parameter, gradients, **OPTIONS)
    optimizer = MERIT([parameter], **OPTIONS)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    torch.testing.assert_close(parameter.detach().double(), want, atol=1e-5, rtol=1e-5)


def test_large_weights_are_clipped():
    parameter = nn.Parameter(torch.full((3, 3), 100.0))
    parameter.grad = torch.ones(3, 3)
    MERIT([parameter], lr=0.5, weight_decay=0.0).step()
    assert torch.equal(parameter.detach(), torch.full((3, 3), 99.5))


@pytest.mark.parametrize("shape", [(3, 4), (4,)])
@pytest.mark.parametrize("zeros", ["weight", "gradient"])
def test_zeros(shape, zeros):
    parameter = nn.Parameter(torch.randn(shape))
    gradient = torch.randn(shape)
    (parameter.data if zeros == "weight" else gradient)[:2] = 0
    options = OPTIONS | {"weight_decay": 0.0}
    want = _truth(parameter, [gradient] * 2, **options)
    optimizer = MERIT([parameter], **options)
    for _ in range(2):
        parameter.grad = gradient
        optimizer.step()
    torch.testing.assert_close(parameter.detach().double(), want, atol=1e-5, rtol=1e-5)
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    MERIT([parameter]).step()
    assert not parameter.any()


def test_empty_and_missing():
    empty, missing = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(2))
    empty.grad = torch.ones(0, 3)
    optimizer = MERIT([empty, missing])
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3
    assert missing not in optimizer.state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr: expected a number of 0 or more, got -1.0"),
        ({"eps": -1.0}, "eps: expected a number of 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay: expected a number of 0 or more, got nan"),
        ({"betas": (0.9, 1.0)}, "betas: expected two numbers in"),
        ({"betas": (0.9,)}, "betas: expected two numbers in"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        MERIT([nn.Parameter(torch.ones(2))], **options)
