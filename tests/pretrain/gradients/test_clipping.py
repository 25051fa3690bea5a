"""Whole runs under each way of clipping: poisoned gradients, steps left out, resuming."""

import math
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from bert_unpad.data import DataConfig, prepare
from bert_unpad.pretrain.config import ClipConfig, PretrainConfig
from bert_unpad.pretrain.parallel import Way, make_way
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.run import Run
from bert_unpad.pretrain.update.optimizer import step_if
from tests.support.pretrain_runs import (
    WORDS,
    finish,
    go_back,
    in_turn,
    log_lines,
    tiny_settings,
    write_corpus,
)
from tests.support.processes import free_port, start_ranks
from tests.support.seeds import derived

pytestmark = pytest.mark.slow

STEPS = 24
POISONED = 8  # the step, on rank 1
MODES = ["bucket", "before", "after", "none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clip")
    write_corpus(path, WORDS, documents=120, shortest=3, lengths=7)
    settings = tiny_settings(
        path,
        seed=3,
        data={"vocab_size": 100, "validation_share": 0.1},
        batching={"global_batch_size": 16},
        optimizer={"lr": 3e-3},
        schedule={"total_steps": STEPS, "warmup_steps": 2},
        checkpoint={"every": 7, "keep_last": 9},
        evaluation={"examples": 0},
        logging={"progress": "none"},
    )
    (path / "run.yaml").write_text(yaml.safe_dump(settings))
    prepare(DataConfig(**settings["data"]), progress=False)
    return path


@contextmanager
def _poison(factor: float):
    """Multiplies what rank 1 adds to the gradient in one step."""
    honest = Way.accumulate
    calls = 0

    def poisoned(way: Way, step, counts) -> Tensor:
        nonlocal calls
        calls += 1
        handles = []
        if dist.get_rank() == 1 and calls == POISONED:
            parameters = [p for p in way.run.model.parameters() if p.requires_grad]
            if not math.isfinite(factor):
                parameters = parameters[-1:]
            handles = [p.register_hook(lambda g: g * factor) for p in parameters]
        sums = honest(way, step, counts)
        for handle in handles:
            handle.remove()
        return sums

    Way.accumulate = poisoned
    try:
        yield
    finally:
        Way.accumulate = honest


def _runs(runs: list[tuple[tuple[int, list[str]], float]]) -> int:
    """Several runs, one after the other, in this process."""
    for command, factor in runs:
        with _poison(factor):
            code = in_turn([command])
        if code:
            return code
    return 0


def _train(folder: Path, runs: dict[str, tuple[float, list[str]]]) -> dict[str, list[dict]]:
    """The lines of the log of each run on two ranks: name -> (factor of the poison, settings)."""
    config = ["--config", str(folder / "run.yaml")]
    commands = [
        ((free_port(), [*config, "--run_dir", str(folder / name), *settings]), factor)
        for name, (factor, settings) in runs.items()
    ]
    processes = start_ranks(_runs, 2, commands, log=folder / "train.log")
    codes, output = finish(folder, "train", processes)
    assert codes == [0, 0], output
    return {name: log_lines(folder / name) for name in runs}


def _end(lines: list[dict]) -> float:
    return sum(line["loss"] for line in lines[-4:]) / 4


def test_a_poisoned_rank(folder):
    modes = ["bucket", "before", "none"]
    runs = {}
    for mode in modes:
        settings = ["--clip.mode", mode, "--clip.max_norm", "0.5"]
        runs[f"clean-{mode}"] = (1.0, settings)
        runs[f"poisoned-{mode}"] = (1e6, settings)
    lines = _train(folder, runs)
    for name, run in lines.items():
        assert [line["step"] for line in run] == list(range(1, STEPS + 1)), name
        assert all(line["skipped_steps"] == 0 for line in run)
        shares = [line["clipped_share"] for line in run]
        assert all(x is None for x in shares) if "none" in name else max(shares) > 0
    start = lines["clean-none"][0]["loss"]
    for mode in modes:
        clean, poisoned = _end(lines[f"clean-{mode}"]), _end(lines[f"poisoned-{mode}"])
        gained = (start - poisoned) / (start - clean)
        if mode in ("bucket", "before"):
            assert gained > 0.9, (mode, start, clean, poisoned)
        if mode == "none":  # Adam's second moments are spoilt for the rest of the run
            assert gained < 0.8, (mode, start, clean, poisoned)


