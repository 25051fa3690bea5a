"""Runs in fp16: scaled losses, unscaled bounds, overflows, and resuming with the scale."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn import BertConfig, BertForPreTraining
from bert_unpad.pretrain import main
from bert_unpad.pretrain.config import ConfigError, LossScaleConfig, read_config
from bert_unpad.pretrain.gradients.loss_scale import LossScale
from tests.support.pretrain_runs import go_back, log_lines, losses, make_folder, run_in_turn
from tests.support.seeds import derived

pytestmark = pytest.mark.slow

STEPS = 12
BASE = ["--schedule.epochs", "null", "--schedule.total_steps", str(STEPS), "--optimizer.lr", "3e-3"]
BASE += ["--schedule.warmup_share", "0", "--checkpoint.every", "5", "--checkpoint.keep_last", "9"]
BASE += ["--logging.progress", "none", "--logging.examples", "false", "--clip.max_norm", "1.4"]
BASE += ["--loss_scale.initial", "1024", "--loss_scale.growth_interval", "4"]
FP16 = ["--precision", "fp16"]
BUCKET = ["--clip.mode", "bucket", "--clip.policy", "adaptive", "--comm.bucket_mb", "0.01"]
POWER = ["--clip.mode", "after", "--comm.hook", "power_sgd", "--comm.start", "2"]
OVERFLOW = ["--loss_scale.initial", str(2.0**22)]  # too much for this model, some 2^19 is not
RUNS = {
    "fp32": BUCKET,
    "bucket": [*BUCKET, *FP16],
    "before": ["--clip.mode", "before", *FP16],
    "after": ["--clip.mode", "after", *FP16],
    "bf16 wire": ["--clip.mode", "none", "--clip.wire_dtype", "bf16", *FP16],
    "power": [*POWER, *FP16],
    "power fp32": POWER,
    "overflow": [*BUCKET, *FP16, *OVERFLOW, "--batching.accumulation", "2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("fp16")
    make_folder(path)
    run_in_turn(path, 2, RUNS, BASE)
    return path


@pytest.mark.parametrize("name", ["bucket", "before", "after", "bf16 wire", "power"])
def test_norms_bounds_and_losses_are_those_of_fp32(folder, name):
    plain = log_lines(folder / ("power fp32" if name == "power" else "fp32"))
    scaled = log_lines(folder / name)
    for a, b in zip(plain, scaled, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=0.02), b["step"]
        assert b["skipped_steps"] == 0
    if name in ("bucket", "before", "power"):
        # None of these knows a scale of 1024 in its gradient, nor in its bound.
        factor = scaled[0]["gradient_norm"] / plain[0]["gradient_norm"]
        assert factor == pytest.approx(1, rel=0.01)
    if name == "bucket":
        shares = [[line["clipped_share"] for line in run] for run in (plain, scaled)]
        assert sum(shares[1]) / STEPS == pytest.approx(sum(shares[0]) / STEPS, abs=0.05)
        assert 0 < sum(shares[0]) / STEPS < 1
    assert [line["loss_scale"] for line in scaled] == [1024.0] * 3 + [2048.0] * 4 + [4096.0] * 4 + [
        8192.0
    ]
    assert {line["loss_scale"] for line in plain} == {None}


def test_updates_that_overflow_are_left_out_and_counted(folder):
    lines = log_lines(folder / "overflow")
    skipped = [line["skipped_steps"] for line in lines]
    assert skipped[:2] == [1, 1]
    assert sum(skipped) < STEPS / 2
    scale, good = 2.0**22, 0
    for line in lines:
        good = 0 if line["skipped_steps"] else good + 1
        scale *= 0.5 if line["skipped_steps"] else 2.0 if good == 4 else 1.0
        good %= 4
        assert line["loss_scale"] == scale
    assert lines[-1]["loss"] < lines[0]["loss"]
    summary = json.loads((folder / "overflow" / "summary.json").read_text())
    assert summary["skipped_steps"] == sum(skipped)


def test_a_resumed_run_goes_on_with_its_scale(folder):
    go_back(folder, "overflow", 5, "resumed")  # between two moves of the scale
    run_in_turn(folder, 2, {"resumed": RUNS["overflow"]}, BASE)
    assert losses(folder / "resumed") == losses(folder / "overflow")
    whole, resumed = (log_lines(folder / name) for name in ("overflow", "resumed"))
    scales = [line["loss_scale"] for line in whole]
    assert [line["loss_scale"] for line in resumed] == scales
    assert len(set(scales[5:])) > 1


def test_a_run_without_a_finite_gradient_ends(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    command = ["--config", str(folder / "run.yaml"), *BASE, *FP16, "--loss_scale.initial", "1e38"]
    message = "the gradients of the last 20 steps were not finite, up to step 20"
    with pytest.raises(FloatingPointError, match=message):
        main([*command, "--schedule.total_steps", "22", "--run_dir", str(folder / "without")])


def test_the_scale_moves_as_that_of_grad_scaler():
    ours = LossScale(LossScaleConfig(initial=2.0**10, growth_interval=3), torch.device("cpu"))
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    draw = torch.Generator().manual_seed(derived(0))
    for step in range(40):
        finite = bool(torch.rand((), generator=draw) < 0.8)
        theirs.scale(weight.sum() * (1.0 if finite else torch.inf)).backward()
        weight_grad = weight.grad.clone()
        theirs.unscale_(optimizer)
        theirs_grad, weight.grad = weight.grad, weight_grad
        ours.unscale_([weight])
        torch.testing.assert_close(weight.grad, theirs_grad, rtol=0, atol=0, equal_nan=True)
        theirs.update()
        ours.update(torch.tensor(finite))
        optimizer.zero_grad()
        assert float(ours.value) == theirs.get_scale(), step
        if step == 20:  # from here on with what a checkpoint keeps
            state = json.loads(json.dumps(ours.state_dict()))
            ours = LossScale(LossScaleConfig(growth_interval=3), torch.device("cpu"))
            ours.load_state_dict(state)


def test_fp16_is_fp16_on_a_cpu():
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    torch.manual_seed(derived(0))
    model = BertForPreTraining(config)
    seen = []
    for layer in model.bert.encoder.layer:
        layer.register_forward_hook(lambda _, given, out: seen.append(out.dtype))
    batch = VarlenBatch.from_lengths([5, 3])
    ids = torch.arange(8)
    inputs = PackedInputs.build(
        batch=batch, input_ids=ids, masked_positions=ids[::3], masked_labels=ids[::3]
    )
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = model(inputs)
    outputs.mlm_loss_sum.backward()
    assert seen == [torch.float16]
    assert outputs.mlm_loss_sum.dtype == torch.float32
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("initial", "0", "expected a number > 0"),
        ("initial", "1e300", "expected a number > 0 that fits in float32"),
        ("growth_interval", "0", "expected a number >= 1"),
    ],
)
def test_bad_settings_are_named(key, value, message):
    needed = ["--batching.global_batch_size", "8", "--schedule.total_steps", "3"]
    with pytest.raises(ConfigError, match=f"loss_scale.{key}: {message}"):
        read_config([*needed, f"--loss_scale.{key}", value])
