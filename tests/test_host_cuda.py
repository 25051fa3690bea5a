"""The model of a CUDA block that kernels run on without a GPU (tests/host_cuda), and the kernels of
bias_gelu on it.

A model that misses faults would be worse than none, so most of this makes faults and asks for the
message.
"""

import ctypes
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from host_cuda import build, conformance
from host_cuda.model import POLICIES, Model

HERE = Path(__file__).resolve().parent / "host_cuda"
pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in csrc/cpu/types.h


@pytest.fixture(scope="module")
def faults():
    return Model(build.load(HERE / "faults.cpp"))


@pytest.fixture(scope="module")
def gelu():
    return Model(build.load(HERE / "gelu.cpp"))


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The primitives


@pytest.fixture(scope="module")
def primitives():
    model = Model(build.load(HERE / "conformance.cpp"))

    def call(name, *arguments):
        model.clear()
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor):
                model.register(tensor)
        numbers = [ctypes.c_int(a) if isinstance(a, int) else a for a in arguments]
        model.call(name, *numbers)

    call.model = model
    return call


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mma_and_matrices_have_the_layouts_of_the_hardware(primitives, policy, dtype):
    primitives.model.configure(policy, seed=1)
    conformance.check_mma(primitives, "cpu", dtype)
    conformance.check_matrices(primitives, "cpu")
    primitives.model.statistics(reset=True)
    conformance.check_tile(primitives, "cpu", dtype)
    counts = primitives.model.statistics()
    assert (counts.mma, counts.load_matrices, counts.bank_conflict_cycles) == (16, 12, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pack_rounds_to_nearest_even_and_unpack_is_exact(primitives, dtype):
    primitives.model.configure()
    conformance.check_pack(primitives, "cpu", dtype)


@pytest.mark.parametrize("policy", POLICIES)
def test_shuffles_and_copies(primitives, policy):
    for seed in range(4):
        primitives.model.configure(policy, seed)
        conformance.check_shuffle(primitives, "cpu")
        conformance.check_copy(primitives, "cpu")


def test_bank_conflicts_are_counted(primitives):
    """Rows of 16 bytes one after the other have none; eight rows 128 bytes apart share 4 banks."""
    model = primitives.model
    rows = torch.zeros(32, 8, dtype=torch.int16)
    out = [torch.empty(32, 4, dtype=torch.int32) for _ in range(2)]
    for address, cycles in ((torch.arange(32), 0), (torch.arange(32) % 4 * 8, 2 * 4 * 3)):
        model.statistics(reset=True)
        primitives("conformance_matrices", rows, address.int(), *out)
        assert model.statistics().bank_conflict_cycles == cycles


# Faults

FAULTS = {
    "half_syncs": r"\d+ of the block's 64 threads (wait in sync_block|have exited)",
    "two_barriers": "other threads wait in another one",
    "exits_before_barrier": "wait in sync_block|1 of the block's 64 threads have exited",
    "skips_shuffle": "waits in (shuffle_xor|sync_block) at",
    "two_shuffles": "shuffle_xor, but lane .* waits in shuffle_xor at",
    "shared_out_of_bounds": "at offset 4096, out of bounds: the block has 4096|at offset 4[12]",
    "shared_misaligned": r"store of 16 bytes .* at offset \d+, which is no multiple",
    "matrices_misaligned": r"thread \((9|41), 0, 0\).* offset 8, which is no multiple",
    "global_out_of_bounds": "load of 4 bytes .* at byte 256 of buffer 0, which has 256 bytes",
    "global_before_the_buffer": "store of 4 bytes .* at byte -4 of buffer 1",
    "global_partly_outside": "load of 16 bytes",
    "global_misaligned": "load of 16 bytes .* no multiple",
    "writes_read_only": "store of 4 bytes .* read-only",
    "copy_out_of_bounds": "asynchronous copy of 16 bytes .* out of bounds",
    "copy_misaligned": "asynchronous copy of 16 bytes .* no multiple",
    "copy_never_waited_for": "asynchronous copy is never waited for",
    "copy_not_committed": "asynchronous copy is never waited for",
    "copy_read_early": "destination of an asynchronous copy that was not waited for",
    "copy_in_younger_group": "destination of an asynchronous copy that was not waited for",
    "copy_without_barrier": "race: reads shared memory .* written by thread",
    "copy_over_unread_data": "race: writes shared memory .* read by thread",
    "shuffle_for_barrier": "race: reads shared memory",
    "warp_barrier_for_another_warp": "race: reads shared memory|never written",
    "matrices_after_shuffle": "race: reads shared memory",
    "write_under_matrices": "race: writes .* read by the warp of thread",
    "write_after_reads": "race: ",
    "two_writers": "race: writes .* written by thread",
    "uninitialised": r"thread \(4, 0, 0\).* offset 20 was never written",
    "requirement": "in must be above 1000",
}
LEGAL = ["warp_barrier", "matrices_behind_barriers", "copy_of_nothing"]


def run(model, name, rounds=1, blocks=1, threads=64, shared_bytes=4096):
    """Runs a kernel of faults.cpp on 64 numbers; its 64 results."""
    # Aligned like PyTorch's allocations; the numbers lie between two that no kernel may touch.
    x = torch.randn(64, generator=torch.Generator().manual_seed(1))
    out = torch.full((64,), torch.nan)
    model.clear()
    model.register(x, writable=False)
    model.register(out)
    sizes = map(ctypes.c_int, (blocks, threads, shared_bytes, rounds))
    model.call("run_case", name.encode(), *sizes, x, out)
    return x, out


def marked_lines(name):
    lines = (HERE / "faults.cpp").read_text().splitlines()
    return [i for i, line in enumerate(lines, 1) if line.endswith(f"// fault: {name}")]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported_with_block_thread_and_line(faults, name, policy):
    for seed in range(5):
        faults.configure(policy, seed)
        with pytest.raises(RuntimeError, match=FAULTS[name]) as error:
            run(faults, name)
        head = re.match(
            rf"{name}: block \(0, 0, 0\), thread \(\d+, 0, 0\), tests/host_cuda/faults.cpp:(\d+): ",
            str(error.value),
        )
        assert head is not None, str(error.value)
        assert int(head[1]) in marked_lines(name), str(error.value)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LEGAL)
