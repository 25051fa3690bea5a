"""Runs that end before they begin, with exit code 2 and the name of the setting."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from bert_unpad.pretrain import main
from bert_unpad.pretrain.config import ConfigError, read_config
from bert_unpad.pretrain.model import check_model
from bert_unpad.pretrain.output.run_folder import check_folders
from bert_unpad.pretrain.ranks import Ranks, threads_per_process
from tests.support.pretrain_runs import tiny_settings, write_corpus

ALONE = Ranks(0, 1, torch.device("cpu"), None)


@pytest.fixture
def run(tmp_path, monkeypatch) -> list[str]:
    """The arguments of a run that would begin."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    write_corpus(tmp_path, ["kalo", "mitu", "soka"], documents=20)
    values = tiny_settings(
        tmp_path,
        run_dir=str(tmp_path / "run"),
        data={"vocab_size": 60},
        batching={"global_batch_size": 4},
        schedule={"total_steps": 1},
        evaluation={"examples": 0},
    )
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return ["--config", str(file)]


def _refused(arguments: list[str], capsys) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model.num_attention_heads", "1", "--model.hidden_size", "288"], "1 to 256 .*288"),
        (["--data.seq_length", "1"], "data.seq_length: expected an option such as data.max_seq_"),
        (["--seed", str(2**63)], "seed: expected an integer"),
        (["--optimizer.lr", ".inf"], "lr: expected a finite number, got inf"),
        (["--run_dir", ""], "run_dir: expected the path"),
    ],
)
def test_settings(given, message, run, capsys, tmp_path):
    error = _refused([*run, *given], capsys)
    assert re.fullmatch(rf"pretrain: error: .*{message}.*\n", error)
    assert not (tmp_path / "cache").exists()  # nothing was prepared before


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1000,
        "optimizer: {arguments: " + "{a: " * 1000 + "1" + "}" * 1001,
        "optimizer: {arguments: " + "{a: " * 600 + "1" + "}" * 601,
    ],
)
def test_settings_that_are_nested_hundreds_of_levels_deep(text, run, capsys, tmp_path):
    file = tmp_path / "deep.yaml"
    file.write_text(text)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own; Inductor raises it
    try:
        error = _refused([*run, "--config", str(file)], capsys)
    finally:
        sys.setrecursionlimit(limit)
    assert "config: expected values in a few levels" in error


def test_a_configuration_is_a_regular_file(run, capsys):
    message = "config: expected a YAML file, got '/dev/zero': .* no regular file"
    assert re.search(message, _refused([*run, "--config", "/dev/zero"], capsys))


def test_width_of_a_head_by_device(run):
    def check(device: str, hidden: int, heads: int) -> None:
        sizes = ["--model.hidden_size", str(hidden), "--model.num_attention_heads", str(heads)]
        check_model(read_config([*run, *sizes])[0], torch.device(device))

    for hidden, heads in ((768, 12), (64, 2), (256, 2)):
        check("cpu", hidden, heads)
        check("cuda", hidden, heads)
    check("cpu", 96, 2)
    message = r"num_attention_heads: expected .* one of \[32, 64, 96, 128\] on this device \(cuda\)"
    with pytest.raises(ConfigError, match=rf"{message}, got 96 / 2 = 48"):
        check("cuda", 96, 2)
    with pytest.raises(ConfigError, match=r"1 to 256 on this device \(cpu\), got 257 / 1 = 257"):
        check("cpu", 257, 1)


@pytest.mark.parametrize(
    ("precision", "least"), [("fp32", (7, 5)), ("fp16", (7, 5)), ("bf16", (8, 0)), ("fp8", (8, 9))]
)
def test_precision_by_gpu(run, monkeypatch, precision, least):
    sizes = ["--model.hidden_size", "64", "--model.num_attention_heads", "2"]
    config = read_config([*run, *sizes, "--precision", precision])[0]
    for capability in ((7, 5), (8, 0), (8, 9), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        if capability >= least:
            check_model(config, torch.device("cuda"))
        else:
            with pytest.raises(
                ConfigError, match=rf"precision: expected one of fp32, fp16.* got {precision}"
            ):
                check_model(config, torch.device("cuda"))
    check_model(config, torch.device("cpu"))


@pytest.mark.parametrize("key", ["run_dir", "data.cache_dir"])
@pytest.mark.parametrize("below", [[], ["deep", "er"]])
def test_a_file_in_the_way_of_a_folder(key, below, run, capsys, tmp_path):
    (tmp_path / "file").write_text("precious")
    folder = tmp_path.joinpath("file", *below)
    error = _refused([*run, f"--{key}", str(folder)], capsys)
    assert f"{key}: expected a folder to write to, got {str(folder)!r}: " in error
    assert f"{tmp_path / 'file'} is not a folder" in error
    assert (tmp_path / "file").read_text() == "precious"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["run_dir", "data.cache_dir"])
def test_folders_that_may_not_be_made(key, run, tmp_path):
    """As a user who may read but not write."""
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    config, _ = read_config([*run, f"--{key}", str(closed / "new")])
    child = os.fork()
    if not child:
        code = 1
        try:
            if os.geteuid() == 0:  # whom no permission binds
                os.setgid(65534)
                os.setuid(65534)
            check_folders(config, ALONE)
        except ConfigError as error:
            code = 0 if "no permission to write" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_cache_that_may_only_be_read_is_used(run, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    config, _ = read_config(run)
    refuse = str(tmp_path / "cache")
    monkeypatch.setattr(os, "access", lambda path, _: str(path) != refuse)
    check_folders(config, ALONE)


@pytest.mark.parametrize("given", ["0", "many", "-3", "100000000", "4097"])
def test_threads_of_the_environment(given, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS: expected an integer .* {given!r}"):
        threads_per_process(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert threads_per_process(1) == 3


def test_the_run_is_allowed_otherwise(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(run) == 0
    assert "No plot was drawn: matplotlib is not installed" in capsys.readouterr().out
    assert not (tmp_path / "run" / "training.png").exists()
    assert (Path(tmp_path) / "run" / "metrics.jsonl").is_file()
