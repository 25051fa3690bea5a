"""Whole runs of the trainer in processes of their own, on a tiny model and made-up text."""

import itertools
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml

from bert_unpad.data import DataConfig, prepare
from bert_unpad.pretrain import main
from bert_unpad.pretrain.output.metrics import JsonLines, read_json_lines
from tests.support.processes import TIMEOUT, free_port, join_ranks, start_ranks

__all__ = [
    "GLOBAL_BATCH",
    "WORDS",
    "changed",
    "command_in_turn",
    "finish",
    "go_back",
    "go_on",
    "in_turn",
    "log_lines",
    "losses",
    "make_folder",
    "mean_losses",
    "pause_after",
    "run",
    "run_in_turn",
    "settings",
    "start",
    "start_pausing",
    "tiny_settings",
    "uses",
    "wait_until_paused",
    "write_corpus",
]

# Words of a made-up language, for short documents.
WORDS = ["kalo", "mitu", "soka", "lumi", "tesa", "rano", "pilu", "demo"]
GLOBAL_BATCH = 12


def write_corpus(
    folder: Path, words: Sequence[str], documents: int, shortest: int = 2, lengths: int = 9
) -> None:
    """Writes `corpus.txt`: documents of 2 to 5 sentences of `shortest` words and up."""
    text = [
        "\n".join(
            " ".join(
                words[(d * 7 + s * 5 + w * w) % len(words)]
                for w in range(shortest + (d + s) % lengths)
            )
            + "."
            for s in range(2 + d % 4)
        )
        + f" d{d}."
        for d in range(documents)
    ]
    (folder / "corpus.txt").write_text("\n\n".join(text) + "\n")


