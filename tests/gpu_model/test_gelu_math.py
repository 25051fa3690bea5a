"""The formulas of csrc/gelu/gelu_math.h, compiled by the C++ compiler, without a GPU.

Only the two hardware approximations (2^x, 1/x) differ on a GPU, by an ulp or two.
"""

import ctypes
import math
import os
import shutil
import subprocess

import pytest
import torch

from tests.support.paths import CSRC

SOURCE = """
#include "gelu/gelu_math.h"
using namespace bert_unpad;
extern "C" void evaluate(const float* u, float* out, int n) {
  for (int i = 0; i < n; ++i) {
    out[i] = gelu<false>(u[i]);
    out[n + i] = gelu_derivative<false>(u[i]);
    out[2 * n + i] = gelu<true>(u[i]);
    out[3 * n + i] = gelu_derivative<true>(u[i]);
  }
}
"""


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("gelu_math")
    (folder / "gelu.cpp").write_text(SOURCE)
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{CSRC}"]
    library = folder / "gelu.so"
    subprocess.run([*command, str(folder / "gelu.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).evaluate

    def call(u: torch.Tensor) -> torch.Tensor:
        out = torch.empty(4, u.numel())
        function(ctypes.c_void_p(u.data_ptr()), ctypes.c_void_p(out.data_ptr()), u.numel())
        return out

    return call


def reference(u: torch.Tensor) -> torch.Tensor:
    """gelu, its derivative, and both of the tanh form, in float64 and without cancellation."""
    u = u.double()
    cdf = torch.special.erfc(-u / math.sqrt(2)) / 2
    pdf = torch.exp(-u * u / 2) / math.sqrt(2 * math.pi)
    k = math.sqrt(2 / math.pi)
    v = 2 * k * (u + 0.044715 * u**3)
    slope = 2 * k * (1 + 3 * 0.044715 * u**2)
    s, complement = torch.sigmoid(v), torch.sigmoid(-v)
    return torch.stack([u * cdf, cdf + u * pdf, u * s, s + u * slope * s * complement])


def test_gelu_is_accurate_everywhere(evaluate):
    u = torch.linspace(-16, 16, 200_001)
    got, want = evaluate(u).double(), reference(u)
    error = (got - want).abs() / (1 + want.abs())
    assert error.max() < 2e-7


def test_gelu_keeps_its_relative_accuracy_in_the_negative_tail(evaluate):
    u = torch.linspace(-8, 0, 50_001)[:-1]
    got, want = evaluate(u).double(), reference(u)
    relative = ((got - want) / want).abs()
    assert relative[0].max() < 1e-5
    assert relative[2].max() < 1e-5
    # The usual formula has no correct digit left at -6.
    naive = 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))
    assert ((naive - want[0]) / want[0]).abs()[u < -6].min() > 0.5


def test_gelu_of_extreme_values(evaluate):
    out = evaluate(torch.tensor([1e30, -1e30, 40.0, -40.0, 0.0, -0.0, math.nan, math.inf]))
    for gelu in (out[0], out[2]):
        assert gelu[:6].tolist() == [pytest.approx(1e30), 0.0, 40.0, 0.0, 0.0, 0.0]
        assert math.isnan(gelu[6])
        assert gelu[7] == math.inf
    for derivative in (out[1], out[3]):
        assert derivative[2:6].tolist() == [1.0, 0.0, 0.5, 0.5]
        assert math.isnan(derivative[6])
