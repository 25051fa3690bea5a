"""Which instructions a block's warps execute, and the integer arithmetic that decides it."""

import random
import struct

import numpy as np
import pytest

from gpu_model.sm.state import Memory
from gpu_model.sm.walk import Walk, wavefronts
from tests.support.sass_text import function
from tests.support.seeds import derived

A, B, C = (f"c[0x0][{0x160 + 4 * i:#x}]" for i in range(3))  # the first three parameters
MASK = 2**32 - 1


def walk(lines, parameters=(), threads=32, block=(0, 0, 0), memory=None, trips=None, arch="sm_80"):
    data = struct.pack(f"<{len(parameters)}I", *(p & MASK for p in parameters))
    grid = (8, 1, 1)
    return Walk(function(lines, arch), threads, grid, block, data, memory or Memory(), trips)


def run(lines, *parameters, **options):
    """The registers that the program leaves, of the first thread."""
    done = walk([*lines, "EXIT"], parameters, **options)
    done.run()
    return [None if v is None else int(v[0]) for v in done.state.files["register"]]


def codes(traces):
    return [trace.code.tolist() for trace in traces]


values = [0, 1, 2, 31, 32, 0x7FFFFFFF, 0x80000000, MASK]


def numbers(seed, count):
    rng = random.Random(derived(seed))
    return [rng.choice([*values, rng.getrandbits(32)]) for _ in range(count)]


def signed(x):
    return x - 2**32 if x >> 31 else x


@pytest.mark.parametrize("seed", range(30))
def test_64_bit_arithmetic(seed):
    a, b, c = numbers(seed, 3)
    low, high = f"MOV R2, {A}", f"MOV R3, {B}"
    added = run(
        [low, high, f"IADD3 R4, P0, R2, {C}, RZ", "IADD3.X R5, R3, R2, RZ, P0, !PT"], a, b, c
    )
    assert added[5] << 32 | added[4] == ((b + a << 32) + a + c) % 2**64
    less = run([low, high, "IADD3 R4, P0, R2, -R3, RZ", "IADD3.X R5, RZ, RZ, ~RZ, P0, !PT"], a, b)
    assert less[4] == (a - b) & MASK
    assert less[5] == (0 if a >= b else MASK)  # the upper half of a - b
    wide = run([low, high, f"IMAD.WIDE R4, R2, {C}, R2"], a, b, c)
    assert wide[5] << 32 | wide[4] == (signed(a) * signed(c) + (b << 32 | a)) % 2**64
    wide = run([low, high, f"IMAD.WIDE.U32 R4, R2, {C}, R2"], a, b, c)
    assert wide[5] << 32 | wide[4] == (a * c + (b << 32 | a)) % 2**64
    assert run([low, high, "IMAD.HI.U32 R4, R2, R3, RZ"], a, b)[4] == a * b >> 32
    assert run([low, high, f"IMAD R4, R2, R3, -{C}"], a, b, c)[4] == (a * b - c) & MASK
    shift = seed % 31 + 1
    moved = run(
        [low, high, f"LEA R4, P0, R2, {C}, {shift:#x}", f"LEA.HI.X R5, R2, R3, R3, {shift:#x}, P0"],
        *(a, b, c),
    )
    assert moved[5] << 32 | moved[4] == (((b << 32 | a) << shift) + (b << 32 | c)) % 2**64
    moved = run(
        [low, high, f"LEA R4, P0, R2, R3, {shift:#x}", f"LEA.HI.X.SX32 R5, R2, R3, {shift:#x}, P0"],
        *(a, b),
    )
    assert moved[5] << 32 | moved[4] == ((signed(a) << shift) + (b << 32 | b)) % 2**64