def tiny_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """A tiny model on `corpus.txt`. Of a section, `changes` are added to what is here."""
    values: dict[str, Any] = {
        "device": "cpu",
        "rank_timeout": TIMEOUT,
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
        },
        "data": {
            "source": str(folder / "corpus.txt"),
            "cache_dir": str(folder / "cache"),
            "max_seq_length": 32,
        },
        "evaluation": {"every": 0, "examples": 20},
        "logging": {"every": 1},
    }
    return changed(values, changes)


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others; of a section, `changes` are added to what is there."""
    found = dict(values)
    for name, change in changes.items():
        found[name] = found.get(name, {}) | change if isinstance(change, dict) else change
    return found


def command_in_turn(folder: Path, name: str, values: dict[str, Any]) -> tuple[int, list[str]]:
    """For `in_turn`: a run in `folder/name` with the settings `values`, which are written beside
    it."""
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values))
    return free_port(), ["--config", str(file), "--run_dir", str(folder / name)]


def settings(folder: Path) -> dict[str, Any]:
    """Two passes over the text, on whatever number of ranks."""
    return tiny_settings(
        folder,
        seed=11,
        recompute="gelu",
        data={"vocab_size": 120, "validation_share": 0.1},
        batching={"global_batch_size": GLOBAL_BATCH},
        optimizer={"lr": 1e-3},
        schedule={"epochs": 2, "warmup_share": 0.1},
        checkpoint={"every": 4, "keep_last": 2},
        logging={"examples": True},
    )


def make_folder(path: Path) -> None:
    """Prepares a corpus, its data and a configuration, `run.yaml`."""
    words = ["".join(pair) for pair in itertools.product(["ka", "lo", "mi", "tu"], repeat=2)]
    write_corpus(path, words, documents=150)
    values = settings(path)
    (path / "run.yaml").write_text(yaml.safe_dump(values))
    prepare(DataConfig(**values["data"]), progress=False)


def _arguments(folder: Path, name: str, common: Sequence[str] = ()) -> list[str]:
    """The first ones of a run. One that finds checkpoints must go on from one of them."""
    found = ["--config", str(folder / "run.yaml"), *common, "--run_dir", str(folder / name)]
    saved = any((folder / name / "checkpoints").glob("step-*"))
    return [*found, *(["--resume", "must"] if saved else [])]


def start(folder: Path, name: str, world_size: int, *arguments: str) -> list[BaseProcess]:
    """Starts a run in `folder/name`; the arguments come after `run.yaml` and so win."""
    command = [*_arguments(folder, name), *arguments]
    return start_ranks(main, world_size, command, log=folder / f"{name}.log")


def finish(folder: Path, name: str, processes: list[BaseProcess]) -> tuple[list[int], str]:
    """Exit codes of processes, and what they wrote: rank 0, or all where some did not end."""
    late = join_ranks(processes)
    outputs = [(folder / f"{name}.log.{rank}").read_text() for rank in range(len(processes))]
    codes = [process.exitcode for process in processes]
    assert not late, "\n".join([f"ranks {late} did not end, exit codes {codes}:", *outputs])
    return codes, outputs[0]


def run(folder: Path, name: str, world_size: int, *arguments: str) -> str:
    """A run that must finish; returns the output of rank 0."""
    codes, output = finish(folder, name, start(folder, name, world_size, *arguments))
    assert codes == [0] * world_size, output
    return output


def in_turn(commands: list[tuple[int, list[str]]], node_size: int | None = None) -> int:
    """What each rank does: runs one after the other, each with a port of its own for its store."""
    if node_size is not None:
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % node_size)
        os.environ["LOCAL_WORLD_SIZE"] = str(node_size)
    for port, command in commands:
        # The store of the run before lives on while anything refers to it, and ranks that found it
        # instead of the new one would wait there.
        os.environ["MASTER_PORT"] = str(port)
        if code := main(command):
            return code
    return 0


def run_in_turn(
    folder: Path,
    world_size: int,
    runs: dict[str, list[str]],
    common: Sequence[str] = (),
    node_size: int | None = None,
) -> None:
    """Runs that must finish, each in a folder of its name, in the same processes.

    Starting a process takes longer than a run. `common` comes before the settings of each; with a
    `node_size` every so many ranks count as a machine.
    """
    commands = [
        (free_port(), [*_arguments(folder, name, common), *more]) for name, more in runs.items()
    ]
    processes = start_ranks(in_turn, world_size, commands, node_size, log=folder / "runs.log")
    codes, output = finish(folder, "runs", processes)
    assert codes == [0] * world_size, output


def pause_after(step: int, signs: Path) -> None:
    """Lets this process, if it is rank 0, stand still once it has logged a step, until `go_on`.

    So a test meets a run at that step, however slow or fast the machine is. The other ranks wait
    for rank 0 in their next sum. `signs` begins the names of two files that are the signals.
    """
    write = JsonLines.write

    def pausing(lines: JsonLines, values: Mapping[str, Any]) -> None:
        write(lines, values)
        if values.get("kind") == "train" and values["step"] == step:
            signs.with_suffix(".paused").touch()
            end = time.monotonic() + TIMEOUT
            while not signs.with_suffix(".go").exists() and time.monotonic() < end:
                time.sleep(0.05)

    JsonLines.write = pausing


def wait_until_paused(signs: Path, alive: Callable[[], bool], log: Path) -> None:
    """Waits until a run has come to the step where it pauses; fails if it is no longer alive."""
    deadline = time.monotonic() + TIMEOUT
    while not signs.with_suffix(".paused").exists():
        assert alive(), f"ended before its pause:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"did not get to its pause:\n{log.read_text()}"
        time.sleep(0.005)


def wait_until_asleep(processes: Sequence[BaseProcess]) -> None:
    """Waits until no thread of some processes has anything to do, those that read ahead neither."""
    deadline = time.monotonic() + TIMEOUT
    asleep = 0
    while asleep < 5:  # looks in a row, as one alone might fall between two pieces of work
        assert time.monotonic() < deadline, "the processes do not come to rest"
        try:
            tasks = [t for p in processes for t in Path(f"/proc/{p.pid}/task").iterdir()]
            states = {(t / "stat").read_text().rpartition(")")[2].split()[0] for t in tasks}
        except FileNotFoundError:  # a thread has ended
            states = set()
        asleep = asleep + 1 if states == {"S"} else 0
        time.sleep(0.02)


def go_on(signs: Path) -> None:
    """Ends a pause."""
    signs.with_suffix(".go").touch()


def _main_pausing(step: int, signs: Path, command: list[str]) -> int:
    pause_after(step, signs)
    return main(command)


def start_pausing(
    folder: Path, name: str, world_size: int, step: int, *arguments: str
) -> list[BaseProcess]:
    """As `start`; returns once the run stands still after a step, until `go_on(folder / name)`."""
    signs = folder / name
    command = [*_arguments(folder, name), *arguments]
    log = folder / f"{name}.log"
    processes = start_ranks(_main_pausing, world_size, step, signs, command, log=log)
    wait_until_paused(
        signs, lambda: all(process.is_alive() for process in processes), folder / f"{name}.log.0"
    )
    wait_until_asleep(processes)
    return processes


def log_lines(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The lines of one kind in a run's log."""
    return [x for x in read_json_lines(run_dir / "metrics.jsonl") if x["kind"] == kind]


def losses(run_dir: Path, every: int = 1) -> dict[int, tuple[float, ...]]:
    """What must be the same bits, by step; each step to log must be there once."""
    train = log_lines(run_dir)
    names = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "lr", "gradient_norm", "tokens")
    assert [line["step"] for line in train] == [every * n for n in range(1, len(train) + 1)]
    return {line["step"]: tuple(line[name] for name in names) for line in train}


def mean_losses(run_dir: Path, steps: int) -> list[float]:
    """The training loss of each step of a run that has made so many."""
    found = [values[0] for values in losses(run_dir).values()]
    assert len(found) == steps
    return found


def go_back(folder: Path, name: str, step: int, to: str | None = None) -> str:
    """Copies a run as if it had been killed after the checkpoint of a step.

    Returns:
        The name of the copy: `to`, by default one made of `name` and `step`.
    """
    copy = f"{name}, from {step}" if to is None else to
    shutil.copytree(folder / name, folder / copy)
    (folder / copy / "summary.json").unlink()
    for saved in (folder / copy / "checkpoints").glob("step-*"):
        if int(saved.name.removeprefix("step-")) > step:
            shutil.rmtree(saved)
    assert any((folder / copy / "checkpoints").glob("step-*")), (
        f"{name} kept no checkpoint to {step}"
    )
    return copy


def uses(run_dir: Path) -> dict[int, Counter]:
    """How often each example was used, by epoch, over all ranks."""
    found: dict[int, Counter] = {}
    for path in run_dir.glob("examples.rank*.jsonl"):
        for line in read_json_lines(path):
            found.setdefault(line["epoch"], Counter()).update(line["examples"])
    return found
