"""wgmma on the model of a block: what it multiplies, and that each fault is found."""

import re

import pytest
import torch

from gpu_model import build, conformance
from gpu_model.block_model import POLICIES, Model
from tests.support.model_checks import assert_every_site_is_needed
from tests.support.seeds import derived


@pytest.fixture(scope="module")
def primitives():
    model = Model(build.load(build.KERNELS / "conformance.cpp"))

    def call(name, *arguments):
        model.clear()
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor):
                model.register(tensor)
        model.call(name, *arguments)

    call.model = model
    return call


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_have_the_layouts_of_the_hardware(primitives, policy, dtype):
    for seed in (1, 2):
        primitives.model.configure(policy, seed)
        conformance.check_wgmma(primitives, "cpu", dtype)


def test_each_barrier_wait_and_fence_is_needed(primitives):
    x = torch.randn(64, 64).to(torch.bfloat16)
    out = torch.empty(64, 64)

    def run() -> None:
        primitives("conformance_wgmma", 1, 2, x, x.clone(), None, out)

    kinds = [site.kind for site in assert_every_site_is_needed(primitives.model, run)]
    assert kinds == ["copy_async_wait", "fence_shared", "sync_block", "wgmma_fence", "wgmma_wait"]


# In the order of faults_wgmma.cpp.
FAULTS = {
    "none": None,
    "tiles_differ": "wgmma, but the threads of the warpgroup give different operands",
    "warps_exit": "wgmma_fence, but lane .* has exited|exits, but lane .* waits in wgmma_fence",
    "warps_at_barrier": "wgmma_fence, but lane .* at |sync_block, but lane .* waits in wgmma_fence",
    "early_fence": "wgmma reads .* with no fence_shared before the barrier",
    "late_fence": "wgmma reads .* with no fence_shared before the barrier",
    "not_committed": "wgmma is never waited for",
    "younger_group": "wgmma is never waited for",
    "overwritten": "race: writes shared memory .* read by the warp of thread",
    "copied_over": r"race: reads shared memory .* \(wgmma\)",
}


@pytest.fixture(scope="module")
def faults():
    return Model(build.load(build.KERNELS / "faults_wgmma.cpp"))


def run(model: Model, fault: str, threads: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(derived(1))).to(torch.bfloat16)
    out = torch.full((64, 64), torch.nan)
    model.clear()
    model.register(x, writable=False)
    model.register(out)
    model.call("run_product", list(FAULTS).index(fault), threads, x, out)
    return x.double(), out


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fault", [name for name, message in FAULTS.items() if message])
def test_fault_is_reported_with_block_thread_and_line(faults, fault, policy):
    for seed in range(4):
        faults.configure(policy, seed)
        with pytest.raises(RuntimeError, match=FAULTS[fault]) as error:
            run(faults, fault)
        place = r"product: block \(0, 0, 0\), thread \(\d+, 0, 0\), gpu_model/kernels/faults_wgmma"
        assert re.match(place, str(error.value)), str(error.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_legal_twin_passes(faults, policy):
    for seed in range(4):
        faults.configure(policy, seed)
        x, out = run(faults, "none")
        torch.testing.assert_close(out.double(), x @ x.T, rtol=1e-5, atol=1e-4)


def test_sums_are_nan_until_they_are_waited_for(faults):
    faults.configure()
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    out = torch.zeros(64, 64)
    faults.clear()
    faults.register(x, writable=False)
    faults.register(out)
    with pytest.raises(RuntimeError, match="never waited for"):
        faults.call("run_product", list(FAULTS).index("not_committed"), 128, x, out)
    assert out.isnan().any()


def test_blocks_without_a_whole_warpgroup(faults):
    faults.configure()
    with pytest.raises(RuntimeError, match="last warpgroup has less than 4 warps"):
        run(faults, "none", threads=96)