@pytest.mark.parametrize("seed", range(30))
def test_bits(seed):
    a, b, c = numbers(seed, 3)
    load = [f"MOV R2, {A}", f"MOV R3, {B}", f"MOV R4, {C}"]
    table = random.Random(derived(seed)).randrange(256)
    result = run([*load, f"LOP3.LUT R5, R2, R3, R4, {table:#x}, !PT"], a, b, c)[5]
    for bit in range(32):
        row = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
        assert result >> bit & 1 == table >> row & 1
    n = seed % 33
    both = b << 32 | a
    assert run([*load, f"SHF.R.U64 R5, R2, {n:#x}, R3"], a, b, c)[5] == both >> n & MASK
    assert run([*load, f"SHF.L.U64.HI R5, R2, {n:#x}, R3"], a, b, c)[5] == both << n >> 32 & MASK
    assert run([*load, f"SHF.L.U32 R5, R2, {n:#x}, RZ"], a, b, c)[5] == a << n & MASK
    assert run([*load, f"SHF.R.U32.HI R5, RZ, {n:#x}, R2"], a, b, c)[5] == a >> n
    assert run([*load, f"SHF.R.S32.HI R5, RZ, {n:#x}, R2"], a, b, c)[5] == signed(a) >> n & MASK
    selector = random.Random(derived(seed)).randrange(2**16)
    expected = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both >> 8 * (nibble & 7) & 255
        expected |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
    assert run([*load, f"PRMT R5, R2, {selector:#x}, R3"], a, b, c)[5] == expected


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("name", ["LT", "LE", "GT", "GE", "EQ", "NE"])
def test_comparisons(seed, name):
    a, b, c = numbers(seed, 3)
    d = numbers(seed + 99, 1)[0] if seed % 3 else b
    python = {"LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "EQ": "==", "NE": "!="}[name]
    program = [
        *(f"MOV R2, {A}", f"MOV R3, {B}", f"MOV R4, {C}", "MOV R5, c[0x0][0x16c]"),
        f"ISETP.{name}.U32.AND P0, P1, R2, R4, PT",
        f"ISETP.{name}.AND.EX P2, PT, R3, R5, PT, P0",
        *(f"SEL R{6 + i}, 0x1, RZ, P{i}" for i in range(3)),
    ]
    found = run(program, a, b, c, d)
    assert found[6] == eval(f"{a} {python} {c}")
    assert found[7] == 1 - found[6]
    whole = (signed(b) << 32 | a, signed(d) << 32 | c)
    assert found[8] == eval(f"{whole[0]} {python} {whole[1]}")


@pytest.mark.parametrize("seed", range(30))
def test_minima_of_sums(seed):
    a, b, c = numbers(seed, 3)
    total = (a + b) & MASK
    load = [f"MOV R2, {A}", f"MOV R3, {B}"]
    rows = [("", "PT", min), ("", "!PT", max), (".U32", "PT", min), (".U32", "!PT", max)]
    for suffix, least, choose in rows:
        found = run([*load, f"VIADDMNMX{suffix} R4, R2, R3, {C}, {least}"], a, b, c)[4]
        assert found == choose(total, c, key=None if suffix else signed)


@pytest.mark.parametrize("seed", range(40))
def test_division_by_a_reciprocal(seed):
    """How nvcc divides unsigned numbers."""
    n, d = numbers(seed, 2)
    d = d or 7
    program = [
        *(f"MOV R6, {A}", f"MOV R7, {B}", "I2F.U32.RP R0, R7", "MUFU.RCP R0, R0"),
        *(
            "IADD3 R2, R0, 0xffffffe, RZ",
            "F2I.FTZ.U32.TRUNC.NTZ R3, R2",
            "IMAD.MOV.U32 R2, RZ, RZ, RZ",
        ),
        *("IADD3 R8, RZ, -R3, RZ", "IMAD R5, R8, R7, RZ", "IMAD.HI.U32 R3, R3, R5, R2"),
        *("IMAD.HI.U32 R0, R3, R6, RZ", "IADD3 R2, -R0, RZ, RZ", "IMAD R2, R7, R2, R6"),
        *("ISETP.GE.U32.AND P0, PT, R2, R7, PT", "@P0 IADD3 R2, R2, -R7, RZ"),
        *("@P0 IADD3 R0, R0, 0x1, RZ", "ISETP.GE.U32.AND P1, PT, R2, R7, PT"),
        "@P1 IADD3 R0, R0, 0x1, RZ",
    ]
    assert run(program, n, d)[0] == n // d


LOOP = ["MOV R0, RZ", "IADD3 R0, R0, 0x1, RZ", f"ISETP.LT.AND P0, PT, R0, {A}, PT", "@P0 BRA {1}"]


@pytest.mark.parametrize("trips", [1, 2, 17])
def test_loops_run_as_often_as_their_counters_say(trips):
    traces = walk([*LOOP, "EXIT"], [trips], threads=64).run()
    assert codes(traces) == [[0, *[1, 2, 3] * trips, 4]] * 2


def test_parameters_of_hopper_lie_elsewhere():
    lines = [x.replace("0x160", "0x210") for x in LOOP]
    assert len(walk([*lines, "EXIT"], [3], arch="sm_90a").run()[0].code) == 11


@pytest.mark.parametrize("taken", [0, 1, 31, 32])
def test_threads_go_different_ways_and_meet(taken):
    lines = [
        *("S2R R0, SR_TID.X", f"ISETP.LT.AND P0, PT, R0, {A}, PT", "@P0 BRA {5}"),
        *("MOV R1, 0x3", "BRA {6}", "MOV R1, 0x5", "IADD3 R1, R1, R0, RZ", "EXIT"),
    ]
    done = walk(lines, [taken])
    trace = codes(done.run())[0]
    ways = ([3, 4] if taken < 32 else []) + ([5] if taken else [])
    assert trace == [0, 1, 2, *ways, 6, 7]
    expected = [(5 if i < taken else 3) + i for i in range(32)]
    assert done.state.files["register"][1].tolist() == expected


def test_warps_of_a_block_have_their_own_traces():
    lines = ["S2R R0, SR_TID.X", "ISETP.GE.AND P0, PT, R0, 0x30, PT", "@P0 EXIT", "NOP", "EXIT"]
    first, second, third = walk(lines, threads=96).run()
    assert codes([first, second, third]) == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2]]
    assert first.active.tolist() == [True, True, False, True, True]  # no thread of it exits
    assert second.active.all()