def test_legal_twin_passes(faults, name, policy):
    for seed in range(5):
        faults.configure(policy, seed)
        x, out = run(faults, name)
        if name == "warp_barrier":
            assert torch.equal(out, x[torch.arange(64) ^ 1])


def test_launches_that_no_device_would_take(faults):
    faults.configure()
    faults.set_device((8, 0))
    run(faults, "row_sum", shared_bytes=166912)
    with pytest.raises(RuntimeError, match="166916 bytes of shared memory; the device has 166912"):
        run(faults, "row_sum", shared_bytes=166916)
    faults.set_device((9, 0))
    run(faults, "row_sum", shared_bytes=166916)
    with pytest.raises(RuntimeError, match=r"block of \(1056, 1, 1\) threads"):
        run(faults, "row_sum", threads=1056)
    with pytest.raises(RuntimeError, match=r"grid of \(0, 1, 1\) blocks"):
        run(faults, "row_sum", blocks=0)
    # An error leaves nothing behind.
    run(faults, "row_sum")


def test_partial_warps_can_sync_but_not_shuffle(faults):
    faults.configure()
    run(faults, "row_sum", threads=40)
    with pytest.raises(RuntimeError, match="last warp has less than 32 threads"):
        run(faults, "shuffles", threads=40)


# Barriers taken out

NEEDED = r"race: |was never written"


def row_sums(x, rounds):
    return sum((x.double() + i).sum() for i in range(rounds))


@pytest.mark.parametrize("policy", POLICIES)
def test_each_removed_barrier_of_a_loop_is_a_race(faults, policy):
    faults.configure(policy)
    faults.forget_sites()
    x, out = run(faults, "row_sum", rounds=3)
    torch.testing.assert_close(out.double(), row_sums(x, 3).expand(64), rtol=1e-5, atol=1e-4)
    first, second = faults.sites()
    assert (first.kind, first.passes) == ("sync_block", 64 * 3)
    for seed in range(10):
        faults.configure(policy, seed)
        with faults.without(first), pytest.raises(RuntimeError, match=NEEDED):
            run(faults, "row_sum", rounds=3)
        with faults.without(second), pytest.raises(RuntimeError, match="race: "):
            run(faults, "row_sum", rounds=3)
    run(faults, "row_sum", rounds=3)


