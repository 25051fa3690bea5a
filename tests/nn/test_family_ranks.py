"""Families whose layers share weights or norms, on two ranks: DDP and FSDP2."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.nn import EncoderForPreTraining
from tests.nn.test_bert import make_inputs
from tests.support.encoder_parts import random_parts
from tests.support.processes import run_ranks
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_gradients

PARTS = {
    "shared": {"num_hidden_groups": 1, "norm_place": "post"},
    "pre": {"num_hidden_groups": None, "norm_place": "pre", "first_norm": True},
}
LENGTHS = [[12, 9, 0, 5, 1], [7, 20]]


def make_model(kind: str) -> EncoderForPreTraining:
    plain = {
        "hidden_dropout_prob": 0.0,
        "attention_output_dropout_prob": None,
        "classifier_dropout_prob": 0.0,
        "heads": ("mlm", "nsp"),
        "type_vocab_size": 2,
        "inner_group_num": 1,
        "num_hidden_layers": 4,
    }
    config = random_parts(random.Random(derived(3)), **plain | PARTS[kind])
    config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(derived(0))
    return EncoderForPreTraining(config).train()


def gradients(model, rank: int) -> dict[str, Tensor]:
    for number in range(2):  # the second pass adds to the first
        out = model(make_inputs(LENGTHS[rank], seed=number))
        (out.mlm_loss_sum + out.nsp_loss_sum).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def on_a_rank(rank: int, world_size: int, kind: str, how: str) -> dict[str, Tensor]:
    model = make_model(kind)
    if how == "ddp":
        found = gradients(DistributedDataParallel(model), rank)
        return {name.removeprefix("module."): grad for name, grad in found.items()}
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {name: grad.full_tensor() for name, grad in gradients(model, rank).items()}


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", PARTS)
def test_two_ranks_average_the_gradients_of_one(kind: str, how: str) -> None:
    assert not dist.is_initialized()
    alone = [gradients(make_model(kind), rank) for rank in range(2)]
    want = {name: (grad + alone[1][name]) / 2 for name, grad in alone[0].items()}
    for got in run_ranks(on_a_rank, 2, kind, how):
        assert_same_gradients(got, want)
