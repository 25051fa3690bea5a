"""Listings as cuobjdump prints them, for programs that tests write."""

from gpu_model.sm import sass
from gpu_model.sm.sass import Function

# An instruction's text, or (text, stall count, write barrier, read barrier, wait mask).
Line = str | tuple[str, int] | tuple[str, int, int, int, int]
NONE = 7


def listing(lines: list[Line], arch: str = "sm_80", name: str = "kernel") -> str:
    """`{0}`, `{1}`, ... in a text are replaced by the address of the line of that number."""
    addresses = [f"{16 * i:#x}" for i in range(len(lines) + 1)]
    rows = [f"\tcode for {arch}", f"\t\tFunction : {name}"]
    for i, line in enumerate(lines):
        text, *codes = (line,) if isinstance(line, str) else line
        stall, write, read, wait = [*codes, *(1, NONE, NONE, 0)[len(codes) :]]
        high = (stall | 1 << 4 | write << 5 | read << 8 | wait << 11) << 41
        rows.append(f"        /*{16 * i:04x}*/  {text.format(*addresses)} ;  /* 0x{0:016x} */")
        rows.append(f"                                       /* 0x{high:016x} */")
    return "\n".join(rows) + "\n"


def function(lines: list[Line], arch: str = "sm_80") -> Function:
    return sass.parse(listing(lines, arch))["kernel"]
