"""The model of a CUDA block that kernels run on without a GPU (gpu_model).

A model that misses faults would be worse than none, so most of this makes faults and asks for the
message.
"""

import re
from contextlib import nullcontext

import pytest
import torch

from gpu_model import build, conformance
from gpu_model.block_model import POLICIES, Model
from tests.support.model_checks import NEEDED, assert_every_site_is_needed
from tests.support.seeds import derived

HERE = build.KERNELS


@pytest.fixture(scope="module")
def faults():
    return Model(build.load(HERE / "faults.cpp"))


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
        model.call(name, *arguments)

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


@pytest.mark.parametrize("threshold", conformance.THRESHOLDS)
def test_dropout_of_pairs_has_every_rate(primitives, threshold):
    primitives.model.configure()
    conformance.check_decisions(primitives, "cpu", threshold)


@pytest.mark.parametrize("policy", POLICIES)
def test_shuffles_votes_and_copies(primitives, policy):
    for seed in range(4):
        primitives.model.configure(policy, seed)
        conformance.check_shuffle(primitives, "cpu")
        conformance.check_ballot(primitives, "cpu")
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


# What a GPU leaves open


def test_the_seed_decides_when_copies_read_and_in_what_order_blocks_run(faults):
    faults.configure()
    assert torch.equal(run(faults, "last_block", blocks=4)[1], torch.full((64,), 3.0))
    copied, last = set(), set()
    for seed in range(8):
        faults.configure("uniform", seed)
        copied |= set(run(faults, "copy_of_changing_source")[1].tolist())
        last |= set(run(faults, "last_block", blocks=4)[1].tolist())
    assert copied == {1.0, 2.0}
    assert len(last) > 1


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
    "matrices_without_base": "load_matrices of 16 bytes .* out of bounds",
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
    "write_under_other_warp": "race: ",
    "two_writers": "race: writes .* written by thread",
    "uninitialised": r"thread \(4, 0, 0\).* offset 20 was never written",
    "requirement": "in must be above 1000",
}
LEGAL = ["warp_barrier", "matrices_after_barriers", "copy_of_nothing"]


def run(model, name, rounds=1, blocks=1, threads=64, shared_bytes=4096):
    """Runs a kernel of faults.cpp on 64 numbers; its 64 results."""
    # Aligned like PyTorch's allocations; the numbers lie between two that no kernel may touch.
    x = torch.randn(64, generator=torch.Generator().manual_seed(derived(1)))
    out = torch.full((64,), torch.nan)
    model.clear()
    model.register(x, writable=False)
    model.register(out)
    model.call("run_case", name.encode(), blocks, threads, shared_bytes, rounds, x, out)
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
            rf"{name}: block \(0, 0, 0\), thread \(\d+, 0, 0\), "
            r"gpu_model/kernels/faults.cpp:(\d+): ",
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


# Races, against their definition

READ, WRITE = 1, 2
SYNC_WARP, SYNC_BLOCK, LOAD_MATRICES = 1, 2, 3


def random_program(generator):
    """accesses [steps, 64 threads], warp_steps [steps, 2 warps]; see faults.cpp."""
    steps = 6
    accesses = torch.zeros(steps, 64, dtype=torch.uint8)
    # Few threads, so that a thread often meets itself and its neighbours. Half of the programs have
    # many readers and one write at the end.
    threads = torch.tensor([0, 1, 2, 32, 33])
    if torch.rand(1, generator=generator) < 0.5:
        chances = torch.tensor([0.75, 0.25])
        writer = threads[torch.randint(5, (1,), generator=generator)]
        accesses[-1, writer] = WRITE
        steps_left = steps - 1
    else:
        chances = torch.tensor([0.8, 0.17, 0.03])
        steps_left = steps
    kinds = torch.multinomial(chances, 5 * steps_left, True, generator=generator)
    accesses[:steps_left, threads] = kinds.view(-1, 5).to(torch.uint8)
    weights = torch.tensor([0.35, 0.35, 0.0, 0.3])
    warp_steps = torch.multinomial(weights, 2 * steps, True, generator=generator).view(steps, 2)
    everyone = torch.rand(steps, generator=generator) < 0.3
    warp_steps[everyone] = SYNC_BLOCK
    return accesses, warp_steps.to(torch.uint8)


def has_race(accesses, warp_steps):
    """Whether two threads touch the word, one of them writing, with no barrier of both between."""
    events = [tuple(event) for event in accesses.nonzero().tolist()]
    touched = [(step, thread, accesses[step, thread] == WRITE) for step, thread in events]
    for step, warp in (warp_steps == LOAD_MATRICES).nonzero().tolist():
        touched += [(step, 32 * warp + lane, False) for lane in range(32)]
    touched.sort()
    for i, (first, a, a_writes) in enumerate(touched):
        for second, b, b_writes in touched[i + 1 :]:
            if a == b or not (a_writes or b_writes):
                continue
            between = warp_steps[first:second]
            ordered = (between == SYNC_BLOCK).any()
            if a // 32 == b // 32:
                ordered |= (between[:, a // 32] == SYNC_WARP).any()
            if not ordered:
                return True
    return False


def test_races_are_found_exactly_where_they_are(faults):
    generator = torch.Generator().manual_seed(derived(0))
    racy, programs = 0, 800
    for seed in range(programs):
        accesses, warp_steps = random_program(generator)
        race = has_race(accesses, warp_steps)
        racy += race
        for policy in POLICIES:
            faults.configure(policy, seed)
            expected = pytest.raises(RuntimeError, match="race: ") if race else nullcontext()
            with expected:
                faults.call("run_program", accesses, warp_steps, len(accesses))
    assert 0.2 < racy / programs < 0.8


# Barriers taken out


CONFORMANCE = {
    "tile": lambda call: conformance.check_tile(call, "cpu", torch.bfloat16),
    "matrices": lambda call: conformance.check_matrices(call, "cpu"),
    "copy": lambda call: conformance.check_copy(call, "cpu"),
}


@pytest.mark.parametrize("name", CONFORMANCE)
def test_each_barrier_and_wait_of_the_primitives_kernels_is_needed(primitives, name):
    model, check = primitives.model, CONFORMANCE[name]
    sites = assert_every_site_is_needed(model, lambda: check(primitives))
    kinds = {
        "tile": ["copy_async_wait", "sync_block"],
        "matrices": ["sync_warp"],
        "copy": ["copy_async_wait", "sync_block"] * 2,
    }
    assert [site.kind for site in sites] == kinds[name]
    check(primitives)


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