def test_a_register_may_be_known_by_some_threads():
    """Unknown for all, then set by the threads that go on to use it."""
    lines = [
        *("LDG.E R1, [R2.64]", "S2R R0, SR_TID.X", "ISETP.GE.AND P0, PT, R0, 0x8, PT"),
        *("@P0 BRA {6}", "MOV R1, 0x2", "BRA {8}", "NOP", "EXIT"),
        *("IADD3 R1, R1, -0x1, RZ", "ISETP.NE.AND P1, PT, R1, RZ, PT", "@P1 BRA {8}", "EXIT"),
    ]
    done = walk(lines)
    assert codes(done.run())[0].count(8) == 2
    assert done.guesses == set()


class TestUnknown:
    """Branches on what is loaded from memory."""

    load = ("LDG.E R1, [R2.64]", "ISETP.NE.AND P0, PT, R1, RZ, PT")

    def test_not_taken(self):
        done = walk([*self.load, "@P0 BRA {4}", "NOP", "EXIT"])
        assert codes(done.run()) == [[0, 1, 2, 3, 4]]
        assert done.guesses == {0x20}

    def test_calls_are_jumped_over(self):
        lines = [*self.load, "@P0 BRA {4}", "CALL.REL.NOINC {0}", "EXIT"]
        assert codes(walk(lines).run()) == [[0, 1, 2, 4]]

    def test_no_exit(self):
        assert codes(walk([*self.load, "@P0 EXIT", "NOP", "EXIT"]).run()) == [[0, 1, 2, 3, 4]]

    def test_loops_need_a_count(self):
        lines = ["NOP", *self.load, "@P0 BRA {1}", "EXIT"]
        with pytest.raises(ValueError, match="trips: expected a count for the loop at 0x10"):
            walk(lines).run()
        assert len(codes(walk(lines, trips={0x10: 5}).run())[0]) == 1 + 3 * 5 + 1

    def test_counts_are_of_each_time_that_a_loop_is_entered(self):
        outer = [*LOOP[:2], *self.load, "@P0 BRA {2}", *LOOP[2:3], "@P0 BRA {1}", "EXIT"]
        trace = codes(walk(outer, [3], trips={0x20: 4}).run())[0]
        assert trace.count(2) == 3 * 4

    def test_unknown_addresses_and_narrow_loads_are_unknown(self):
        memory = Memory({0x1000: np.array([1], np.int32)})
        for load in ("LDG.E R1, [R2.64+0x8]", "LDG.E.U8 R1, [R2.64]"):
            done = walk([f"MOV R2, {A}", load, "EXIT"], [0x1000], memory=memory)
            done.run()
            assert done.state.files["register"][1] is None


