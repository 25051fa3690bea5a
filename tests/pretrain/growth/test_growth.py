"""Schedules of growth: their plans, and what a stage leaves out."""

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn import (
    PRESETS,
    BertConfig,
    BertForPreTraining,
    EncoderConfig,
    EncoderForPreTraining,
)
from bert_unpad.nn.flops import forward_flops
from bert_unpad.pretrain.config import (
    ConfigError,
    GrowthConfig,
    OptimizerConfig,
    PretrainConfig,
    ScheduleConfig,
    read_config,
)
from bert_unpad.pretrain.growth import (
    SCHEDULES,
    Growth,
    Setting,
    Stage,
    add_layers,
    cut_layers,
    freeze,
    make_growth,
)
from bert_unpad.pretrain.growth.stage import staged_lr_factor
from bert_unpad.pretrain.pretrain import _growth
from bert_unpad.pretrain.update.optimizer import build_optimizer
from bert_unpad.pretrain.update.schedule import lr_factor
from bert_unpad.pretrain.update.state import take_over
from tests.support.processes import run_ranks
from tests.support.seeds import derived

SETTING = Setting(seed=3, total_steps=100, layers=12, max_seq_length=128)


def _plan(**settings) -> tuple[Stage, ...]:
    return make_growth(GrowthConfig(**settings), SETTING).stages


def test_stages_of_multi_stage_training():
    stages = _plan(name="mslt", layers=[3, 5, 12], shares=[0.2, 0.3, 0.4], joint_share=0.1)
    assert [stage.end for stage in stages] == [20, 50, 90, 100]
    assert [stage.layers for stage in stages] == [3, 5, 12, 12]
    assert [stage.frozen for stage in stages] == [0, 3, 5, 0]
    # Copies of the layers on top, around again where there are fewer than new ones.
    assert [stage.sources for stage in stages] == [(), (1, 2), (0, 1, 2, 3, 4, 0, 1), ()]
    assert [stage.layers for stage in _plan(name="mslt")] == [3, 6, 9, 12]


def test_stages_of_stacking_and_lengths():
    stages = _plan(name="stacking")
    assert [stage.layers for stage in stages] == [3, 6, 12]
    assert [stage.sources for stage in stages] == [(), (0, 1, 2), (0, 1, 2, 3, 4, 5)]
    assert [stage.end for stage in stages] == [33, 67, 100]
    assert not any(stage.frozen for stage in stages)
    stages = _plan(name="lengths", lengths=[32, 128], shares=[0.9, 0.1])
    assert [(stage.end, stage.max_seq_length) for stage in stages] == [(90, 32), (100, 128)]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"name": "mslt", "layers": [3, 6]}, "growth.layers"),
        ({"name": "stacking", "layers": [3, 12]}, "growth.layers"),
        ({"name": "lengths", "lengths": [32, 64]}, "growth.lengths"),
        ({"name": "mslt", "layers": [3, 12], "shares": [0.999, 0.001]}, "growth.shares"),
    ],
)
def test_plans_that_do_not_fit(settings, key):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        make_growth(GrowthConfig(**settings), SETTING)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--growth.layers", "[1, 2]"], "growth.layers"),
        (["--growth.name", "layer_drop", "--growth.shares", "[1]"], "growth.shares"),
        (["--growth.name", "mslt", "--growth.layers", "[3, 2]"], "growth.layers"),
        (["--growth.name", "mslt", "--growth.shares", "[0.5, 0.4]"], "growth.shares"),
        (["--growth.name", "stacking", "--growth.joint_share", "0.1"], "growth.joint_share"),
        (["--growth.name", "lengths"], "growth.lengths"),
        (["--growth.name", "layer_drop", "--compile", "true"], "compile"),
        (["--growth.name", "mslt", "--model.preset", "here"], "model.preset"),
        (
            ["--growth.name", "mslt", "--schedule.total_steps", "null", "--schedule.epochs", "1"],
            "schedule.total_steps",
        ),
    ],
)
def test_settings_that_do_not_fit(arguments, key):
    base = ["--batching.global_batch_size", "8", "--schedule.total_steps", "10"]
    with pytest.raises(ConfigError, match=rf"^{key.replace('.', '[.]')}: "):
        read_config([*base, *arguments])


