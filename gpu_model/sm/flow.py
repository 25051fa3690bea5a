"""Basic blocks and natural loops of a kernel (Aho et al., "Compilers", 2nd edition, 8.4, 9.6)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gpu_model.sm.sass import SIZE, Function


@dataclass(frozen=True)
class Block:
    """Instructions `first` .. `last`, and the first instructions of what may follow."""

    first: int
    last: int
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop: the blocks (by first instruction) from which `header` can be reached again
    without passing it."""

    header: int
    blocks: frozenset[int]
    depth: int  # 1: in no other loop


def basic_blocks(function: Function) -> dict[int, Block]:
    """The control-flow graph, by each block's first instruction. Calls are taken to return."""
    code = function.instructions
    jumps = {
        i: function.index(ins.target)
        for i, ins in enumerate(code)
        if ins.name in ("BRA", "JMP") and ins.target is not None
    }
    ends = set(jumps) | {i for i, ins in enumerate(code) if ins.name in ("EXIT", "RET", "BRX")}
    starts = sorted({0} | set(jumps.values()) | {i + 1 for i in ends if i + 1 < len(code)})
    graph = {}
    for first, after in zip(starts, [*starts[1:], len(code)], strict=True):
        last = after - 1
        successors = [jumps[last]] if last in jumps else []
        if after < len(code) and not code[last].ends_path:
            successors.append(after)
        graph[first] = Block(first, last, tuple(dict.fromkeys(successors)))
    return graph


def _reachable_order(graph: dict[int, Block]) -> list[int]:
    """Reverse postorder from the first block."""
    order, seen = [], {0}
    stack = [(0, iter(graph[0].successors))]
    while stack:
        block, following = stack[-1]
        for after in following:
            if after not in seen:
                seen.add(after)
                stack.append((after, iter(graph[after].successors)))
                break
        else:
            order.append(block)
            stack.pop()
    return order[::-1]


def dominators(graph: dict[int, Block]) -> dict[int, int]:
    """Each reachable block's immediate dominator (Cooper, Harvey, Kennedy, "A Simple, Fast
    Dominance Algorithm", 2001); the first block's is itself."""
    order = _reachable_order(graph)
    number = {block: i for i, block in enumerate(order)}
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for after in graph[block].successors:
            before[after].append(block)
    parent = {order[0]: order[0]}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [b for b in before[block] if b in parent]
            best = known[0]
            for other in known[1:]:
                while best != other:
                    if number[best] > number[other]:
                        best = parent[best]
                    else:
                        other = parent[other]
            if parent.get(block) != best:
                parent[block] = best
                changed = True
    return parent


def natural_loops(graph: dict[int, Block]) -> list[Loop]:
    """All natural loops, by header; loops with one header are one."""
    parent = dominators(graph)

    def dominates(a: int, b: int) -> bool:
        while b != a and parent[b] != b:
            b = parent[b]
        return a == b

    before: dict[int, list[int]] = {}
    for block in parent:
        for after in graph[block].successors:
            before.setdefault(after, []).append(block)
    bodies: dict[int, set[int]] = {}
    for block in parent:
        for header in graph[block].successors:
            if not dominates(header, block):
                continue
            body, todo = bodies.setdefault(header, {header}), [block]
            while todo:
                inside = todo.pop()
                if inside not in body:
                    body.add(inside)
                    todo += before[inside]
    depths = Counter(header for header in bodies for body in bodies.values() if header in body)
    return [Loop(h, frozenset(bodies[h]), depths[h]) for h in sorted(bodies)]


def main_loop(function: Function, counts: list[int]) -> Loop | None:
    """The loop that most executed instructions belong to; the innermost of those.

    Args:
        counts: how often each instruction was executed.

    Returns:
        None if no loop was entered.
    """
    graph = basic_blocks(function)
    loops = natural_loops(graph)

    def weight(loop: Loop) -> int:
        return sum(sum(counts[graph[b].first : graph[b].last + 1]) for b in loop.blocks)

    entered = [loop for loop in loops if weight(loop)]
    if not entered:
        return None
    most = max(map(weight, entered))
    return max((x for x in entered if 2 * weight(x) > most), key=lambda x: (x.depth, weight(x)))


def describe(function: Function, loop: Loop, counts: list[int]) -> str:
    """Where a loop is, in bytes, and how many instructions one pass executes."""
    graph = basic_blocks(function)
    inside = [i for b in loop.blocks for i in range(graph[b].first, graph[b].last + 1) if counts[i]]
    executed = sum(counts[i] for i in inside) / counts[loop.header]
    return f"{loop.header * SIZE:#x}..{max(inside) * SIZE:#x}, {executed:.0f} instructions"
