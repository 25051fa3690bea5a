"""A short test of this installation's operators: `python -m bert_unpad.info --check`.

Every operator runs forward and backward on small random inputs, different ones in each run, and is
compared with plain PyTorch in float64. This takes seconds and shows whether the compiled kernels
work on this device. The tests of the repository cover far more shapes, and every error.

Errors are relative to the largest value of the expected tensor. To compare results with dropout,
the operator first runs on inputs whose result shows the mask; the same key then gives the same mask
for random inputs.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from bert_unpad import _library
from bert_unpad._capability import multiplies
from bert_unpad.self_test import (  # noqa: F401 (they fill CASES)
    attention,
    encoder,
    layers,
    signs,
    updates,
)
from bert_unpad.self_test.compare import CASES, LIMITS, Inputs, Skip, relative_error

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Outcome:
    """The result of checking one operator on one device.

    Attributes:
        operator: name of the operator.
        errors: the largest relative error for each type that was tried, by its short name.
        problem: what is wrong, or None.
        skipped: why the device cannot run this operator at all, or None.
    """

    operator: str
    errors: dict[str, float] = field(default_factory=dict)
    problem: str | None = None
    skipped: str | None = None


def _dtypes(device: torch.device) -> dict[str, torch.dtype]:
    """Without bf16 on a GPU that does not multiply it."""
    if not multiplies(device, "bf16"):
        return {short: dtype for short, dtype in DTYPES.items() if dtype != torch.bfloat16}
    return DTYPES


def _check_operator(name: str, device: torch.device, seed: int) -> Outcome:
    outcome = Outcome(name)
    for short, dtype in _dtypes(device).items():
        inputs = Inputs(device, dtype, torch.Generator().manual_seed(seed))
        outcome.errors[short] = 0.0
        try:
            for compared in CASES[name](inputs):
                error = relative_error(compared)
                limit = LIMITS[dtype] if compared.limit is None else compared.limit
                if not error <= limit:  # a NaN is wrong too
                    raise ArithmeticError(
                        f"{compared.what}: error {error:.2g}, at most {limit:.2g} expected"
                    )
                outcome.errors[short] = max(error, outcome.errors[short])
        except Skip as reason:
            return Outcome(name, skipped=str(reason))
        except Exception as problem:  # any error of an operator is a result of the check
            first_line = str(problem).strip().split("\n")[0]
            outcome.problem = f"{short}: {first_line or type(problem).__name__}"
            return outcome
    return outcome


def check(device: torch.device | str, seed: int) -> Iterator[Outcome]:
    """Checks every operator on one device.

    Args:
        device: device to check, for example "cpu" or "cuda:0".
        seed: seed of the inputs; the same seed draws the same inputs.

    Yields:
        The outcome of each operator.
    """
    for name in CASES:
        yield _check_operator(name, torch.device(device), seed)


def _line(outcome: Outcome) -> str:
    if outcome.problem:
        said = f"FAILED  {outcome.problem}"
    elif outcome.skipped:
        said = f"skipped: {outcome.skipped}"
    else:
        said = "   ".join(f"{name} {error:.1e}" for name, error in outcome.errors.items())
    return f"  {outcome.operator:<26}{said}"


def _devices(kind: str) -> tuple[list[str], str | None]:
    """Returns the devices of a kind, and why none of them can be checked, or None."""
    if kind == "cpu":
        return ["cpu"], None
    if not torch.cuda.is_available():
        return [], "PyTorch sees no GPU"
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())], _library.cuda_missing


def run(kinds: Sequence[str] | None = None, seed: int | None = None) -> list[str]:
    """Checks every operator and prints a line for each.

    Args:
        kinds: "cpu", and "cuda" for every visible GPU; None checks the CPU, and GPUs if there are
            any.
        seed: seed of the inputs, which is printed; None draws one.

    Returns:
        Problems, one line per operator and device; empty if everything works.
    """
    seed = secrets.randbelow(2**31) if seed is None else seed
    if kinds is None:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    problems = []
    for kind in kinds:
        devices, missing = _devices(kind)
        if missing:
            problems.append(f"{kind}: {missing}")
            devices = []
        for device in devices:
            print(f"{device}: largest error against float64, inputs from seed {seed}", flush=True)
            for outcome in check(device, seed):
                print(_line(outcome), flush=True)
                if outcome.problem:
                    problems.append(f"{device}: {outcome.operator}: {outcome.problem}")
    print("\n".join([f"check failed: {problem}" for problem in problems] or ["all operators work"]))
    return problems