def test_a_step_that_is_not_finite_on_one_rank_is_left_out_by_all(folder):
    cases = [
        ("bucket", "fp32", math.inf),
        ("bucket", "bf16", math.nan),
        ("before", "fp32", math.inf),
    ]
    cases += [("after", "fp32", math.nan), ("none", "fp32", math.inf)]
    runs = {
        f"{value}-{mode}-{wire}": (value, ["--clip.mode", mode, "--clip.wire_dtype", wire])
        for mode, wire, value in cases
    }
    for name, run in _train(folder, runs).items():
        assert [line["step"] for line in run if line["skipped_steps"]] == [POISONED], name
        assert all(math.isfinite(line["loss"]) for line in run)
        assert _end(run) < run[0]["loss"] - 0.1, name


def test_a_resumed_run_clips_as_one_without_interruption(folder):
    settings = ["--clip.mode", "bucket", "--clip.policy", "adaptive", "--clip.max_norm", "1.4"]
    settings += ["--clip.wire_dtype", "bf16", "--comm.bucket_mb", "0.01"]
    whole = _train(folder, {"whole": (1.0, settings)})["whole"]
    go_back(folder, "whole", 7, "resumed")
    resumed = _train(folder, {"resumed": (1.0, settings)})["resumed"]
    for name in ("loss", "gradient_norm", "clipped_share"):
        assert [line[name] for line in resumed] == [line[name] for line in whole], name
    # Of one bucket on each of two ranks, half or all would be clipped.
    assert any(2 * line["clipped_share"] % 1 for line in whole)


ALONE = Ranks(0, 1, torch.device("cpu"), None)


def _model_with_gradient() -> nn.Module:
    torch.manual_seed(derived(0))
    model = nn.Linear(7, 5)
    model(torch.randn(3, 7)).square().sum().backward()
    return model


def _way(model: nn.Module, **clip: Any) -> Way:
    """A way of one rank that is ready to clip what the model has."""
    way = make_way(Run(PretrainConfig(clip=ClipConfig(**clip)), ALONE, model))
    way.make_optimizer()
    way.begin()
    return way


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_clips_its_whole_gradient(mode):
    model = _model_with_gradient()
    before = torch.cat([p.grad.flatten() for p in model.parameters()])
    report = _way(model, max_norm=0.5, mode=mode).finish()
    after = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float(report.norm) == pytest.approx(float(before.norm()))
    assert bool(report.finite)
    if mode == "none":
        assert (int(report.clipped), report.parts) == (0, 0)
        assert torch.equal(after, before)
    else:
        assert (int(report.clipped), report.parts) == (1, 1)
        torch.testing.assert_close(after, before * 0.5 / before.norm(), rtol=1e-4, atol=0)


def test_the_norm_of_a_long_gradient():
    model = nn.Linear(2**20, 1, bias=False)
    # An fp32 sum loses each small square beside a large one.
    model.weight.grad = torch.full_like(model.weight, 2.4e-4)
    model.weight.grad[:, :16] = 1.0
    norm = float(model.weight.grad.double().norm())
    report = _way(model, max_norm=0.5, mode="after").finish()
    assert float(report.norm) == pytest.approx(norm, rel=1e-5)
    assert float(model.weight.grad.double().norm()) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_an_update_that_is_left_out_changes_nothing(fused):
    model = _model_with_gradient()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    way = _way(model)

    def everything() -> list[torch.Tensor]:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [x.detach().clone() for x in (*model.parameters(), *states)]

    step_if(optimizer, way.finish().finite)
    first = everything()
    assert len(first) == 2 + 2 * 3
    model.weight.grad[1, 2] = math.inf
    step_if(optimizer, way.finish().finite)
    assert all(torch.equal(a, b) for a, b in zip(first, everything(), strict=True))
    model.weight.grad.fill_(1.0)
    model.bias.grad.fill_(1.0)
    step_if(optimizer, way.finish().finite)
    assert not any(torch.equal(a, b) for a, b in zip(first, everything(), strict=True))
