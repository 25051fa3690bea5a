"""Outputs, losses and gradients of every family are those of transformers' own model, in fp32.

Which it computes in float64 too: how much a model's random weights magnify the roundings of fp32,
its own error says.
"""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bert_unpad.batch import PackedInputs, unpad
from bert_unpad.nn import EncoderConfig, EncoderForPreTraining, weights
from bert_unpad.nn.flops import forward_flops
from bert_unpad.nn.weight_files import read_tensors
from tests.support.tolerances import assert_same_gradients, assert_same_values

transformers = pytest.importorskip("transformers")

from tests.support.encoder_families import (
    CASES,
    PAD,
    Case,
    own_loss,
    padded_and_packed,
    stock_model,
)

FP32 = 1e-5  # of a tensor's largest entry, the bound of the operators: beside transformers' error

Pair = tuple[Any, EncoderForPreTraining, dict[str, Tensor], PackedInputs]


def make_pair(case: Case, seed: int, folder: Path, padding: str = "right") -> Pair:
    """transformers' model, ours from the folder that it has saved, and a batch for each."""
    stock = stock_model(case, seed)
    stock.save_pretrained(folder)
    model = EncoderForPreTraining.from_pretrained(folder).train()
    types = getattr(stock.config, "type_vocab_size", 0)
    return stock, model, *padded_and_packed(case, model.config.vocab_size, types, seed, padding)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(case: Case, seed: int, tmp_path: Path) -> None:
    stock, model, padded, packed = make_pair(case, seed, tmp_path)
    wide = copy.deepcopy(stock).double()
    losses = [own_loss(model, padded, packed), stock(**padded).loss, wide(**padded).loss]
    for loss in losses:
        loss.backward()
    got, want, truth = (loss.detach() for loss in losses)  # some round the logits to fp32 for it
    assert_same_values(got, want, FP32, truth=truth)
    # Gradients, renamed and split as the parameters they belong to: saved in their place.
    for side in (stock, model, wide):
        for parameter in side.parameters():
            parameter.data = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    ours = weights.to_hf_state_dict(model)
    theirs = []
    for side, name in ((stock, "gradients"), (wide, "truth")):
        side.save_pretrained(tmp_path / name)
        saved = read_tensors(tmp_path / name)
        theirs.append(weights.modern_tensors(saved, model.config, ours.keys()))
    assert all(gradient.dtype == torch.float64 for gradient in theirs[1].values())
    assert_same_gradients(ours, theirs[0], FP32, order=math.inf, truth=theirs[1])


def stock_logits(
    stock: Any, padded: dict[str, Tensor], packed: PackedInputs
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of the tokens that are no padding: in fp32 and in float64."""
    inputs = {name: x for name, x in padded.items() if "label" not in name}
    names = {"prediction_logits": "logits", "seq_relationship_logits": "nsp", "sop_logits": "nsp"}
    results = []
    for side in (stock, copy.deepcopy(stock).double()):
        out = side(**inputs)
        found = {names.get(name, name): out[name] for name in out if name.endswith("logits")}
        found["logits"] = unpad(found["logits"], packed.batch)
        results.append(found)
    return tuple(results)


def own_logits(model: EncoderForPreTraining, packed: PackedInputs) -> dict[str, Tensor]:
    if "rtd" in model.config.heads:
        return {"logits": model.detector_logits(packed)}
    logits, nsp = model.logits(packed, all_positions=True)
    return {"logits": logits} if nsp is None else {"logits": logits, "nsp": nsp}


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_logits_of_all_tokens(case: Case, padding: str, tmp_path: Path) -> None:
    stock, model, padded, packed = make_pair(case, 5, tmp_path, padding)
    want, truth = stock_logits(stock.eval(), padded, packed)
    got = own_logits(model.eval(), packed)
    if padding == "left":  # transformers pools the first column, which is padding then
        got.pop("nsp", None), want.pop("nsp", None)
    assert_same_values(got, want, FP32, truth=truth)


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_transformers_reads_what_we_write(case: Case, tmp_path: Path) -> None:
    _, model, padded, packed = make_pair(case, 6, tmp_path / "stock")
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.eval().save_pretrained(tmp_path / "own")
    kind = getattr(transformers, case.architecture)
    again, info = kind.from_pretrained(tmp_path / "own", output_loading_info=True)
    unused = model.config.family.unused
    info["missing_keys"] = [
        name for name in info["missing_keys"] if not any(re.fullmatch(p, name) for p in unused)
    ]
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    want, truth = stock_logits(again.eval(), padded, packed)
    assert_same_values(own_logits(model, packed), want, FP32, truth=truth)
    ours = EncoderForPreTraining.from_pretrained(tmp_path / "own")
    assert ours.config.heads == model.config.heads
    for name, tensor in ours.state_dict().items():
        if name not in weights.VOCAB_PADDED:  # padding rows are not saved
            assert torch.equal(tensor, model.state_dict()[name]), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_configuration_survives_both_ways(case: Case, tmp_path: Path) -> None:
    stock = stock_model(case, 7)
    stock.save_pretrained(tmp_path)
    config = weights.read_config(tmp_path)
    again = type(stock.config).from_dict(config.to_dict())
    assert again.to_dict() == stock.config.to_dict() | {"architectures": [case.architecture]}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flops_are_those_that_pytorch_counts(case: Case) -> None:
    stock = stock_model(case, 8, attn_implementation="eager").eval().requires_grad_(False)
    values = stock.config.to_dict() | {"architectures": [case.architecture]}
    config = EncoderConfig.from_dict(values)
    assert min(window % 100 for window in config.window_pattern) > 1
    ids = torch.randint(PAD + 1, config.vocab_size, (4, 3))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        stock(input_ids=ids)
    # Older versions of transformers compute the angles of rotations by a product too.
    angles = sum(
        sum(counts.values())
        for name, counts in counter.get_flop_counts().items()
        if name.rpartition(".")[2].startswith("rotary")
    )
    flops = counter.get_total_flops() - angles
    if config.relative_projections == "shared" and len(config.relative_terms) == 1:
        # DebertaV2 projects the embeddings of distances for both terms, whichever it uses.
        span = config.relative_buckets or config.max_relative_positions
        flops -= config.num_hidden_layers * 4 * span * config.hidden_size**2
    assert flops == forward_flops(config, [3, 3, 3, 3], num_masked=12)
