"""One training step of BERT on a GPU: time, MFU, memory and kernels of ours and of the peers.

Each contender takes turns with ours in bf16, the reference, which stays; the contender is made for
this and thrown away after, since all of them together need more memory than a GPU has. So ratios
hold whatever the clock did meanwhile. What one cannot do, run out of memory say, is reported under
its name, and the others go on. The report is written after each of them, lest a limit of time takes
what is measured already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import torch

from benchmarks.lib import harness, kernel_profile, model_steps
from benchmarks.lib.model_contenders import CONTENDERS, OURS, REFERENCE, Contender, Setup
from benchmarks.lib.step_device import StepDevice
from bert_unpad.nn.flops import training_flops

# Steps before anything is measured: they load kernels, compile, capture, and make the optimizer's
# state; the second may compile once more, for what it now knows to change.
WARMUP = 3
TURN = 3  # steps of a turn that count
PROFILED = 3  # steps


class Run:
    """Measures contenders one after another into `report`.

    Args:
        device: to measure on.
        setup: what they work on.
        rounds: turns of each contender that count; one more before them does not.
        on_result: called after each contender.
    """

    def __init__(
        self,
        device: StepDevice,
        setup: Setup,
        rounds: int,
        on_result: Callable[[dict[str, Any]], object],
    ) -> None:
        self.device, self.setup, self.rounds = device, setup, rounds
        self._on_result = on_result
        self._rows: dict[str, dict[str, Any]] = {}
        self._reference: Contender | None = None
        sizes = model_steps.config(setup.size, setup.dropout)
        self.flops = training_flops(sizes, setup.inputs)
        self.peak = device.matmul_peak()
        batch = setup.inputs.batch
        self.report: dict[str, Any] = {
            "size": setup.size,
            "dropout": setup.dropout,
            "sequences": batch.batch_size,
            "lengths": batch.lengths.tolist(),
            "max_length": setup.max_length,
            "tokens": batch.total,
            "masked": setup.inputs.num_masked,
            "flops": self.flops,
            "matmul_peak": {"bfloat16": self.peak},
            "data_sheet_peak": device.data_sheet_peak,
            "settings": device.settings(),
            "time": f"median of turns of {TURN} steps, which a contender and {REFERENCE} take one "
            "after the other",
            "rounds": rounds,
            "results": [],
            "not_run": {},
            "faster_than": {},
        }

    def measure(self, names: Collection[str], start_within: float) -> dict[str, Any]:
        """The whole report.

        Args:
            names: of contenders; the reference is measured in any case.
            start_within: seconds from now after which no contender begins.
        """
        begin = time.monotonic()
        for name in CONTENDERS:
            if name != REFERENCE and name not in names:
                continue
            if time.monotonic() - begin > start_within:
                self._leave_out(name, f"left out: {start_within:.0f} s of --start-within are over")
                continue
            reason = self._try(name)
            self._clean()  # here, where no traceback holds the contender's tensors
            if reason:
                self._leave_out(name, reason)
            self._finish(name)
        return self.report

    def _try(self, name: str) -> str:
        """Measures one contender; why it does not run, "" if it does."""
        print(f"{name} ...", flush=True)
        try:
            self._rows[name] = self._duel(name)
        except Exception as error:  # whatever it is: the others go on
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {lines[0][:160]}"
        return ""

    def _clean(self) -> None:
        torch._dynamo.reset()
        try:
            self.device.settle()
        except RuntimeError as error:  # of a kernel of its: nothing runs on this device any more
            print(f"  the device is lost: {str(error).splitlines()[0]}")

    def _leave_out(self, name: str, reason: str) -> None:
        self.report["not_run"][name] = reason
        print(f"  not run: {name}: {reason}", flush=True)

    def _duel(self, name: str) -> dict[str, Any]:
        device = self.device
        device.settle()
        before, pools = device.allocated(), device.graph_pools()
        contender = CONTENDERS[name](self.setup)
        for _ in range(WARMUP):
            contender.step()
        device.settle()
        state = harness.state_bytes(contender.optimizer)
        step = device.peak_of(contender.step) - before - state + device.graph_pools() - pools
        memory = harness.Memory(state, step)
        steps = {name: contender.step}
        if name == REFERENCE:
            self._reference = contender
        elif self._reference is not None:
            steps[REFERENCE] = self._reference.step
        turns = {key: harness.Timing() for key in steps}
        for number in range(1 + self.rounds):
            for key, run in steps.items():
                seconds = device.turn(run, TURN)
                if number:
                    turns[key].rounds.append(seconds)
        row = self._row(name, contender.dtype, turns, memory)
        row["kernels"] = self._kernels(contender, row["seconds"])
        return row

    def _row(
        self, name: str, dtype: str, turns: dict[str, harness.Timing], memory: harness.Memory
    ) -> dict[str, Any]:
        seconds, batch = turns[name].median, self.setup.inputs.batch
        rate, sheet = self.flops / seconds, self.device.data_sheet_peak
        return {
            "contender": name,
            "dtype": dtype,
            "seconds": seconds,
            "rounds": turns[name].rounds,
            "sequences_per_second": batch.batch_size / seconds,
            "tokens_per_second": batch.total / seconds,
            "share_of_matmul_peak": rate / self.peak,
            "share_of_data_sheet_peak": rate / sheet if sheet else None,
            "reference_seconds": turns[REFERENCE].median if REFERENCE in turns else None,
            "state_bytes": memory.state,
            "step_bytes": memory.step,
            "peak_bytes": memory.peak,
        }

    def _kernels(self, contender: Contender, seconds: float) -> dict[str, Any]:
        try:
            kernels = kernel_profile.record(contender.step, PROFILED, self.device.device)
            return kernel_profile.summarise(kernels, PROFILED, seconds)
        except Exception as error:  # a profiler that may not look: the times stand all the same
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}

    def _finish(self, name: str) -> None:
        if name in self._rows:
            show(self._rows[name])
        report = self.report
        report["results"] = list(self._rows.values())
        report["faster_than"] = {
            ours: {
                peer: relative(self._rows[peer]) / relative(self._rows[ours])
                for peer in self._rows
                if peer not in OURS
            }
            for ours in OURS
            if ours in self._rows and REFERENCE in self._rows
        }
        self._on_result(report)

    def end(self) -> None:
        """Measures the matmul peak once more; the better one counts."""
        try:
            peak = max(self.peak, self.device.matmul_peak())
        except RuntimeError:  # the device was lost, see `_clean`
            peak = self.peak
        self.report["matmul_peak"] = {"bfloat16": peak}
        for row in self._rows.values():
            row["share_of_matmul_peak"] = self.flops / row["seconds"] / peak
        self._on_result(self.report)


def relative(row: dict[str, Any]) -> float:
    """Step time as a multiple of the reference's in the same turns."""
    return row["seconds"] / row["reference_seconds"]


