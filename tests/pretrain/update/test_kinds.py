"""Optimizers by name and by import path: which class is made, and with which arguments."""

import sys
from collections import OrderedDict
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from bert_unpad._choices import COMMUNICATING, ONE_BIT, OptimizerName
from bert_unpad.costs.optimizers import OPTIMIZER_COSTS
from bert_unpad.optim.one_bit import OneBitOptimizer
from bert_unpad.pretrain.config import ConfigError, OptimizerConfig, read_config
from bert_unpad.pretrain.update.kinds import KINDS, find_kind
from bert_unpad.pretrain.update.optimizer import build_optimizer

BASE = ["--batching.global_batch_size", "8", "--schedule.total_steps", "10"]


class Plain(torch.optim.Optimizer):
    """A class of a user: `lr` only, and what it is given besides."""

    def __init__(self, params: Any, lr: float, *, power: int = 1) -> None:
        super().__init__(params, {"lr": lr, "power": power})


class ThreeBetas(torch.optim.Optimizer):
    def __init__(
        self, params: Any, lr: float = 1.0, betas: tuple = (0.9, 0.99, 0.999), **others: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, **others})


class NoRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def Factory(params: Any, lr: float) -> torch.optim.Optimizer:
    raise AssertionError


@pytest.fixture(autouse=True)
def importable(monkeypatch) -> None:
    """This module under a short name, whatever pytest imports it as."""
    monkeypatch.setitem(sys.modules, "my_optimizers", sys.modules[__name__])


def _model() -> nn.Module:
    return nn.Sequential(OrderedDict(encoder=nn.Linear(3, 4), norm=nn.LayerNorm(4)))


def _build(*arguments: str) -> torch.optim.Optimizer:
    config, _ = read_config([*BASE, *arguments])
    return build_optimizer(_model(), config.optimizer)


def test_the_names_are_the_rows():
    assert tuple(KINDS) == get_args(OptimizerName)
    assert OPTIMIZER_COSTS.keys() <= KINDS.keys()
    classes = {name: kind.optimizer for name, kind in KINDS.items()}
    averaging = [name for name, x in classes.items() if hasattr(x, "averages_gradients")]
    assert averaging == list(COMMUNICATING)
    assert [name for name, x in classes.items() if issubclass(x, OneBitOptimizer)] == list(ONE_BIT)


@pytest.mark.parametrize("name", KINDS)
def test_defaults_of_the_table(name):
    optimizer = _build("--optimizer.name", name)
    assert isinstance(optimizer, KINDS[name].optimizer)
    weights, others = (group for group in optimizer.param_groups if group["params"])
    assert (weights["weight_decay"], others["weight_decay"]) == (0.01, 0.0)
    betas = (0.999 if name == "mt_dao" else 0.9, 0.999)
    for group in (weights, others):
        assert (group["lr"], group["betas"], group["eps"]) == (1e-4, betas, 1e-6)
    assert [p.dim() for p in weights["params"]] == [2]
    assert [p.dim() for p in others["params"]] == [1, 1, 1]


def test_what_a_name_stands_for():
    assert _build().defaults["fused"] is True
    assert _build("--optimizer.name", "lans").defaults["nesterov"] is True
    lamb = _build("--optimizer.name", "lamb")
    assert lamb.defaults["nesterov"] is False
    assert lamb.max_grad_norm is None


def test_a_class_gets_the_options_it_has():
    optimizer = _build(
        *("--optimizer.name", "torch.optim.SGD", "--optimizer.lr", "0.5"),
        *("--optimizer.weight_decay", "0.25", "--optimizer.arguments", '{"momentum": 0.75}'),
    )
    assert type(optimizer) is torch.optim.SGD
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    for group in optimizer.param_groups:
        assert (group["lr"], group["momentum"]) == (0.5, 0.75)


def test_a_class_keeps_its_own_defaults():
    optimizer = _build("--optimizer.name", "torch.optim.NAdam")
    want = torch.optim.NAdam(_model().parameters()).defaults
    assert optimizer.defaults == want | {"lr": 1e-4}
    adamw = _build("--optimizer.name", "torch.optim.AdamW")
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.01, 0.0]


def test_a_class_without_weight_decay():
    optimizer = _build(
        *("--optimizer.name", "my_optimizers.Plain", "--optimizer.arguments", "{power: 3}")
    )
    assert type(optimizer).__name__ == "Plain"
    assert [set(group) for group in optimizer.param_groups] == [{"params", "lr", "power"}] * 2
    assert optimizer.param_groups[0]["power"] == 3


def test_arguments_of_another_form_and_any_others():
    optimizer = _build(
        *("--optimizer.name", "my_optimizers.ThreeBetas"),
        *("--optimizer.arguments", '{"betas": [0.5, 0.6, 0.7], "rest": null}'),
    )
    assert optimizer.defaults == {"lr": 1e-4, "betas": [0.5, 0.6, 0.7], "rest": None}
    assert _build("--optimizer.name", "my_optimizers.ThreeBetas").defaults == {
        "lr": 1e-4,
        "betas": (0.9, 0.99, 0.999),
    }