def test_a_warp_that_runs_ahead_shows_early_writes_in_the_values(faults):
    """Without the race check; what threads in order, or level with each other, may not show."""
    faults.forget_sites()
    faults.configure("warp_first", races=False)
    _, want = run(faults, "row_sum", rounds=3)
    _, second = faults.sites()
    wrong = 0
    for seed in range(10):
        faults.configure("warp_first", seed, races=False)
        assert torch.equal(run(faults, "row_sum", rounds=3)[1], want)
        with faults.without(second):
            wrong += not torch.equal(run(faults, "row_sum", rounds=3)[1], want)
    assert wrong == 10


# bias_gelu


def run_gelu(model, dtype, bias_dtype, shape, tanh, seed=0):
    """x, dy, bias and the kernels' y, dx, dbias."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(shape, generator=generator).mul(2).to(dtype) for _ in range(2))
    bias = torch.randn(columns, generator=generator).to(bias_dtype)
    y, dx = (torch.full_like(x, torch.nan) for _ in range(2))
    dbias = torch.full_like(bias, torch.nan)
    model.clear()
    for tensor in (x, dy, bias):
        model.register(tensor, writable=False)
    for tensor in (y, dx, dbias):
        model.register(tensor)
    count = ctypes.c_int64()
    sizes = (DTYPES[dtype], rows, columns)
    model.call("gelu_partial_rows", *sizes, x, dy, dx, ctypes.byref(count))
    partials = model.register(torch.empty(count.value, columns))
    common = (DTYPES[dtype], DTYPES[bias_dtype], rows, columns, tanh, x, bias)
    model.call("gelu_forward", *common, y)
    model.call("gelu_backward", *common, dy, dx, dbias, partials)
    return x, dy, bias, y, dx, dbias


# Narrow, with several rows in a block; wide; not a multiple of a 16-byte vector; nothing.
SHAPES = [(37, 24), (3, 1040), (19, 13), (0, 24)]


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_gelu_kernels(gelu, shape, dtype, tanh):
    for bias_dtype in {dtype, torch.float32}:
        results = []
        for policy in POLICIES:
            gelu.configure(policy, seed=2)
            gelu.set_device(multiprocessors=1 + POLICIES.index(policy))
            x, dy, bias, y, dx, dbias = run_gelu(gelu, dtype, bias_dtype, shape, tanh)
            u, b = (t.double().requires_grad_() for t in (x, bias))
            want = F.gelu(u + b, approximate="tanh" if tanh else "none")
            want.backward(dy.double())
            # One rounding of results of up to 10.
            close = {"rtol": 1e-5 + torch.finfo(dtype).eps / 2, "atol": 1e-5}
            for got, exact in ((y, want.detach()), (dx, u.grad)):
                torch.testing.assert_close(got.double(), exact, **close)
            rtol = 1e-5 + torch.finfo(bias_dtype).eps / 2
            torch.testing.assert_close(dbias.double(), b.grad, rtol=rtol, atol=1e-4)
            results.append(torch.cat([y, dx]))
        assert all(torch.equal(result, results[0]) for result in results)


def test_every_barrier_of_bias_gelu_is_needed(gelu):
    gelu.set_device()
    gelu.configure()
    gelu.forget_sites()
    arguments = (torch.bfloat16, torch.float32, (37, 24), False)
    run_gelu(gelu, *arguments)
    sites = gelu.sites()
    assert [site.kind for site in sites] == ["sync_block"]
    for site in sites:
        for policy in POLICIES:
            for seed in range(5):
                gelu.configure(policy, seed)
                with gelu.without(site), pytest.raises(RuntimeError, match=NEEDED):
                    run_gelu(gelu, *arguments)