def show(row: dict[str, Any]) -> None:
    """Prints where one contender's time goes."""
    print(
        f"  {row['seconds'] * 1e3:.1f} ms, {row['sequences_per_second']:.0f} sequences/s; memory "
        f"{row['state_bytes'] / 1e9:.2f} GB + {row['step_bytes'] / 1e9:.2f} GB"
    )
    kernels = row["kernels"]
    if "error" in kernels:
        print(f"  no profile: {kernels['error']}", flush=True)
        return
    for kind, spent in kernels["families"].items():
        print(f"    {kind:20s}{spent['ms']:9.3f} ms{spent['share']:8.1%}{spent['launches']:8.0f}")
    for name, ms in kernels["longest_of_no_family"].items():
        print(f"      {ms:.3f} ms: {name}")
    idle = f"{kernels['idle_ms']:9.3f} ms{kernels['idle_share']:8.1%}"
    print(f"    {'idle':20s}{idle} of the step", flush=True)


def show_table(report: dict[str, Any]) -> None:
    """Prints all of them side by side."""
    print(f"\n{'contender':36s}{'ms/step':>9s}{'seq/s':>8s}{'tokens/s':>10s}{'of peak':>9s}"
          f"{'MFU':>7s}{'idle':>7s}{'state':>8s}{'step':>8s} GB")  # fmt: skip
    for row in report["results"]:
        shares = (row["share_of_data_sheet_peak"], row["kernels"].get("idle_share"))
        mfu, idle = ("" if share is None else f"{share:.1%}" for share in shares)
        print(
            f"{row['contender']:36s}{row['seconds'] * 1e3:9.1f}{row['sequences_per_second']:8.0f}"
            f"{row['tokens_per_second']:10.0f}{row['share_of_matmul_peak']:9.1%}{mfu:>7s}{idle:>7s}"
            f"{row['state_bytes'] / 1e9:8.2f}{row['step_bytes'] / 1e9:8.2f}"
        )
    for ours, ratios in report["faster_than"].items():
        if ratios:
            said = ", ".join(f"{peer} {ratio:.2f}x" for peer, ratio in ratios.items())
            print(f"{ours} is faster than: {said}")
    for name, reason in report["not_run"].items():
        print(f"not run: {name}: {reason}")