def test_arguments_in_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "optimizer:\n  name: torch.optim.SGD\n  arguments: {momentum: 0.5, nesterov: true}\n"
    )
    config, text = read_config([*BASE, "--config", str(file)])
    assert config.optimizer.arguments == {"momentum": 0.5, "nesterov": True}
    file.write_text(text)
    assert read_config(["--config", str(file)])[0] == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "torch.optim.Nothing"}, "name: expected one of adamw, .*torch.optim.Nothing"),
        ({"name": "no_such_module.Adam"}, "name: expected .*ModuleNotFoundError: No module named"),
        ({"name": "torch.optim"}, "name: expected .* import path of an optimizer's class .*"),
        (
            {"name": "bert_unpad.experimental.MTDAO"},
            "name: expected mt_dao: ranks meet in its",
        ),
        ({"name": "bert_unpad.optim.one_bit_adam.OneBitAdam"}, "name: expected onebit_adam: ranks"),
        ({"name": "bert_unpad.optim.Muon"}, "name: expected muon: ranks meet in its step"),
        ({"name": "torch.Tensor"}, "name: expected .* import path of an optimizer's class .*"),
        ({"name": "my_optimizers.Factory"}, "name: expected .* got 'my_optimizers.Factory'"),
        ({"name": "my_optimizers.NoRate"}, "name: expected a class with an argument lr"),
        ({"name": "torch.optim.Optimizer"}, "name: expected a class with an argument lr"),
        (
            {"name": "torch.optim.SGD", "betas": (0.5, 0.5)},
            "betas: expected null with optimizer.name torch.optim.SGD, whose class has no such",
        ),
        ({"name": "torch.optim.SGD", "eps": 1e-8}, "eps: expected null with optimizer.name"),
        (
            {"name": "my_optimizers.Plain", "weight_decay": 0.01},
            "weight_decay: expected null with optimizer.name my_optimizers.Plain",
        ),
        (
            {"name": "my_optimizers.ThreeBetas", "betas": (0.9, 0.99)},
            r"betas: expected null .* has betas=\(0.9, 0.99, 0.999\) \(see optimizer.arguments\)",
        ),
        (
            {"name": "torch.optim.SGD", "arguments": {"momentun": 0.5}},
            "arguments: expected arguments of torch.optim.SGD .*momentum.*, got 'momentun'",
        ),
        (
            {"name": "torch.optim.SGD", "arguments": {"lr": 0.5}},
            "arguments: expected optimizer.lr, got lr",
        ),
        ({"arguments": {"betas": [0.5, 0.5]}}, "arguments: expected optimizer.betas, got betas"),
        ({"name": "lamb", "arguments": {"nesterov": True}}, "arguments: .* lamb .*, got 'nester"),
        (
            {"name": "my_optimizers.ThreeBetas", "arguments": {"params": []}},
            "arguments: expected arguments of .*, got 'params'",
        ),
        (
            {"name": "torch.optim.SGD", "arguments": {"nesterov": True}},
            "name: expected one that can be made with .*Nesterov momentum requires",
        ),
    ],
)
def test_what_cannot_be_made(options, message):
    with pytest.raises(ConfigError, match=f"optimizer.{message}"):
        build_optimizer(_model(), OptimizerConfig(**options))


@pytest.mark.parametrize("name", ["sgd", "", "Adamw", ".SGD", "torch.optim.", "os;rm.x", "a..b"])
def test_what_is_no_name_is_refused_before_anything_is_imported(name):
    with pytest.raises(ConfigError, match=r"optimizer\.name: expected one of adamw, fused_adam"):
        read_config([*BASE, "--optimizer.name", name])


def test_reading_a_configuration_imports_nothing(monkeypatch):
    monkeypatch.delitem(sys.modules, "my_optimizers")
    config, _ = read_config([*BASE, "--optimizer.name", "my_optimizers.Plain"])
    with pytest.raises(ConfigError, match="No module named 'my_optimizers'"):
        build_optimizer(_model(), config.optimizer)


def test_a_module_that_fails_names_the_option(tmp_path, monkeypatch):
    (tmp_path / "failing_module.py").write_text("raise RuntimeError('on purpose')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"optimizer\.name: .*RuntimeError: on purpose"):
        find_kind("failing_module.Adam")


@pytest.mark.parametrize("given", ["3", "[1]", "text"])
def test_arguments_are_an_object(given):
    with pytest.raises(ConfigError, match=r"optimizer\.arguments: expected an object or null, got"):
        read_config([*BASE, "--optimizer.arguments", given])


def test_an_update_of_a_class_by_its_path():
    model = _model()
    config = OptimizerConfig(name="torch.optim.SGD", lr=0.5, weight_decay=0.25)
    optimizer = build_optimizer(model, config)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    for number, (parameter, old) in enumerate(zip(model.parameters(), before, strict=True)):
        decay: float | Tensor = 0.25 * old if number == 0 else 0.0
        torch.testing.assert_close(parameter.detach(), old - 0.5 * (parameter.grad + decay))