def test_learning_rate_in_stages():
    schedule = ScheduleConfig(total_steps=100)
    stages = (Stage(40, 2, 8), Stage(100, 4, 8))

    def factors(mode: str) -> list[float]:
        growth = Growth(stages, mode)
        return [staged_lr_factor(step, schedule, growth, 100, 10) for step in range(100)]

    plain = [lr_factor(step, schedule, total_steps=100, warmup_steps=10) for step in range(100)]
    assert factors("continue") == plain
    rewarm = factors("rewarm")
    assert rewarm[:40] == plain[:40]
    assert rewarm[40:46] == pytest.approx([plain[40 + i] * (i + 1) / 6 for i in range(6)])
    assert rewarm[46:] == plain[46:]
    restart = factors("restart")
    assert restart[:40] == [
        lr_factor(i, schedule, total_steps=40, warmup_steps=4) for i in range(40)
    ]
    assert restart[40:] == [
        lr_factor(i, schedule, total_steps=60, warmup_steps=6) for i in range(60)
    ]


CONFIG = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    intermediate_size=32,
    initializer_range=0.3,
)
LENGTHS = [5, 9, 3]


def _inputs() -> PackedInputs:
    draw = np.random.default_rng(derived(1))
    return PackedInputs.build(
        VarlenBatch.from_lengths(LENGTHS),
        torch.from_numpy(draw.integers(0, 50, 17)),
        masked_positions=torch.tensor([1, 6, 7, 15]),
        masked_labels=torch.from_numpy(draw.integers(0, 50, 4)),
        next_sentence_labels=torch.tensor([0, 1, 1]),
    )


def _frozen() -> tuple[BertForPreTraining, Stage]:
    """Two layers frozen below two that train."""
    torch.manual_seed(derived(2))
    model = BertForPreTraining(CONFIG).train()
    stage = Stage(10, 4, 8, frozen=2)
    freeze(model, stage)
    return model, stage


def _loss(model: torch.nn.Module) -> torch.Tensor:
    torch.manual_seed(derived(4))
    outputs = model(_inputs())
    return outputs.mlm_loss_sum + outputs.nsp_loss_sum


