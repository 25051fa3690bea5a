"""Another optimizer than a recipe's: the recipe's options that it does not take are dropped."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bert_unpad.plan.inputs import workload_of
from bert_unpad.plan.options import make_parser
from bert_unpad.pretrain.config import ConfigError, OptimizerConfig, Settings, read_settings
from bert_unpad.pretrain.update.arguments import drop_refused
from bert_unpad.pretrain.update.check import check_optimizer
from bert_unpad.pretrain.update.kinds import KINDS
from tests.support.paths import CONFIGS
from tests.support.pretrain_runs import go_back, losses, make_folder, run

SGD = ["--optimizer.name", "torch.optim.SGD"]
# The options of these are for the memory and the network, and stay as they are.
WHOLE = ["--optimizer.shard", "none", "--comm.hook", "allreduce"]


def _write(path: Path, **optimizer: Any) -> list[str]:
    """The arguments for a recipe with these options of the optimizer."""
    needed = {"batching": {"global_batch_size": 8}, "schedule": {"total_steps": 10}}
    path.write_text(yaml.safe_dump({**needed, "optimizer": optimizer}))
    return ["--config", str(path)]


def _read(*arguments: str) -> Settings:
    return drop_refused(read_settings(arguments))


@pytest.fixture
def recipe(tmp_path) -> list[str]:
    more = {"always_adapt": True, "momentum": 0.5}
    options = {"name": "lamb", "lr": 0.5, "betas": [0.8, 0.9], "eps": 1e-4, "arguments": more}
    return _write(tmp_path / "recipe.yaml", **options)


RECIPES = [(path.stem, "torch.optim.Adagrad") for path in sorted(CONFIGS.glob("*.yaml"))]


@pytest.mark.parametrize(("stem", "name"), [*RECIPES, *(("bert_large_mlperf", x) for x in KINDS)])
def test_any_optimizer_takes_the_place_of_any_recipes(stem, name):
    arguments = ["--config", str(CONFIGS / f"{stem}.yaml"), "--optimizer.name", name, *WHOLE]
    settings = read_settings(arguments)
    found = drop_refused(settings).config
    check_optimizer(found, torch.device("cpu"))
    assert found.optimizer.lr == settings.config.optimizer.lr


def test_what_the_new_one_takes_stays_and_one_line_says_so(recipe, caplog):
    with caplog.at_level(logging.INFO):
        settings = _read(*recipe, *SGD)
    assert settings.config.optimizer == OptimizerConfig(
        name="torch.optim.SGD", lr=0.5, arguments={"momentum": 0.5}
    )
    assert [record.getMessage() for record in caplog.records] == [
        "optimizer.name torch.optim.SGD replaces the file's lamb. Options of the file that it does "
        "not take are dropped: optimizer.betas (0.8, 0.9), optimizer.eps 0.0001, "
        "optimizer.arguments.always_adapt True. Kept: optimizer.lr 0.5, "
        "optimizer.arguments.momentum 0.5"
    ]


def test_the_saved_configuration_is_what_the_run_has(recipe, tmp_path, caplog):
    settings = _read(*recipe, *SGD)
    (tmp_path / "config.yaml").write_text(settings.text)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        again = _read("--config", str(tmp_path / "config.yaml"))
    assert (again.config, again.text) == (settings.config, settings.text)
    assert not caplog.records


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--optimizer.betas", "[0.8, 0.9]"], r"optimizer\.betas: expected null with optimizer\.n"),
        (["--optimizer", "{eps: 1e-4}"], r"optimizer\.eps: expected null with optimizer\.name"),
        (["--optimizer.arguments", "{a: 1}"], r"optimizer\.arguments: expected arguments of .*'a'"),
    ],
)
def test_the_command_line_is_not_overruled(recipe, given, message):
    settings = _read(*recipe, *SGD, *given)
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_optimizer(settings.config, torch.device("cpu"))


def test_a_file_that_contradicts_itself_is_refused(tmp_path):
    arguments = _write(tmp_path / "own.yaml", name="torch.optim.SGD", eps=1e-4)
    for more in ([], SGD):
        with pytest.raises(ConfigError, match=r"^optimizer\.eps: expected null with optimizer\.na"):
            check_optimizer(_read(*arguments, *more).config, torch.device("cpu"))


def test_a_file_may_name_it_too(recipe, tmp_path):
    (tmp_path / "name.yaml").write_text("optimizer: {name: torch.optim.SGD}")
    named = ["--config", str(tmp_path / "name.yaml")]
    assert _read(*recipe, *named).config.optimizer.betas is None
    # Options of a file without a name are for the optimizer that was named before.
    (tmp_path / "more.yaml").write_text("optimizer: {eps: 1e-3}")
    settings = _read(*recipe, *named, "--config", str(tmp_path / "more.yaml"))
    with pytest.raises(ConfigError, match=r"^optimizer\.eps: expected null with optimizer\.name"):
        check_optimizer(settings.config, torch.device("cpu"))


def test_without_a_name_the_files_options_are_the_defaults(tmp_path):
    arguments = _write(tmp_path / "recipe.yaml", betas=[0.8, 0.9])
    assert _read(*arguments).config.optimizer.betas == (0.8, 0.9)
    assert _read(*arguments, *SGD).config.optimizer.betas is None
    assert _read(*arguments, "--optimizer.name", "lamb").config.optimizer.betas == (0.8, 0.9)


def test_a_plan_takes_the_same_recipes():
    options = [f"--model={CONFIGS / 'bert_small.yaml'}", "--set=optimizer.name=lamb"]
    work, _ = workload_of(make_parser().parse_args(options))
    assert work.optimizer == "lamb"


@pytest.mark.slow
def test_a_run_saves_what_it_has_and_goes_on(tmp_path):
    make_folder(tmp_path)
    values = yaml.safe_load((tmp_path / "run.yaml").read_text())
    values["optimizer"] |= {"betas": [0.9, 0.98], "eps": 1e-6}
    values |= {"schedule": {"total_steps": 6}, "checkpoint": {"every": 3}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    output = run(tmp_path, "whole", 2, *SGD)
    assert output.count("optimizer.name torch.optim.SGD replaces the file's adamw.") == 1
    saved = yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())["optimizer"]
    assert saved == {"name": "torch.optim.SGD", "lr": 1e-3, "shard": "none", "overlap": False}
    copy = go_back(tmp_path, "whole", 3)
    output = run(tmp_path, copy, 2, *SGD)
    assert "continuing from" in output
    assert "optimizer.betas:" not in output  # no setting that has changed
    assert losses(tmp_path / copy) == losses(tmp_path / "whole")
