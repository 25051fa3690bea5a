"""What is found out about an optimizer before training, and what is refused."""

import pytest
import torch

from bert_unpad.pretrain.config import ConfigError, OptimizerConfig, read_config
from bert_unpad.pretrain.output.checkpoint import Checkpointer
from bert_unpad.pretrain.parallel import WAYS
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.update.check import check_optimizer
from bert_unpad.pretrain.update.kinds import KINDS
from bert_unpad.pretrain.update.optimizer import build_optimizer

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


@pytest.mark.parametrize("name", [*sorted(f"torch.optim.{x}" for x in TORCH), f"{OURS}.Mixed"])
def test_what_can_be_used(name):
    _check(name, "--optimizer.lr", "0.01", "--optimizer.shard", "world")


FUSED = [f"bert_unpad.optim.{x}" for x in ("FusedAdam", "FusedLAMB", "FusedStableAdamW")]


@pytest.mark.parametrize(
    "name",
    [*sorted(f"torch.optim.{x}" for x in TORCH - {"Adafactor"}), *FUSED],
)
def test_what_updates_parts_of_parameters(name):
    _check(name, "--optimizer.lr", "0.01", "--optimizer.shard", "overlap")


@pytest.mark.parametrize("name", FUSED)
def test_our_classes_say_what_their_updates_depend_on(name):
    for option, value in (("optimizer.shard", "node"), ("comm.hook", "post_local_sgd")):
        _check(name, f"--{option}", value)


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
def test_arguments_of_a_class(more):
    _check("torch.optim.SGD", "--optimizer.arguments", more)


def test_what_cannot_be_used():
    with pytest.raises(ConfigError, match=r"^optimizer\.name: expected one that needs no eval\(\)"):
        _check(f"{OURS}.Swapped")


@pytest.mark.parametrize(("name", "found"), [("Keeper", "type"), ("Global", "str")])
def test_a_state_that_no_checkpoint_holds(name, found, tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(model, OptimizerConfig(name=f"{OURS}.{name}"))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match=f"state are tensors, .* got {found} in its state"):
        Checkpointer(tmp_path, 1, Ranks(0, 1, CPU, None)).save(1, model, optimizer, {})


def test_arguments_that_are_ignored():
    model = torch.nn.Linear(2, 2)
    config = OptimizerConfig(name=f"{OURS}.Anything", arguments={"twist": 1})
    with pytest.raises(ConfigError, match=r"optimizer\.arguments: expected .* reads, got 'twist'"):
        build_optimizer(model, config)
    build_optimizer(model, OptimizerConfig(name=f"{OURS}.Anything"))


def test_what_declares_nothing_is_not_shared_out():
    _check("torch.optim.SparseAdam")
    for option, value in (("optimizer.shard", "node"), ("comm.hook", "post_local_sgd")):
        with pytest.raises(ConfigError, match=rf"{option}: expected .* has updates_by None"):
            _check("torch.optim.SparseAdam", f"--{option}", value)
    _check(f"{OURS}.Mixed", "--comm.hook", "post_local_sgd")


@pytest.mark.parametrize("more", [(), ("--comm.hook", "post_local_sgd")])
def test_what_declares_another_word(more):
    with pytest.raises(ConfigError, match=r"^optimizer\.name: .*, got 'element' of .*Mistaken"):
        _check(f"{OURS}.Mistaken", *more)


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


def test_arguments_of_a_name_of_the_table():
    _check("lamb")
    with pytest.raises(ConfigError, match=r"optimizer\.arguments: expected arguments of adamw"):
        _check("adamw", "--optimizer.arguments", '{"power": 2}')
