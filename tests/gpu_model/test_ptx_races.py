"""The PTX interpreter's check for races, against the definition of a race on random programs.

Two accesses of one word by different threads, one of them a write and not both atomic, are a race
unless a chain of program order, barriers and mbarriers leads from one to the other.
"""

import itertools
import random

import torch

from tests.support.ptx_kernels import POLICIES, program
from tests.support.seeds import derived

WARPS, WORDS, LANES = 3, 3, (0, 7)
ACCESSES = {"st": "st.shared.u32 {}, %t", "ld": "ld.shared.u32 %r2, {}",
            "atom": "atom.shared.add.u32 %r2, {}, 1"}  # fmt: skip


def draw(rng: random.Random, mbarriers: bool = False) -> list[list[tuple]]:
    """What each warp does: ("st", "ld" or "atom", lane, word), ("warp",), ("sync" or "arrive",
    number, warps), or at an mbarrier ("release" or "acquire", number, lane; of all lanes: None)."""
    warps: list[list[tuple]] = [[] for _ in range(WARPS)]
    for number in range(1, rng.randint(2, 5)):
        for steps in warps:
            for _ in range(rng.randint(0, 2)):
                kind = rng.choice(("st", "ld", "ld", "warp", "atom", "atom"))
                lane, word = rng.choice(LANES), rng.randrange(WORDS)
                steps.append(("warp",) if kind == "warp" else (kind, lane, word))
        if mbarriers and rng.random() < 0.7:
            for kind, least in (("release", 1), ("acquire", 0)):
                for w in rng.sample(range(WARPS), rng.randint(least, WARPS)):
                    warps[w].append((kind, number, rng.choice((None, None, *LANES))))
            continue
        members = rng.sample(range(WARPS), rng.choice((2, WARPS, WARPS)))
        waiting = rng.sample(members, rng.choice((len(members), len(members), 1)))
        for w in members:
            kind = "sync" if w in waiting else "arrive"
            warps[w].append((kind, number, len(members)))
    return warps


def has_race(warps: list[list[tuple]]) -> bool:
    """By reachability in the graph of accesses and barriers."""
    after: dict[object, set] = {}
    accesses = []
    for w, steps in enumerate(warps):
        last = {lane: ("start", w, lane) for lane in LANES}
        for n, step in enumerate(steps):
            lanes = (step[1],) if step[0] in ACCESSES else LANES
            if step[0] in ("release", "acquire"):
                # Each lane for itself.
                for lane in LANES if step[2] is None else (step[2],):
                    own = (w, n, lane)
                    after.setdefault(last[lane], set()).add(own)
                    ends = (own, ("mbarrier", step[1]))
                    a, b = ends if step[0] == "release" else ends[::-1]
                    after.setdefault(a, set()).add(b)
                    last[lane] = own
                continue
            # A barrier of several warps is one node; lanes that only arrive do not come out of it.
            node = ("barrier", step[1]) if step[0] in ("sync", "arrive") else (w, n)
            for lane in lanes:
                after.setdefault(last[lane], set()).add(node)
                if step[0] != "arrive":
                    last[lane] = node
            if step[0] in ACCESSES:
                accesses.append((node, (w, step[1]), step[0], step[2]))

    def reaches(a: object, b: object) -> bool:
        seen, todo = set(), [a]
        while todo:
            for node in after.get(todo.pop(), ()):
                if node == b:
                    return True
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
        return False

    for (a, who_a, kind_a, word_a), (b, who_b, kind_b, word_b) in itertools.combinations(
        accesses, 2
    ):
        if word_a != word_b or who_a == who_b or kind_a == kind_b != "st":
            continue
        if not reaches(a, b) and not reaches(b, a):
            return True
    return False


def text_of(warps: list[list[tuple]]) -> str:
    lines = ["mov.u32 %r0, %laneid; shr.u32 %r1, %t, 5;"]
    lines += [f"setp.eq.u32 %q{k}, %r0, {lane};" for k, lane in enumerate(LANES)]
    lines.append("setp.eq.u32 %q5, %t, 0;")
    lines += [f"@%q5 st.shared.u32 [memory+{4 * word}], 0;" for word in range(WORDS)]
    counts: dict[int, int] = {}
    for steps in warps:
        for _, number, *rest in filter(lambda step: step[0] == "release", steps):
            counts[number] = counts.get(number, 0) + (32 if rest[0] is None else 1)
    for number, count in counts.items():
        lines.append(f"@%q5 mbarrier.init.shared.b64 [memory+{64 + 8 * number}], {count};")
    lines.append("bar.sync 0;")
    lines += [f"setp.eq.u32 %q6, %r1, {w}; @%q6 bra WARP{w};" for w in range(WARPS)]
    for w, steps in enumerate(warps):
        lines.append(f"WARP{w}:")
        for step in steps:
            if step[0] == "warp":
                lines.append("bar.warp.sync -1;")
            elif step[0] in ("release", "acquire"):
                guard = "" if step[2] is None else f"@%q{LANES.index(step[2])} "
                address = f"[memory+{64 + 8 * step[1]}]"
                if step[0] == "release":
                    lines.append(f"{guard}mbarrier.arrive.shared.b64 _, {address};")
                else:
                    lines.append("{ setp.eq.u32 %q7, 0, 0;")
                    lines.append(
                        f"POLL: {guard}mbarrier.try_wait.parity.shared.b64 %q7, {address}, 0;"
                    )
                    lines.append("@!%q7 bra POLL; }")
            elif step[0] in ("sync", "arrive"):
                lines.append(f"bar.{step[0]} {step[1]}, {32 * step[2]};")
            else:
                address = f"[memory+{4 * step[2]}]"
                lines.append(f"@%q{LANES.index(step[1])} {ACCESSES[step[0]].format(address)};")
        lines.append("bra END;")
    return "\n".join([*lines, "END:"])


def test_races_are_those_of_the_definition():
    rng, racy = random.Random(derived(1)), 0
    for trial in range(400):
        warps = draw(rng)
        expected = has_race(warps)
        racy += expected
        kernel = program(text_of(warps), shared=4 * WORDS)
        for policy in POLICIES:
            error = ""
            try:
                kernel.launch(
                    "test", torch.zeros(1), block=(32 * WARPS, 1, 1), policy=policy, seed=trial
                )
            except RuntimeError as raised:
                error = str(raised)
            assert ("race: " in error) == expected, (warps, error)
            assert expected or not error, error
    assert 80 < racy < 320  # both happen often


def test_races_around_mbarriers_are_those_of_the_definition():
    """A word that several lanes of a warp have read counts as read by all of them, which may see a
    race where they have arrived one by one; otherwise both are the same."""
    rng, racy, missed = random.Random(derived(2)), 0, 0
    for trial in range(500):
        warps = draw(rng, mbarriers=True)
        expected = has_race(warps)
        racy += expected
        alone = any(s[0] == "release" and s[2] is not None for steps in warps for s in steps)
        kernel = program(text_of(warps), shared=128)
        found = set()
        for policy in POLICIES:
            error = ""
            try:
                kernel.launch(
                    "test", torch.zeros(1), block=(32 * WARPS, 1, 1), policy=policy, seed=trial
                )
            except RuntimeError as raised:
                error = str(raised)
            assert not error or "race: " in error, error
            found.add(bool(error))
        assert len(found) == 1
        assert found == {expected} or (alone and found == {True}), warps
        missed += found != {expected}
    assert 100 < racy < 400
    assert missed < 25
