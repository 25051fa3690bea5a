"""What is found out about an optimizer before training, and what is refused."""

from __future__ import annotations

import pytest
import torch

from bert_unpad._choices import COMMUNICATING
from bert_unpad.pretrain.config import ConfigError, OptimizerConfig, read_config
from bert_unpad.pretrain.parallel import WAYS
from bert_unpad.pretrain.update.check import check_optimizer, try_optimizer
from bert_unpad.pretrain.update.kinds import KINDS
from tests.support.seeds import derived

CPU = torch.device("cpu")
BASE = ["--batching.global_batch_size", "8", "--schedule.total_steps", "10"]
OURS = "tests.support.optimizers"
TORCH = {"ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"}
TORCH |= {"RMSprop", "Rprop", "SGD"}


def _check(name: str, *arguments: str) -> None:
    config, _ = read_config([*BASE, "--optimizer.name", name, *arguments])
    way = WAYS[config.optimizer.shard]
    check_optimizer(
        config,
        CPU,
        shares_state=way.shares_state,
        cuts_parameters=way.cuts_parameters,
    )


@pytest.mark.parametrize("name", [name for name in KINDS if name not in COMMUNICATING])
def test_every_row_of_the_table_continues_with_the_same_bits(name):
    assert try_optimizer(OptimizerConfig(name=name, lr=0.01), CPU) == []


@pytest.mark.parametrize("name", [*sorted(f"torch.optim.{x}" for x in TORCH), f"{OURS}.Mixed"])
def test_what_can_be_used(name):
    _check(name, "--optimizer.lr", "0.01", "--optimizer.shard", "world")


@pytest.mark.parametrize("name", sorted(f"torch.optim.{x}" for x in TORCH - {"Adafactor"}))
def test_what_updates_each_element_by_itself(name):
    _check(name, "--optimizer.lr", "0.01", "--optimizer.shard", "overlap")


@pytest.mark.parametrize("name", ["torch.optim.Adafactor", "bert_unpad.experimental.MERIT"])
def test_what_needs_whole_parameters(name):
    with pytest.raises(ConfigError, match=r"optimizer\.shard: expected none, node, world or fsdp"):
        _check(name, "--optimizer.lr", "0.01", "--optimizer.shard", "overlap")
    _check(name, "--optimizer.lr", "0.01", "--optimizer.shard", "fsdp")


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_take_parts(name):
    if KINDS[name].layout == "adam":
        _check(name, "--optimizer.shard", "overlap")
    else:
        with pytest.raises(ConfigError, match=rf"optimizer\.shard: expected none .*{name}"):
            _check(name, "--optimizer.shard", "overlap")


@pytest.mark.parametrize("more", ['{"momentum": 0.9}', '{"momentum": 0.9, "nesterov": true}'])
def test_arguments_are_tried_too(more):
    _check("torch.optim.SGD", "--optimizer.arguments", more)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.optim.LBFGS", "can be made with .* LBFGS doesn't support per-parameter options"),
        ("torch.optim.SparseAdam", "takes dense gradients and no closure, .* dense gradients"),
        (f"{OURS}.Closure", "takes dense gradients and no closure, .*Closure: TypeError: "),
        (f"{OURS}.Forgetful", "continues with the same bits from its state .*Forgetful: other"),
        (f"{OURS}.Keeper", "state are tensors, numbers and text .*Keeper: type in its state"),
        (f"{OURS}.Global", "state are tensors, numbers and text .*Global: str in its state"),
        (f"{OURS}.Heedless", r"leaves everything as it is where found_inf .*Heedless: other"),
        (f"{OURS}.Swapped", r"needs no eval\(\) before an evaluation, got .*Swapped"),
    ],
)
def test_what_cannot_be_used(name, message):
    with pytest.raises(ConfigError, match=rf"^optimizer\.name: expected one .*{message}"):
        _check(name)


def test_arguments_that_are_ignored():
    with pytest.raises(ConfigError, match=r"optimizer\.arguments: expected .* reads, got 'twist'"):
        _check(f"{OURS}.Anything", "--optimizer.arguments", '{"twist": 1}')
    _check(f"{OURS}.Anything")


def test_updates_that_depend_on_all_parameters_are_not_shared_out():
    _check(f"{OURS}.Coupled")
    with pytest.raises(ConfigError, match=r"optimizer\.shard: expected none .* got node"):
        _check(f"{OURS}.Coupled", "--optimizer.shard", "node")


def test_numbers_in_the_groups_cannot_be_averaged():
    hook = ("--comm.hook", "post_local_sgd")
    _check(f"{OURS}.Mixed", *hook)  # a count, the same on all ranks
    library = pytest.importorskip("pytorch_optimizer")
    name = f"{library.__name__}.Prodigy"
    _check(name)
    with pytest.raises(ConfigError, match=r"comm\.hook: expected another one .* \(d_"):
        _check(name, *hook)


def test_ranks_that_differ_do_not_share_the_work():
    message = r"comm\.hook: expected another one with optimizer.name muon, .*, got"
    for hook in ("post_local_sgd", "dream_ddp"):
        with pytest.raises(ConfigError, match=f"{message} {hook}"):
            _check("muon", "--comm.hook", hook)
        alone = ("--optimizer.arguments", '{"distributed": false}')
        _check("muon", "--comm.hook", hook, *alone)


def test_muon_is_not_shared_out():
    with pytest.raises(ConfigError, match=r"optimizer\.shard: expected none .* muon, whose state"):
        _check("muon", "--optimizer.shard", "world")


def test_the_check_leaves_random_numbers_alone():
    torch.manual_seed(derived(5))
    want = torch.rand(3)
    torch.manual_seed(derived(5))
    try_optimizer(OptimizerConfig(), CPU)
    assert torch.equal(torch.rand(3), want)


def test_a_name_of_the_table_is_checked_without_a_trial(monkeypatch):
    monkeypatch.setattr("bert_unpad.pretrain.update.check.try_optimizer", None)
    _check("lamb")
    with pytest.raises(ConfigError, match=r"optimizer\.arguments: expected arguments of adamw"):
        _check("adamw", "--optimizer.arguments", '{"power": 2}')
