"""Machine code as text: what `cuobjdump -sass` or `nvdisasm -hex` print, as instructions.

An instruction knows what it reads and writes, and its control code: how long the warp stalls after
it, which scoreboards it waits for and which it holds. Jia et al., "Dissecting the NVIDIA Volta GPU
Architecture via Microbenchmarking" (2018, arXiv:1804.06826, section 2.1) describe that encoding;
it has not changed up to Hopper.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

# Bytes of one instruction, from Volta on.
SIZE = 16
ALL_ONES = 255  # RZ; URZ is 63, PT and UPT are 7

_FUNCTION = re.compile(r"^\s*Function : (\S+)|^\s*\.section\s+\.text\.([^\s,]+)")
_ARCH = re.compile(r"^\s*(?:code for|\.target)\s+(sm_\w+)")
_LABEL = re.compile(r"^(\.L_\w+):")
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;\s*(?:/\* 0x[0-9a-f]{16} \*/)?$")
_ENCODING = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/\s*$")
_GUARD = re.compile(r"^@(!?)(U?P[0-9T])\s+")
_REGISTER = re.compile(r"(?<![A-Z_])(UR|R)(\d+|Z)\b")
_PREDICATE = re.compile(r"^(!?)(UP|P)([0-9T])$")
_CONSTANT = re.compile(r"c\[(0x[0-9a-f]+)\]\[([^\]]+)\]")

# Mnemonics whose first operand is no result.
_NO_RESULT_TEXT = """
    ST STG STS STL STSM RED REDG BRA BRX JMP JMX EXIT BAR BSSY BSYNC BREAK NOP WARPSYNC DEPBAR
    LDGDEPBAR LDGSTS CALL RET MEMBAR ERRBAR CCTL CCTLL ENDCOLLECTIVE YIELD BPT UBLKCP UTMALDG
    UTMASTG UTMACMDFLUSH FENCE WARPGROUP NANOSLEEP R2P KILL PREEXIT ACQBULK ARRIVES"""
_NO_RESULT = frozenset(_NO_RESULT_TEXT.split())
_COMPARES = {"ISETP", "FSETP", "DSETP", "HSETP2", "UISETP", "PLOP3", "UPLOP3", "FSET", "ISET"}
_CARRIES = {"IADD3", "UIADD3", "LEA", "ULEA", "IMAD", "UIMAD", "VIADDMNMX"}
# Where a leading predicate is followed by the register that is written too.
_PREDICATE_FIRST = {"LOP3", "ULOP3", "SHFL", "R2UR", "ELECT", "VOTE", "VOTEU", "ATOMG", "ATOMS"}


@dataclass(frozen=True)
class Control:
    """An instruction's control code. Barriers are numbered 0 to 5; 7 is none."""

    stall: int
    yields: bool
    write_barrier: int
    read_barrier: int
    wait_mask: int

    @classmethod
    def decode(cls, high: int) -> Control:
        """From the upper 64 bits of the encoding."""
        code = high >> 41
        return cls(code & 15, not code >> 4 & 1, code >> 5 & 7, code >> 8 & 7, code >> 11 & 63)


@dataclass(frozen=True)
class Operand:
    """One operand. `kind`: register, uniform, predicate, uniform_predicate, constant, immediate,
    address or other. Numbers of RZ, URZ, PT and UPT are None."""

    text: str
    kind: str
    number: int | None = None
    negated: bool = False  # -x, or !p
    inverted: bool = False  # ~x
    value: int = 0  # of an immediate; byte offset of a constant or of an address
    bank: int = 0


def _operand(text: str) -> Operand:
    plain = text.replace(".reuse", "")
    if found := _PREDICATE.match(plain):
        number = None if found[3] == "T" else int(found[3])
        kind = "predicate" if found[2] == "P" else "uniform_predicate"
        return Operand(text, kind, number, negated=bool(found[1]))
    sign, body = re.match(r"^([-~+]?)(.*)$", plain).groups()
    flags = {"negated": sign == "-", "inverted": sign == "~"}
    if "[" in body and not body.startswith("c["):
        inside = body[body.rindex("[") + 1 : body.rindex("]")]
        offset = re.search(r"(?:^|\+)(-?0x[0-9a-f]+)$", inside)
        return Operand(text, "address", value=int(offset[1], 16) if offset else 0)
    if found := _CONSTANT.search(body):
        direct = re.fullmatch(r"0x[0-9a-f]+", found[2])
        value = int(found[2], 16) if direct else -1
        return Operand(text, "constant", value=value, bank=int(found[1], 16), **flags)
    if found := re.match(r"^\|?(UR|R)(\d+|Z)\b", body):
        if body.startswith("|"):  # only floating point takes magnitudes
            return Operand(text, "other")
        number = None if found[2] == "Z" else int(found[2])
        kind = "uniform" if found[1] == "UR" else "register"
        return Operand(text, kind, number, **flags)
    if re.fullmatch(r"0x[0-9a-f]+", body):
        value = int(body, 16)
        return Operand(text, "immediate", value=-value if sign == "-" else value)
    if body == "SRZ":
        return Operand(text, "register")
    return Operand(text, "other")


