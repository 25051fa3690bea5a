"""MLPerf's log of a run, judged by the benchmark's own checkers and by the order of its lines."""

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("h5py")
pytest.importorskip("mlperf_logging")

from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.package_checker.seed_checker import SeedChecker

from bert_unpad.pretrain import main
from bert_unpad.pretrain.config import ConfigError, read_config
from bert_unpad.pretrain.output.energy import EnergyMeter
from bert_unpad.pretrain.output.mlperf_log import MlperfLog
from bert_unpad.pretrain.ranks import Ranks
from tests.support.mlperf_files import BATCH, read_log, toy_settings, write_benchmark_data
from tests.support.pretrain_runs import log_lines, run_in_turn

RULES = "5.0.0"
SUBMISSION = {"submission_org": "a name", "submission_platform": "a box", "cache_clear": False}
ALONE = Ranks(0, 1, torch.device("cpu"), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs of two ranks: one that reaches its target, one that cannot."""
    path = tmp_path_factory.mktemp("mlperf")
    write_benchmark_data(path, "fixed", "variable")
    values = toy_settings(path, seed=31, logging={"mlperf_submission": SUBMISSION})
    (path / "run.yaml").write_text(yaml.safe_dump(values))
    logs = {name: str(path / "logs" / name / "result_0.txt") for name in ("reached", "missed")}
    short = ["--optimizer.lr", "1e-7", "--schedule.total_steps", "5", "--seed", "32"]
    runs = {
        "reached": ["--logging.mlperf", logs["reached"]],
        "missed": [*short, "--logging.mlperf", logs["missed"], "--resume", "never"],
    }
    run_in_turn(path, 2, runs)
    return path


@pytest.fixture(scope="module")
def logs(folder) -> dict[str, Path]:
    return {name: folder / "logs" / name / "result_0.txt" for name in ("reached", "missed")}


def _problems(log: Path) -> list[str]:
    """What the library's compliance checker finds wrong."""
    checker = mlp_compliance.make_checker("training", RULES, False, False)
    checker.check_file(str(log), f"training_{RULES}/common.yaml")
    return [*checker.overwritable.values(), *checker.not_overwritable]


def test_a_run_that_reaches_its_target_passes_the_compliance_checker(logs):
    assert _problems(logs["reached"]) == []


def test_a_run_that_misses_its_target_fails_for_that_alone(logs):
    (problem,) = _problems(logs["missed"])
    assert "eval_accuracy" in problem
    assert ">= 0.720" in problem


def test_the_checker_sees_what_is_not_there(logs, tmp_path):
    lines = logs["reached"].read_text().splitlines()
    for key in ("run_stop", "opt_lamb_beta_2", "global_batch_size", "cache_clear", "init_stop"):
        kept = [line for line in lines if f'"key": "{key}"' not in line]
        assert len(kept) == len(lines) - 1
        (tmp_path / "less.txt").write_text("\n".join(kept) + "\n")
        assert any(key in problem for problem in _problems(tmp_path / "less.txt")), key


def test_the_order_of_the_lines(folder, logs):
    lines = read_log(logs["missed"])
    keys = [key for key, *_ in lines]
    assert keys[0] == "init_start"
    assert keys[keys.index("init_stop") :][:3] == ["init_stop", "run_start", "eval_samples"]
    assert keys.index("opt_lamb_epsilon") < keys.index("init_stop")
    events = [
        (key, value, metadata["samples_count"])
        for key, value, metadata, _ in lines
        if "samples_count" in metadata
    ]
    # Every 23 samples in updates of 12 are 2 updates; the last update is evaluated too.
    evaluations = log_lines(folder / "missed", "evaluation")
    assert [line["step"] for line in evaluations] == [2, 4, 5]
    expected, before = [], 0
    for line in evaluations:
        samples = line["step"] * BATCH
        expected += [
            ("block_start", None, before),
            ("block_stop", None, samples),
            ("eval_start", None, samples),
            ("eval_accuracy", line["mlm_accuracy"], samples),
            ("eval_stop", None, samples),
        ]
        before = samples
    assert events == expected
    assert keys[-2:] == ["train_samples", "run_stop"]
    assert lines[-1][2]["status"] == "aborted"
    kinds = {key: kind for key, *_, kind in lines}
    assert {kinds[key] for key in kinds if key.endswith("_start")} == {"INTERVAL_START"}
    assert {kinds[key] for key in kinds if key.endswith("_stop")} == {"INTERVAL_END"}


def test_the_values_are_those_of_the_run(folder, logs):
    lines = read_log(logs["reached"])
    found = {key: value for key, value, *_ in lines}
    for key, value in (SUBMISSION | {"submission_benchmark": "bert"}).items():
        assert found[key] == value
    expected = {
        "submission_division": "closed",
        "seed": 31,
        "global_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "max_sequence_length": 24,
        "opt_base_learning_rate": 0.02,
        "opt_learning_rate_training_steps": 40,
        "opt_learning_rate_warmup_steps": 4,
        "num_warmup_steps": 4,
        "start_warmup_step": -1,
        "opt_lamb_beta_1": 0.9,
        "opt_lamb_beta_2": 0.999,
        "opt_lamb_epsilon": 1e-6,
        "opt_lamb_weight_decay_rate": 0.01,
        "opt_lamb_learning_rate_decay_poly_power": 1.0,
        "eval_samples": 90,
    }
    assert {key: found[key] for key in expected} == expected
    evaluation = log_lines(folder / "reached", "evaluation")[-1]
    assert found["eval_accuracy"] == evaluation["mlm_accuracy"] >= 0.72
    assert found["train_samples"] == log_lines(folder / "reached", "train")[-1]["sequences"]
    assert lines[-1][2]["status"] == "success"
    assert lines[0][2]["file"] == "bert_unpad/pretrain/output/mlperf_log.py"


@pytest.mark.parametrize("from_train_samples", [False, True])
def test_convergence_is_compared_with_reference_points(logs, tmp_path, from_train_samples):
    checker = pytest.importorskip("mlperf_logging.rcp_checker.rcp_checker")
    for number in range(10):
        shutil.copy(logs["reached"], tmp_path / f"result_{number}.txt")
    folder = (str(tmp_path), "training", RULES, False, from_train_samples)
    samples = {key: value for key, value, *_ in read_log(logs["reached"])}["train_samples"]
    for factor, passes in ((1, True), (3, False)):  # three times as fast as the reference
        runs = [factor * samples - i % 3 for i in range(20)]
        point = {"Benchmark": "bert", "BS": BATCH, "Hyperparams": {}, "Epochs to converge": runs}
        points = io.StringIO(json.dumps({"toy": point}))
        passed, found, _ = checker.check_directory(*folder, points, "pruned_rcps")
        assert (passed, found) == (passes, "RCP found")
    # The benchmark's own points begin at a batch of 256.
    passed, found, _ = checker.check_directory(*folder, rcp_pass="pruned_rcps")
    assert not passed
    assert found == f"Missing RCP, please submit RCP with BS = {BATCH}"


def test_each_run_has_its_seed(logs):
    checker = SeedChecker(RULES)
    assert checker.check_seeds([str(log) for log in logs.values()])
    assert not checker.check_seeds([str(logs["missed"]), str(logs["missed"])])


def test_a_run_is_not_continued(folder, logs, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    arguments = ["--config", str(folder / "run.yaml"), "--logging.mlperf"]
    before = logs["reached"].read_bytes()
    run_dir = ["--run_dir", str(folder / "reached")]
    assert main([*arguments, str(folder / "new.txt"), *run_dir]) == 2
    error = capsys.readouterr().err
    assert "resume: expected never, or another run_dir, with logging.mlperf" in error
    assert not (folder / "new.txt").exists()
    run_dir = ["--run_dir", str(folder / "third")]
    assert main([*arguments, str(logs["reached"]), *run_dir]) == 2
    assert "logging.mlperf: expected a new file" in capsys.readouterr().err
    assert logs["reached"].read_bytes() == before
    # Found before the data are opened, and before an earlier run is set aside.
    (folder / "third").mkdir()
    (folder / "third" / "kept").touch()
    command = [*arguments, str(logs["reached"]), *run_dir, "--resume", "never"]
    assert main([*command, "--data.source", "shards:nowhere"]) == 2
    assert "logging.mlperf: expected a new file" in capsys.readouterr().err
    assert (folder / "third" / "kept").exists()
    assert main([*arguments, str(folder / "run.yaml" / "log.txt"), *run_dir]) == 2
    assert "logging.mlperf: expected a folder to write to" in capsys.readouterr().err


def test_a_run_that_diverges_is_aborted(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    closed = []
    monkeypatch.setattr(EnergyMeter, "close", lambda meter: closed.append(meter))
    log, run_dir = folder / "diverged" / "log.txt", ["--run_dir", str(folder / "diverged")]
    command = ["--config", str(folder / "run.yaml"), "--logging.mlperf", str(log), *run_dir]
    with pytest.raises(FloatingPointError):
        main([*command, "--optimizer.lr", "1e38", "--resume", "never"])
    (key, _, metadata, _) = read_log(log)[-1]
    assert (key, metadata["status"]) == ("run_stop", "aborted")
    assert [key for key, *_ in read_log(log)].count("run_stop") == 1
    assert len(closed) == 1


def test_a_run_that_a_signal_stops_has_no_result(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    begin = MlperfLog.continue_training

    def begin_and_signal(log, samples):
        begin(log, samples)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MlperfLog, "continue_training", begin_and_signal)
    log, run_dir = folder / "stopped" / "log.txt", ["--run_dir", str(folder / "stopped")]
    command = ["--config", str(folder / "run.yaml"), "--logging.mlperf", str(log), *run_dir]
    assert main([*command, "--optimizer.lr", "1e-7"]) == 128 + signal.SIGTERM
    keys = [key for key, *_ in read_log(log)]
    assert keys.count("block_start") == 2
    assert not {"run_stop", "train_samples"} & set(keys)


def test_the_package_is_named_where_it_is_missing(folder, monkeypatch):
    command = ["--config", str(folder / "run.yaml"), "--logging.mlperf", "x"]
    config, _ = read_config(command)
    for name in [name for name in sys.modules if name.startswith("mlperf_logging.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlperf_logging", None)
    with pytest.raises(ConfigError, match=r"logging.mlperf: .* 'bert_unpad\[mlperf\]'"):
        MlperfLog(config, ALONE)


def test_without_the_option_nothing_is_written(folder):
    config, _ = read_config(
        ["--config", str(folder / "run.yaml"), "--logging.mlperf_submission", "null"]
    )
    log = MlperfLog(config, ALONE)
    log.check_is_new(folder)
    log.start_run()
    log.open_file()
    log.start_training(3)
    log.abort(0)