def test_a_frozen_layer_has_no_gradient_and_no_state():
    model, _ = _frozen()
    optimizer = build_optimizer(model, OptimizerConfig(name="fused_adam"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss = _loss(model)
    loss.backward()
    optimizer.step()
    frozen = ("bert.embeddings.", "bert.encoder.layer.0.", "bert.encoder.layer.1.")
    for name, parameter in model.named_parameters():
        trains = not name.startswith(frozen) or "word_embeddings" in name
        assert (parameter.grad is not None) == trains, name
        assert (parameter in optimizer.state) == trains, name
        assert torch.equal(parameter, before[name]) != trains, name
    # The loss, and the gradient of what trains, are those of a model that trains as a whole.
    model.load_state_dict(before)
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    freeze(model, Stage(10, 4, 8))
    whole = _loss(model)
    assert torch.equal(loss, whole)
    whole.backward()
    for name, parameter in model.named_parameters():
        if name in ours and "word_embeddings" not in name:
            torch.testing.assert_close(ours[name], parameter.grad, msg=name)


def test_a_decoder_of_its_own_leaves_the_embedding_frozen():
    config = EncoderConfig(
        model_type="bert_unpad", vocab_size=50, hidden_size=16, num_hidden_layers=4,
        num_attention_heads=2, intermediate_size=32, tie_word_embeddings=False,
    )  # fmt: skip
    model = EncoderForPreTraining(config).train()
    freeze(model, Stage(10, 4, 8, frozen=2))
    _loss(model).backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    assert not model.bert.embeddings.word_embeddings.weight.requires_grad


def test_every_schedule_has_a_name():
    assert SCHEDULES.keys() == set(get_args(get_type_hints(GrowthConfig)["name"]))


def _saved_bytes(model: BertForPreTraining) -> int:
    """Bytes of activations that a forward pass keeps for the backward pass."""
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned and tensor.is_floating_point():
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _loss(model)
    del loss
    return sum(seen.values())


def test_frozen_layers_save_no_activations():
    model, _ = _frozen()
    with_frozen = _saved_bytes(model)
    shallow, _ = _frozen()
    del shallow.bert.encoder.layer[:2]  # what trains, and nothing below it
    shallow.bert.encoder.frozen_layers = 0
    embeddings = shallow.bert.embeddings
    embeddings.forward = torch.no_grad()(embeddings.forward)
    assert with_frozen == _saved_bytes(shallow)
    freeze(model, Stage(10, 4, 8))
    assert _saved_bytes(model) > 1.5 * with_frozen


def test_flops_count_frozen_layers_forward_only_and_dropped_ones_not_at_all():
    model, _ = _frozen()
    inputs = _inputs()
    forward = forward_flops(CONFIG, inputs)
    tokens, hidden = sum(LENGTHS), CONFIG.hidden_size
    one = forward - forward_flops(replace(CONFIG, num_hidden_layers=3), inputs)
    qkv = 2 * tokens * 3 * hidden**2
    assert model.num_flops(inputs) == 3 * forward - 2 * 2 * one - qkv
    model.word_embeddings.requires_grad_(False)
    decoder = 2 * inputs.num_masked * hidden * CONFIG.vocab_size
    assert model.num_flops(inputs) == 3 * forward - 4 * one - qkv - decoder
    freeze(model, Stage(10, 4, 8))
    assert model.num_flops(inputs) == 3 * forward
    model.bert.encoder.active_layers = (True, False, True, False)
    assert model.num_flops(inputs) == 3 * (forward - 2 * one)


def test_layers_left_out_hand_on_what_they_get():
    config = replace(CONFIG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForPreTraining(config).train()
    model.bert.encoder.active_layers = (True, False, True, False)
    loss = _loss(model)
    loss.backward()
    layers = model.bert.encoder.layer
    assert [layer.output.dense.weight.grad is not None for layer in layers] == [1, 0, 1, 0]
    model.eval()
    assert not torch.equal(_loss(model), loss)  # evaluation runs all layers
    model.bert.encoder.active_layers = (False,) * 4
    assert torch.isfinite(_loss(model.train()))
    del layers[3], layers[1]
    model.bert.encoder.active_layers = None
    assert torch.equal(_loss(model), loss)


def test_new_layers_are_copies_with_states():
    torch.manual_seed(derived(0))
    model = BertForPreTraining(CONFIG).train()
    cut_layers(model, 2)
    assert model.config.num_hidden_layers == model.bert.config.num_hidden_layers == 2
    old = build_optimizer(model, OptimizerConfig())
    _loss(model).backward()
    old.step()
    copies = add_layers(model, (1, 0))
    stage = Stage(10, 4, 8, frozen=2)
    freeze(model, stage)
    new = build_optimizer(model, OptimizerConfig())
    take_over(new, old, copies)
    first, second, *copied = model.bert.encoder.layer
    for below, above in zip((second, first), copied, strict=True):
        for source, copy in zip(below.parameters(), above.parameters(), strict=True):
            assert torch.equal(source, copy)
            assert source not in new.state
            for name, value in old.state[source].items():
                assert torch.equal(new.state[copy][name], value)
                assert new.state[copy][name] is not value
    bias = model.cls.predictions.bias  # trains on, with its state
    assert float(new.state[bias]["step"]) == 1


PRE_NORM = ["modernbert-base", "eurobert-210m"]  # without and with a norm before the first layer


def _pre_norm(preset: str) -> EncoderForPreTraining:
    """Four layers with norms before the halves, whose weights all differ."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 16, "pad_token_id": 0}
    sizes |= {"num_key_value_heads": None}
    torch.manual_seed(derived(7))
    model = EncoderForPreTraining(EncoderConfig(**PRESETS[preset] | sizes)).train()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)
    return model


def _mlm_loss(model: EncoderForPreTraining) -> torch.Tensor:
    torch.manual_seed(derived(4))
    return model(replace(_inputs(), next_sentence_labels=None)).mlm_loss_sum


@pytest.mark.parametrize("preset", PRE_NORM)
def test_norms_go_with_the_layers_that_they_are_before(preset):
    model = _pre_norm(preset)
    cut_layers(model, 2)
    layers, encoder = model.bert.encoder.layer, model.bert.encoder
    below = encoder if model.config.first_norm else model.bert.embeddings
    bottom = below.LayerNorm.weight.clone()
    second, final = (layer.output.LayerNorm.weight.clone() for layer in layers)
    moved = layers[1].output.LayerNorm.weight
    copies = add_layers(model, (0, 1, 0))
    assert layers[4].output.LayerNorm.weight is moved  # and so keeps its optimizer states
    weights = [layers[slot].output.LayerNorm.weight for slot in (1, 2, 3)]
    origins = [below.LayerNorm.weight, layers[0].output.LayerNorm.weight, below.LayerNorm.weight]
    assert all(copies[copy] is origin for copy, origin in zip(weights, origins, strict=True))
    found = [layer.output.LayerNorm.weight for layer in layers]
    wanted = [second, bottom, second, bottom, final]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("preset", PRE_NORM)
def test_layers_left_out_leave_their_norm_to_the_next(preset):
    model = _pre_norm(preset)
    layers = model.bert.encoder.layer
    model.bert.encoder.active_layers = (True, False, True, False)
    loss = _mlm_loss(model)
    loss.backward()
    assert [layer.output.dense.weight.grad is not None for layer in layers] == [1, 0, 1, 0]
    model.bert.encoder.active_layers = (False,) * 4
    assert torch.isfinite(_mlm_loss(model))
    model.bert.encoder.active_layers = (True, False, True, False)
    for below, above in ((0, 1), (2, 3)):
        norm = layers[above].output.LayerNorm.state_dict()
        layers[below].output.LayerNorm.load_state_dict(norm)
        torch.nn.init.normal_(layers[above].attention.output.dense.weight)  # is not used
    assert torch.equal(_mlm_loss(model), loss)
    torch.nn.init.normal_(layers[1].output.LayerNorm.weight)
    assert not torch.equal(_mlm_loss(model), loss)


@pytest.mark.parametrize("preset", PRE_NORM)
def test_frozen_layers_with_norms_first_have_no_gradient(preset):
    model = _pre_norm(preset)
    freeze(model, Stage(10, 4, 8, frozen=2))
    _mlm_loss(model).backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in model.bert.encoder.layer[:2].parameters())


def _bucket_bytes(rank: int, world_size: int) -> tuple[int, int]:
    """Bytes that DDP exchanges in a stage with frozen layers, and of the parameters that train."""
    model, _ = _frozen()
    replica = DistributedDataParallel(model)
    sizes = []

    def count(state: None, bucket):
        sizes.append(bucket.buffer().nbytes)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    replica.register_comm_hook(None, count)
    _loss(replica).backward()
    return sum(sizes), sum(p.nbytes for p in model.parameters() if p.requires_grad)


def test_frozen_layers_exchange_nothing():
    (exchanged, trained), other = run_ranks(_bucket_bytes, 2)
    layer = sum(p.nbytes for p in BertForPreTraining(CONFIG).bert.encoder.layer[0].parameters())
    everything = sum(p.nbytes for p in BertForPreTraining(CONFIG).parameters())
    assert other == (exchanged, trained)
    assert exchanged == trained < everything - 2 * layer


@pytest.mark.parametrize("name", ["none", "lengths", "mslt", "stacking", "layer_drop"])
def test_layers_that_share_weights_do_not_grow(name):
    with torch.device("meta"):
        model = EncoderForPreTraining(EncoderConfig(**PRESETS["albert-base"]))
    lengths = [64, 128] if name == "lengths" else None
    config = PretrainConfig(
        growth=GrowthConfig(name=name, lengths=lengths),
        schedule=ScheduleConfig(total_steps=90),
    )
    run = SimpleNamespace(config=config, model=model)
    if name in ("none", "lengths"):
        layers = model.config.num_hidden_layers
        assert _growth(run).stages[-1].layers == layers
        cut_layers(model, layers)
        assert model.config.num_hidden_layers == layers
    else:
        with pytest.raises(ConfigError, match=f"growth.name: expected none or lengths .*{name}"):
            _growth(run)
