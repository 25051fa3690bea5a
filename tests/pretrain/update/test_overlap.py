"""Updates beside the next forward pass: the bits of updates before it, whatever the pass is like.

On a CPU, where the update is made as late as the waits of the pass allow; on a GPU:
tests/cuda/test_overlap.py.
"""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_unpad.batch import PackedInputs
from bert_unpad.nn import (
    PRESETS,
    Encoder,
    EncoderConfig,
    EncoderForPreTraining,
    ReplacedTokenPreTraining,
    generator_config,
)
from bert_unpad.ops import accumulate_in_place
from bert_unpad.optim import FusedAdam, FusedLAMB, decay_groups
from bert_unpad.pretrain.config import ConfigError, read_config
from bert_unpad.pretrain.gradients.cuda_graphs import StaticPass
from bert_unpad.pretrain.update.check import check_optimizer
from bert_unpad.pretrain.update.optimizer import step_if
from bert_unpad.pretrain.update.overlap import OverlappedUpdater, update_order
from tests.nn.test_bert import make_inputs
from tests.support.lazy_stream import LazyStream
from tests.support.seeds import derived

LAYERS = 3
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
}
FAMILIES = {
    "bert-base": {},
    "roberta-base": {},
    "albert-base": {"num_hidden_groups": 1},
    "albert-base, groups": {"num_hidden_groups": LAYERS, "inner_group_num": 2},
    "electra-small": {"embedding_size": 16, "heads": ("mlm",)},
    "rtd": {"embedding_size": 16},
    "modernbert-base": {},
    "eurobert-210m": {"num_key_value_heads": 1},
    "nomic-bert-base": {},
    "esm2-8m": {},
    "mpnet-base": {},
    "deberta-v3-base": {},
}
Make = Callable[[], EncoderForPreTraining]


def _model(family: str, **changes: Any) -> EncoderForPreTraining:
    torch.manual_seed(derived(0))
    preset = PRESETS.get(family.partition(",")[0], PRESETS["electra-small"])
    config = EncoderConfig(**preset | SIZES | FAMILIES[family] | changes)
    if family == "rtd":
        return ReplacedTokenPreTraining(config, generator_config(config, 0.5))
    return EncoderForPreTraining(config)


def _layers(model: nn.Module) -> list[nn.Module]:
    return [x for m in model.modules() if isinstance(m, Encoder) for x in m.layer]


