"""The measuring of a GPU's rates, with a stand-in for its clock."""

from collections import Counter

import pytest
import torch

from benchmarks import calibrate
from benchmarks.lib.step_products import PASSES, Layer, bf16_products, fp8_products, layers

# Rows and columns are multiples of 16, as 8 bits need.
LAYER = Layer("some", 32, 48, 64, 1, encoder=True, bias=True, residual=True)


class StandIn:
    """A CPU whose clock says what each step takes: 1 s, 2 s, ... in the order of their names."""

    name = "cpu"

    def __init__(self) -> None:
        self.calls = Counter()

    def measure(self, step):
        step()
        self.calls[step] += 1
        return list(self.calls).index(step) + 1.0

    def seconds(self, handle):
        return handle

    def copy_peak(self):
        return 4e12

    def chain(self, cycles, graph):
        gap = 1e-6 if graph else 3e-6
        return calibrate.CHAIN * (cycles / 2e9 + gap)

    def under_load(self):
        return {"product_rate": 7e14, "sm_clock": None}


def test_every_step_is_measured():
    device = StandIn()
    found = calibrate.measure(device, [LAYER])
    assert set(device.calls.values()) == {calibrate.ROUNDS + calibrate.WARMUP}
    assert found.pop("gaps") == pytest.approx({"launches": 3e-6, "graph": 1e-6})
    rows = found.pop("products")
    assert found == {"copy": 4e12, "product_rate": 7e14, "sm_clock": None}
    assert [(x["dtype"], x["pass"], x["seconds"]) for x in rows] == [
        (dtype, which, 3 * i + j + 1)
        for i, dtype in enumerate(("bfloat16", "float8"))
        for j, which in enumerate(PASSES)
    ]
    assert [x["epilogue"] for x in rows] == [
        *("bias", "sum with the residual's", "bias's gradient"),
        *("bias", "none", "none"),
    ]
    assert {x["flops"] for x in rows} == {2 * 32 * 48 * 64}


def test_a_layer_that_stays_in_16_bits_has_no_others():
    rows = calibrate.products(StandIn(), [LAYER._replace(encoder=False)])
    assert {x["dtype"] for x in rows} == {"bfloat16"}


@pytest.mark.parametrize("make", [bf16_products, fp8_products])
def test_products_are_those_of_a_linear_layer(make):
    steps = make(LAYER._replace(bias=False, residual=False), "cpu")
    shapes = {"forward": (32, 64), "input gradient": (32, 48), "weight gradient": (64, 48)}
    for which, shape in shapes.items():
        out = steps[which]()
        out = out if isinstance(out, torch.Tensor) else out[0]
        assert out.shape == shape
        # x has a standard deviation of 1, dy too, the weight one of 48 ** -0.5.
        scale = {"forward": 1.0, "input gradient": (64 / 48) ** 0.5, "weight gradient": 32**0.5}
        assert out.float().std().item() == pytest.approx(scale[which], rel=0.25)


def test_the_step_s_layers_have_every_epilogue():
    found = layers(12_280)
    assert len(found) == 14
    assert {e for layer in found for e in layer.epilogues().values()} == {
        *("none", "bias", "bias and GELU", "GELU's derivative", "bias's gradient"),
        "sum with the residual's",
    }
    for form in ("inner", "outer"):
        counted, other = (next(x for x in found if x.name == form + end) for end in ("", ", tanh"))
        assert counted.flops == other.flops
        assert not other.count
    # Both GELUs compute on the CPU's operators too, so that the arguments fit.
    for layer in found:
        small = layer._replace(rows=16, features=32, out=48)
        assert len([step() for step in bf16_products(small, "cpu").values()]) == 3


def test_the_clock_is_that_of_the_second_half():
    assert calibrate.median_clock("345\n345\n1965\n1980\n1980\n1950\n") == 1970e6 + 10e6
    assert calibrate.median_clock("[N/A]\n") is None