def test_memory_decides_on_loops():
    memory = Memory({0x7F0000000000: np.array([0, 3, 9], np.int32)})
    lines = [
        *(f"MOV R2, {A}", f"MOV R3, {B}", "S2R R4, SR_CTAID.X", "IMAD.WIDE R2, R4, 0x4, R2"),
        *("LDG.E R5, [R2.64]", "LDG.E R6, [R2.64+0x4]", "IADD3 R5, R5, 0x1, RZ"),
        *("ISETP.LT.AND P0, PT, R5, R6, PT", "@P0 BRA {6}", "EXIT"),
    ]
    for block, length in ((0, 3), (1, 6)):
        done = walk(lines, [0, 0x7F00], block=(block, 0, 0), memory=memory)
        assert codes(done.run())[0].count(6) == length


def test_spilled_registers_come_back():
    lines = [*("MOV R1, 0x100", f"MOV R2, {A}", "STL.64 [R1+0x8], R2", "MOV R2, RZ")]
    assert run([*lines, "LDL R4, [R1+0x8]"], 77)[4] == 77


@pytest.mark.parametrize("taken", [0, 5, 32])
def test_votes_count_the_threads_that_run(taken):
    lines = [
        *(
            "S2R R0, SR_TID.X",
            f"ISETP.LT.AND P0, PT, R0, {A}, PT",
            "ISETP.LT.AND P1, PT, R0, 0x3, PT",
        ),
        *("@!P0 BRA {7}", "VOTE.ANY R1, PT, P1", "VOTE.ALL P2, P1", "SEL R2, 0x1, RZ, P2", "NOP"),
    ]
    registers = run(lines, taken)
    if taken:
        assert registers[1] == 0b111
        assert registers[2] == (taken <= 3)


def test_calls_return():
    lines = [
        "MOV R2, {3}",
        "MOV R3, RZ",
        "CALL.REL.NOINC {5}",
        "NOP",
        "EXIT",
        "RET.REL.NODEC R2 0x0",
    ]
    assert codes(walk(lines).run()) == [[0, 1, 2, 5, 3, 4]]


def test_an_assertion_that_fails():
    with pytest.raises(ValueError, match=r"CALL\.ABS\.NOINC R14 at 0x0 is reached"):
        walk(["CALL.ABS.NOINC R14", "EXIT"]).run()


def test_a_program_without_end():
    import gpu_model.sm.walk as module

    most, module.MOST_STEPS = module.MOST_STEPS, 100
    try:
        with pytest.raises(ValueError, match="no end after 100 instructions"):
            walk(["BRA {0}"]).run()
    finally:
        module.MOST_STEPS = most


@pytest.mark.parametrize("threads", [0, 33, 2048])
def test_threads_that_no_block_has(threads):
    with pytest.raises(ValueError, match="threads: expected a multiple of 32"):
        walk(["EXIT"], threads=threads)


class TestWavefronts:
    """Accesses that a warp needs for its shared memory."""

    lane = np.arange(32, dtype=np.uint64)

    @pytest.mark.parametrize(
        ("addresses", "width", "count"),
        [
            (lane * 4, 4, 1),
            (lane * 0, 4, 1),  # one word for all
            (lane * 8, 4, 2),
            (lane * 128, 4, 32),
            (lane * 132, 4, 1),
            (lane * 8, 8, 2),
            (lane * 16, 16, 4),
            (lane * 64, 16, 16),
        ],
    )
    def test_counts(self, addresses, width, count):
        assert wavefronts(addresses, width) == count

    def test_ldsm_of_rows_in_the_same_banks(self):
        lines = ["S2R R0, SR_TID.X", f"IMAD R1, R0, {A}, RZ", "LDSM.16.M88.4 R4, [R1]", "EXIT"]
        for stride, count in ((16, 4), (128, 32), (144, 4)):
            assert walk(lines, [stride]).run()[0].wavefronts[2] == count