class _Eager:
    """Passes whose gradients are let go after each update."""

    def __init__(self, model: EncoderForPreTraining, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def __call__(self, inputs: PackedInputs, first: bool) -> Tensor:
        if first:
            self._optimizer.zero_grad()
        losses = self._model(inputs)
        (losses[0] + losses[2]).backward()
        return (losses[0] + losses[2]).detach()


class _Static:
    """Passes as CUDA graphs replay them: gradients stay where they are."""

    def __init__(self, model: EncoderForPreTraining, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._static = model, None
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self, inputs: PackedInputs, first: bool) -> Tensor:
        keys = self._model.bert.draw_rng_keys(torch.device("cpu"))
        if self._static is None:
            self._static = StaticPass(self._model, nullcontext(), inputs, keys)
        self._static.load(inputs, keys, torch.ones(2))
        out = self._static.run(first)
        return out.mlm_loss_sum + out.nsp_loss_sum


def _train(
    make: Make,
    stream: LazyStream | None,
    passes: type[_Eager | _Static] = _Eager,
    prepare: Callable[[nn.Module, FusedAdam], None] = lambda model, optimizer: None,
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None,
    make_optimizer: Callable[..., Any] = FusedAdam,
) -> list[Tensor]:
    """Losses, and in the end weights and states, of 4 updates of two passes; one is left out."""
    model = make().train()
    optimizer = make_optimizer(decay_groups(model, 0.01), lr=0.01)
    updater = None if stream is None else OverlappedUpdater(model, optimizer, stream)
    prepare(model, optimizer)
    run, losses = passes(model, optimizer), []
    for step in range(5):
        before_step(model, step)
        for number in range(2):
            torch.manual_seed(derived(2 * step + number))
            inputs = make_inputs([12, 9, 5, 1], seed=number if passes is _Eager else 0)
            losses.append(run(inputs, first=number == 0))
        finite = torch.tensor(step != 2)
        if updater is None:
            step_if(optimizer, finite)
        else:
            updater.step(finite)
    if updater is not None:
        updater.wait()
    assert stream is None or stream.idle
    states = [x for p in model.parameters() for _, x in sorted(optimizer.state[p].items())]
    return [x.detach().clone() for x in (*losses, *model.parameters(), *states)]


def _same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_layer_is_in_the_chunk_of_its_layer(family):
    """And each layer is called after those of lower chunks."""
    model = _model(family)
    order = update_order(model)
    layers = _layers(model)
    members = {p for layer in layers for p in layer.parameters() if p.dim() > 1}
    assert members == set(order)
    called: list[int] = []
    for layer in layers:
        (chunk,) = {order[p] for p in layer.parameters() if p.dim() > 1}
        layer.register_forward_pre_hook(lambda *_, chunk=chunk: called.append(chunk))
    model(make_inputs([5, 3]))
    assert list(dict.fromkeys(called)) == list(range(1, len(layers) + 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_training_keeps_its_bits(family):
    make = partial(_model, family)
    stream = LazyStream()
    assert _same(_train(make, stream), _train(make, None))
    last = len(_layers(make())) + 1
    assert set(stream.waits) == set(range(last + 1))


@pytest.mark.parametrize("passes", [_Eager, _Static])
@pytest.mark.parametrize("recompute", ["none", "gelu", "layer"])
def test_training_keeps_its_bits_in_every_kind_of_pass(recompute, passes):
    def make() -> EncoderForPreTraining:
        model = _model("bert-base", hidden_dropout_prob=0.2)
        model.bert.encoder.recompute = recompute
        return model

    assert _same(_train(make, LazyStream(), passes), _train(make, None, passes))


@pytest.mark.parametrize("passes", [_Eager, _Static])
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_with_weights_that_updates_round(in_8_bits, passes):
    """And weight gradients that products write."""

    def make() -> EncoderForPreTraining:
        model = _model("bert-base")
        model.bert.encoder.fp8 = in_8_bits
        for module in model.modules():
            if isinstance(module, nn.Linear):
                accumulate_in_place(module.weight)
        return model

    def prepare(model: EncoderForPreTraining, optimizer: FusedAdam) -> None:
        weights = {p for layer in _layers(model) for p in layer.parameters() if p.dim() > 1}
        dtype = torch.float8_e4m3fn if in_8_bits else torch.bfloat16
        optimizer.keep_rounded(weights, dtype)

    def train(stream: LazyStream | None) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return _train(make, stream, passes, prepare)

    assert _same(train(LazyStream()), train(None))


def test_another_optimizer():
    make = partial(_model, "bert-base")
    both = (_train(make, stream, make_optimizer=FusedLAMB) for stream in (LazyStream(), None))
    assert _same(*both)


def _leave_out_the_last(model: EncoderForPreTraining, step: int) -> None:
    model.bert.encoder.active_layers = [True] * (LAYERS - 1) + [step % 2 == 0]


@pytest.mark.parametrize("passes", [_Eager, _Static])
def test_with_layers_that_passes_leave_out(passes):
    make = partial(_model, "bert-base")
    both = [
        _train(make, stream, passes, before_step=_leave_out_the_last)
        for stream in (LazyStream(), None)
    ]
    assert _same(*both)


@pytest.mark.parametrize("dropped", range(LAYERS + 1))
def test_a_wait_that_is_missing_is_found(dropped):
    make = partial(_model, "bert-base")
    assert not _same(_train(make, LazyStream(ignored=(dropped,))), _train(make, None))


def test_gradients_that_are_written_too_early_are_found():
    """In a pass that ends without waiting for a layer that it has left out."""

    def forget(model: nn.Module, _: FusedAdam) -> None:
        model._forward_hooks.clear()

    make = partial(_model, "bert-base")
    lazy, plain = (
        _train(make, stream, _Static, prepare, before_step=_leave_out_the_last)
        for stream, prepare in ((LazyStream(), forget), (None, lambda *_: None))
    )
    assert not _same(lazy, plain)


def test_gradients_are_kept_until_the_next_pass_is_over():
    model = _model("bert-base")
    optimizer = FusedAdam(model.parameters())
    updater = OverlappedUpdater(model, optimizer, LazyStream())
    _Eager(model, optimizer)(make_inputs([5]), True)
    held = [weakref.ref(p.grad) for p in model.parameters()]
    finite = torch.tensor(True)
    held.append(weakref.ref(finite))
    updater.step(finite)
    del finite
    optimizer.zero_grad()
    gc.collect()
    assert all(x() is not None for x in held)
    model.register_forward_pre_hook(lambda *_: kept.append(all(x() is not None for x in held)))
    kept: list[bool] = []
    model(make_inputs([5]))
    gc.collect()
    assert kept == [True]
    assert all(x() is None for x in held)


def test_what_reads_between_two_passes_waits():
    """So does a second update without a pass before it; and the end lets the model go."""
    model = _model("bert-base")
    optimizer, stream = FusedAdam(model.parameters()), LazyStream()
    updater = OverlappedUpdater(model, optimizer, stream)
    finite = torch.tensor(True)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        updater.step(finite)
        assert not stream.idle
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())
    updater.end()
    assert stream.idle
    assert all(optimizer.state[p]["step"] == 2 for p in model.parameters())
    stream.waits.clear()
    model(make_inputs([5]))
    assert stream.waits == []


BASE = ["--batching.global_batch_size=8", "--schedule.total_steps=10", "--optimizer.overlap=true"]


@pytest.mark.parametrize(
    ("more", "given"),
    [
        (["--optimizer.name=adamw"], "optimizer.name adamw, which does not update one layer"),
        (["--optimizer.name=muon"], "optimizer.name muon, "),
        (["--optimizer.name=onebit_adam", "--comm.start=1"], "optimizer.name onebit_adam, "),
        (["--optimizer.name=mt_dao"], "optimizer.name mt_dao, "),
        (["--optimizer.name=torch.optim.SGD"], "optimizer.name torch.optim.SGD, "),
        (["--optimizer.shard=world"], "optimizer.shard world, "),
        (["--compile=true"], "compile true, "),
        (["--comm.hook=post_local_sgd"], "comm.hook post_local_sgd, "),
    ],
)
def test_what_cannot_be_overlapped_is_refused(more, given):
    message = rf"^optimizer\.overlap: expected false with {given}.*, got true$"
    with pytest.raises(ConfigError, match=message):
        check_optimizer(
            read_config([*BASE, "--optimizer.name=fused_adam", *more])[0], torch.device("cuda")
        )


def test_a_cpu_is_refused():
    names = ("fused_adam", "lamb", "lans", "stable_adamw", "bert_unpad.optim.FusedAdam")
    for name in names:
        config, _ = read_config([*BASE, f"--optimizer.name={name}"])
        with pytest.raises(ConfigError, match=r"^optimizer\.overlap: expected false with device c"):
            check_optimizer(config, torch.device("cpu"))
        if "." not in name:  # what no row describes is tried on the device
            check_optimizer(config, torch.device("cuda"))
