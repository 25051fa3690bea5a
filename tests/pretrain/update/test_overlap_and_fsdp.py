"""Runs with `optimizer.shard` overlap and fsdp: as without, less state, exact resume, errors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bert_unpad.pretrain.config import ConfigError, read_config
from bert_unpad.pretrain.output.metrics import read_json_lines
from tests.support.pretrain_runs import log_lines, losses, make_folder, run_in_turn

pytestmark = pytest.mark.slow

BASE = ["--schedule.epochs", "null", "--schedule.total_steps", "6", "--optimizer.lr", "3e-3"]
BASE += ["--checkpoint.every", "3", "--checkpoint.keep_last", "9", "--logging.progress", "none"]
BASE += ["--logging.examples", "false", "--evaluation.every", "3"]
# Ranks have 5, 4 and 4 of them, in batches of 4: a forward pass without any on two.
BASE += ["--evaluation.examples", "13"]
FUSED, LAMB = (["--optimizer.name", name] for name in ("fused_adam", "lamb"))
OVERLAP = ["--optimizer.shard", "overlap", "--comm.bucket_mb", "0.01"]
FSDP = ["--optimizer.shard", "fsdp"]
CLIPPED = ["--clip.mode", "bucket", "--clip.max_norm", "0.5"]
ADAPTED = ["--clip.policy", "adaptive", "--batching.accumulation", "2"]
HALF = ["--precision", "bf16", "--clip.wire_dtype", "bf16"]
SCALED = ["--precision", "fp16", "--loss_scale.initial", "1e6"]  # the first updates overflow
SUMMED = ["--batching.accumulation", "2", "--clip.mode", "none"]
RUNS = {
    "adamw": SUMMED,
    "adamw-overlap": [*SUMMED, *OVERLAP],
    "adamw-fsdp": [*SUMMED, *FSDP],
    "scaled": [*FUSED, *SCALED],
    "scaled-overlap": [*FUSED, *SCALED, *OVERLAP],
    "scaled-fsdp": [*FUSED, *SCALED, *FSDP],
    "bounded-fsdp": [*FUSED, *SCALED, *FSDP, *CLIPPED],
    "lamb-overlap": [*LAMB, *OVERLAP, *CLIPPED, *ADAPTED, *HALF],
    "lamb-fsdp": [*LAMB, *FSDP, *CLIPPED, *HALF, "--recompute", "layer"],
}
BY_PATH = ["--optimizer.name", "bert_unpad.optim.FusedLAMB"]
BY_PATH += ["--optimizer.arguments", '{"max_grad_norm": null}']
RUNS["path-overlap"] = [*BY_PATH, *RUNS["lamb-overlap"][len(LAMB) :]]
RESUMED = ["adamw-overlap", "scaled-fsdp", "lamb-overlap", "lamb-fsdp"]
ELSEWHERE = {  # other ways to share, on two ranks
    "adamw-overlap": RUNS["adamw"],
    "adamw-fsdp": RUNS["adamw-overlap"],
    "adamw": RUNS["adamw-fsdp"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    make_folder(path)
    run_in_turn(path, 3, RUNS, BASE)
    copies = [(name, "again") for name in RESUMED] + [(name, "two") for name in ELSEWHERE]
    for name, suffix in copies:
        shutil.copytree(path / name, path / f"{name}.{suffix}")
        shutil.rmtree(path / f"{name}.{suffix}" / "checkpoints" / "step-000000006")
    return path


def _state_bytes(run_dir: Path) -> list[int]:
    return log_lines(run_dir, "optimizer")[-1]["state_bytes"]


def _evaluations(run_dir: Path) -> list[float]:
    return [line["loss"] for line in log_lines(run_dir, "evaluation")]


def _weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model" / "model.safetensors")


def _assert_alike(run: Path, other: Path, rel: float = 1e-4) -> None:
    got, want = losses(run), losses(other)
    assert got.keys() == want.keys()
    for step, numbers in want.items():
        # Updates that are left out have no norm.
        assert got[step] == pytest.approx(numbers, rel=rel, nan_ok=True)
    assert _evaluations(run) == pytest.approx(_evaluations(other), rel=rel)
    assert len(_evaluations(run)) == 2


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith(("adamw-", "scaled-"))])
def test_runs_learn_as_without_shards(folder, name):
    plain = name.split("-")[0]
    _assert_alike(folder / name, folder / plain, 1e-4 if plain == "adamw" else 1e-3)
    got, want = _weights(folder / name), _weights(folder / plain)
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-3, atol=1e-4)
    whole, shared = _state_bytes(folder / plain), _state_bytes(folder / name)
    assert max(shared) < 0.4 * whole[0]
    assert sum(shared) >= 0.99 * whole[0]
    summary = json.loads((folder / name / "summary.json").read_text())
    assert (
        summary["parameters"]
        == json.loads((folder / plain / "summary.json").read_text())["parameters"]
    )


@pytest.mark.parametrize("name", ["scaled-overlap", "scaled-fsdp", "bounded-fsdp"])
def test_updates_that_overflow_are_left_out_on_all_ranks(folder, name):
    train = [log_lines(folder / run) for run in (name, "scaled")]
    for ours, plain in zip(*train, strict=True):
        assert ours["skipped_steps"] == plain["skipped_steps"]
        assert ours["loss_scale"] == plain["loss_scale"]
    assert train[0][0]["skipped_steps"] == 1
    assert train[0][-1]["skipped_steps"] == 0


def test_bounds_hold(folder):
    for name in ("lamb-overlap", "lamb-fsdp"):
        lines = read_json_lines(folder / name / "metrics.jsonl")
        assert any(line.get("clipped_share", 0) > 0 for line in lines), lines[1]


def test_a_class_by_its_path_is_shared_out_as_by_its_name(folder):
    assert str(losses(folder / "path-overlap")) == str(losses(folder / "lamb-overlap"))


def test_resumed_runs_have_the_same_bits(folder):
    run_in_turn(folder, 3, {f"{name}.again": RUNS[name] for name in RESUMED}, BASE)
    for name in RESUMED:
        assert str(losses(folder / f"{name}.again")) == str(losses(folder / name)), name
        want = _weights(folder / name)
        assert all(torch.equal(v, want[k]) for k, v in _weights(folder / f"{name}.again").items())


def test_checkpoints_fit_other_numbers_of_ranks_and_ways_to_share(folder):
    run_in_turn(folder, 2, {f"{name}.two": more for name, more in ELSEWHERE.items()}, BASE)
    for name in ("adamw-overlap", "adamw-fsdp"):
        _assert_alike(folder / f"{name}.two", folder / "adamw.two")


REFUSED = [
    (["--clip.mode", "before"], "clip.mode: expected bucket, after or none"),
    (["--comm.hook", "power_sgd"], "comm.hook: expected allreduce"),
    (["--growth.name", "layer_drop"], "growth.name: expected none"),
    (["--compile", "true"], "compile: expected false"),
    (["--cuda_graphs", "true"], "cuda_graphs: expected false"),
    (["--batching.rank_speeds", "auto"], "batching.rank_speeds: expected numbers or null"),
]
REFUSED_BY_FSDP = [
    (["--comm.bucket_mb", "1"], "comm.bucket_mb: expected null"),
    (["--clip.mode", "bucket", "--clip.wire_dtype", "fp16"], "clip.wire_dtype: expected fp32 or"),
    (
        ["--clip.wire_dtype", "bf16", "--clip.error_feedback", "true"],
        "clip.error_feedback: expected false",
    ),
    (["--clip.mode", "bucket", "--clip.policy", "adaptive"], "clip.policy: expected equal"),
]


@pytest.mark.parametrize(
    ("shard", "settings", "message"),
    [
        *(("overlap", *case) for case in REFUSED),
        *(("fsdp", *case) for case in [*REFUSED, *REFUSED_BY_FSDP]),
    ],
)
def test_settings_that_do_not_go_together(shard, settings, message):
    needed = ["--batching.global_batch_size", "8", "--schedule.total_steps", "3"]
    with pytest.raises(ConfigError, match=f"{message}.* with optimizer.shard {shard}"):
        read_config([*needed, *settings, "--optimizer.shard", shard])