@dataclass(frozen=True)
class Instruction:
    """One instruction; `address` in bytes from the function's start."""

    address: int
    text: str
    control: Control | None = None
    target_label: str | None = None
    guard: Operand | None = field(init=False)
    opcode: str = field(init=False)  # with its suffixes, e.g. LDSM.16.M88.4
    operands: tuple[Operand, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = _GUARD.match(self.text)
        rest = self.text[found.end() :] if found else self.text
        opcode, _, tail = rest.strip().partition(" ")
        parts = [part.strip() for part in tail.split(",")] if tail.strip() else []
        set_ = object.__setattr__
        set_(self, "guard", _operand(found[1] + found[2]) if found else None)
        set_(self, "opcode", opcode)
        set_(self, "operands", tuple(map(_operand, parts)))

    @cached_property
    def name(self) -> str:
        """The mnemonic without suffixes."""
        return self.opcode.partition(".")[0]

    @cached_property
    def suffixes(self) -> frozenset[str]:
        return frozenset(self.opcode.split(".")[1:])

    @cached_property
    def result_count(self) -> int:
        """How many leading operands are written."""
        if self.name in _NO_RESULT or not self.operands:
            return 0
        first = self.operands[0].kind
        count = 1
        if self.name in _COMPARES or (
            self.name in _PREDICATE_FIRST and ("predicate" in first or self.name.startswith("VOTE"))
        ):
            count = 2
        elif self.name in _CARRIES:
            while count < len(self.operands) and "predicate" in self.operands[count].kind:
                count += 1
        most = len(self.operands) - self.name.startswith(("VOTE", "ELECT"))
        return min(count, most)

    @property
    def results(self) -> tuple[Operand, ...]:
        return self.operands[: self.result_count]

    @property
    def sources(self) -> tuple[Operand, ...]:
        return self.operands[self.result_count :]

    @property
    def ends_path(self) -> bool:
        """Whether nothing follows: an exit or a jump without condition."""
        if self.suffixes & {"DIV", "CONV"}:  # taken by warps that are not whole
            return False
        return self.guard is None and (
            self.name in ("EXIT", "RET", "BRX", "JMX")
            or (self.name in ("BRA", "JMP") and self.condition is None)
        )

    @property
    def condition(self) -> Operand | None:
        """The second condition of a branch: `@!P0 BRA P1, 0x480` needs both."""
        return next((o for o in self.operands if "predicate" in o.kind), None)

    @cached_property
    def target(self) -> int | None:
        """Where a branch or a relative call goes to, in bytes."""
        if self.name not in ("BRA", "CALL", "JMP", "BSSY") or "ABS" in self.suffixes:
            return None
        return next((o.value for o in reversed(self.operands) if o.kind == "immediate"), None)

    @property
    def written(self) -> set[str]:
        """Names of the registers and predicates that it writes, e.g. R4, UR2, P0."""
        return {
            name
            for i, o in enumerate(self.results)
            for name in _names(o, self.result_width if i == 0 else 1)
        }

    @property
    def read(self) -> set[str]:
        """Names of the registers and predicates that it reads."""
        first = self.result_count
        found = {
            name
            for i, o in enumerate(self.sources)
            for name in _names(o, self.source_width(first + i))
        }
        return found | set(_names(self.guard, 1) if self.guard else ())

    @cached_property
    def result_width(self) -> int:
        """Registers that the first result takes."""
        suffixes = self.suffixes
        if self.name in ("HMMA", "IMMA", "DMMA"):
            return 4 if "F32" in suffixes or self.name == "IMMA" else 2
        if self.name == "HGMMA":
            return max(int(re.search(r"64x(\d+)x", self.opcode)[1]) // 2, 1)
        if self.name == "LDSM":
            return next((int(n) for n in ("4", "2") if n in suffixes), 1)
        if self.name in ("LDG", "LDS", "LDL", "LDC", "ULDC", "LD", "CS2R"):
            wide = 2 if self.name == "CS2R" and "32" not in suffixes else 1
            return 4 if "128" in suffixes else 2 if "64" in suffixes else wide
        return 2 if "WIDE" in suffixes or self.name in ("DADD", "DMUL", "DFMA") else 1

    def source_width(self, index: int) -> int:
        """Registers that the operand of this number takes."""
        if self.name == "HGMMA":
            return 4 if index == 1 else self.result_width
        if self.name == "HMMA":
            return ({1: 4, 2: 2} if "16816" in self.suffixes else {1: 2, 2: 1}).get(
                index, self.result_width
            )
        if "predicate" in self.operands[index].kind:
            return 1
        if self.name in ("STG", "STS", "STL", "ST"):
            return 4 if "128" in self.suffixes else 2 if "64" in self.suffixes else 1
        addend = index == len(self.operands) - 1 and self.name in ("IMAD", "UIMAD")
        return 2 if addend and self.suffixes & {"WIDE", "HI"} else 1


def _names(operand: Operand, width: int) -> Iterator[str]:
    if operand.kind == "address" or (operand.kind == "constant" and operand.value < 0):
        for prefix, number in _REGISTER.findall(operand.text):
            if number != "Z":
                pair = 2 if f"{prefix}{number}.64" in operand.text or "desc" in operand.text else 1
                yield from (f"{prefix}{int(number) + i}" for i in range(pair))
    elif operand.number is not None:
        prefix = {"register": "R", "uniform": "UR", "predicate": "P", "uniform_predicate": "UP"}
        yield from (f"{prefix[operand.kind]}{operand.number + i}" for i in range(width))
    elif operand.kind == "other":
        yield from (f"{a}{b}" for a, b in _REGISTER.findall(operand.text) if b != "Z")


@dataclass
class Function:
    """One kernel's machine code; instruction i begins at byte 16 * i."""

    name: str
    arch: str
    instructions: list[Instruction]

    def index(self, address: int) -> int:
        """The number of the instruction at an address in bytes."""
        number, rest = divmod(address, SIZE)
        if rest or not 0 <= number < len(self.instructions):
            raise ValueError(f"{self.name}: no instruction at {address:#x}")
        return number


def parse(text: str) -> dict[str, Function]:
    """The functions of a listing, by mangled name.

    Args:
        text: what `cuobjdump -sass`, `nvdisasm -c` or `nvdisasm -c -hex` printed. Only the first
            and the last have control codes.

    Raises:
        ValueError: a branch to a label that is not there.
    """
    functions: dict[str, Function] = {}
    arch, current, labels, pending = "", None, {}, []
    for line in text.splitlines():
        if found := _ARCH.match(line):
            arch = found[1]
        if found := _FUNCTION.match(line):
            if current is not None:
                _resolve(current, labels)
            name = found[1] or found[2]
            current = functions.setdefault(name, Function(name, arch, []))
            labels, pending = {}, []
        elif current is None:
            continue
        elif found := _LABEL.match(line):
            pending.append(found[1])
        elif (found := _LINE.match(line)) and found[2]:
            address = int(found[1], 16)
            labels |= dict.fromkeys(pending, address)
            pending = []
            label = re.search(r"`\((\.L_\w+)\)", found[2])
            current.instructions.append(
                Instruction(address, found[2], target_label=label and label[1])
            )
        elif (found := _ENCODING.match(line)) and current.instructions:
            last = current.instructions[-1]
            if last.control is None:
                control = Control.decode(int(found[1], 16))
                current.instructions[-1] = Instruction(
                    last.address, last.text, control, last.target_label
                )
    if current is not None:
        _resolve(current, labels)
    return functions


def _resolve(function: Function, labels: dict[str, int]) -> None:
    """Replaces labels of branches by addresses."""
    for i, instruction in enumerate(function.instructions):
        label = instruction.target_label
        if label is None:
            continue
        if label not in labels:
            raise ValueError(f"{function.name}: expected the label {label}, it is not there")
        text = instruction.text.replace(f"`({label})", f"{labels[label]:#x}")
        function.instructions[i] = Instruction(instruction.address, text, instruction.control)
