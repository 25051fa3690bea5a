"""Basic blocks, dominators and natural loops, against their definitions on random programs."""

import random

import pytest

from gpu_model.sm import flow
from tests.support.sass_text import function
from tests.support.seeds import derived

NESTED = [
    "MOV R0, RZ",
    "IADD3 R1, R1, 0x1, RZ",  # 1: outer
    "IADD3 R2, R2, 0x1, RZ",  # 2: inner
    "@P1 BRA {5}",
    "FADD R3, R3, R3",
    "@P0 BRA {2}",
    "@P2 BRA {1}",
    "EXIT",
    "BRA {8}",  # not reached
]


def test_blocks_end_at_branches_and_begin_at_targets():
    graph = flow.basic_blocks(function(NESTED))
    assert {first: (b.last, b.successors) for first, b in graph.items()} == {
        0: (0, (1,)),
        1: (1, (2,)),
        2: (3, (5, 4)),
        4: (4, (5,)),
        5: (5, (2, 6)),
        6: (6, (1, 7)),
        7: (7, ()),
        8: (8, (8,)),
    }


def test_what_ends_a_block():
    lines = ["BRA.DIV UR4, {3}", "@P0 EXIT", "BRA.U UP0, {0}", "EXIT"]
    graph = flow.basic_blocks(function(lines))
    assert [b.successors for b in graph.values()] == [(3, 1), (2,), (0, 3), ()]


def test_nested_loops():
    inner, outer = (
        next(x for x in flow.natural_loops(flow.basic_blocks(function(NESTED))) if x.header == h)
        for h in (2, 1)
    )
    assert (inner.blocks, inner.depth) == ({2, 4, 5}, 2)
    assert (outer.blocks, outer.depth) == ({1, 2, 4, 5, 6}, 1)


@pytest.mark.parametrize(("inner", "outer", "header"), [(50, 2, 2), (0, 0, None)])
def test_the_main_loop_is_the_innermost_of_those_that_take_most(inner, outer, header):
    counts = [1, outer, inner, inner, inner, inner, outer, 1, 0]
    found = flow.main_loop(function(NESTED), counts)
    assert (found and found.header) == header
    if found:
        assert flow.describe(function(NESTED), found, counts) == "0x20..0x50, 4 instructions"


def reachable(graph, start, without=None):
    seen, todo = set(), [start] if start != without else []
    while todo:
        block = todo.pop()
        if block not in seen:
            seen.add(block)
            todo += [b for b in graph[block].successors if b != without]
    return seen


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed):
    rng = random.Random(derived(seed))
    size = rng.randint(2, 25)
    lines = [
        rng.choice(["NOP", "NOP", f"@P0 BRA {{{rng.randrange(size)}}}", f"BRA {{{i}}}"])
        for i in range(size - 1)
    ]
    graph = flow.basic_blocks(function([*lines, "EXIT"]))
    there = reachable(graph, 0)
    parent = flow.dominators(graph)
    assert set(parent) == there

    def dominators_of(block):
        found = {block}
        while parent[block] != block:
            block = parent[block]
            found.add(block)
        return found

    # a dominates b if b is not reached without a.
    for b in there:
        assert dominators_of(b) == {a for a in there if b not in reachable(graph, 0, without=a)}
    loops = {loop.header: loop.blocks for loop in flow.natural_loops(graph)}
    expected = {}
    for b in there:
        for header in graph[b].successors:
            if header in dominators_of(b):
                body = {header} | {
                    x for x in there if x != header and b in reachable(graph, x, without=header)
                }
                expected[header] = expected.get(header, set()) | body
    assert loops == expected
