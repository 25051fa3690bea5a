"""The benchmark of training steps: contenders compute the same, and its GPU side as far as a CPU
can run it."""

import importlib.util
import json

import pytest
import torch

from tests.support.tolerances import assert_same_values

pytest.importorskip("transformers")

from benchmarks.lib import device, model_gpu, model_plot, model_steps
from benchmarks.lib.model_contenders import CONTENDERS, OURS, REFERENCE, Setup
from benchmarks.lib.peers import PaddedInputs, Peers, by_flash, by_sequence, unpadded_layer
from benchmarks.lib.step_device import Host
from bert_unpad.nn import BertForPreTraining, PreTrainingOutput
from bert_unpad.nn.weights import load_state_dict


@pytest.fixture(autouse=True)
def _small(monkeypatch) -> None:
    monkeypatch.setattr(model_steps, "VOCAB", 1101)
    for name in ("WARMUP", "TURN", "PROFILED"):
        monkeypatch.setattr(model_gpu, name, 1)


def make_inputs(sequences: int = 5, max_length: int = 24):
    return model_steps.make_inputs(sequences, max_length, 3, 1101, even=True)


def script():
    return importlib.import_module("benchmarks.model")


def test_all_ways_give_the_same_loss() -> None:
    inputs = make_inputs()
    padded = PaddedInputs.build(inputs)
    stock = model_steps.hugging_face("tiny", dropout=0.0)
    ours = BertForPreTraining(model_steps.config("tiny", 0.0)).train()
    load_state_dict(ours, stock.state_dict())
    peers = Peers(stock)
    expected = peers.padded(padded)
    for loss in (
        model_steps.our_loss(ours)(inputs),
        peers.labels(padded),
        peers.unpadded(inputs, by_sequence),
    ):
        assert_same_values(loss, expected)


def test_even_masks_take_their_share_of_each_sequence() -> None:
    inputs = make_inputs(40, 64)
    masked = torch.zeros(inputs.batch.total).index_fill(0, inputs.masked_positions, 1)
    for part, length in zip(
        masked.split(inputs.batch.lengths.tolist()), inputs.batch.lengths.tolist(), strict=True
    ):
        assert part[0] == 0
        assert part.sum() == min(max(1, round(0.15 * length)), length - 1)


def test_flash_attention_has_a_backward_pass_and_compiles_once() -> None:
    """On the meta device, which has PyTorch's shapes and derivatives but computes nothing."""
    inputs = make_inputs()
    with torch.device("meta"):
        layer = model_steps.hugging_face("tiny", dropout=0.1).bert.encoder.layer[0]
    parameters = list(layer.parameters())
    hidden = torch.empty(inputs.batch.total, 64, device="meta")

    def forward(inputs):
        return unpadded_layer(layer, hidden, inputs.batch, by_flash).sum()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(forward, backend="aot_eager")
    for function in (forward, compiled, compiled, compiled):
        gradients = torch.autograd.grad(function(inputs.to("meta")), parameters)
        assert [g.shape for g in gradients] == [p.shape for p in parameters]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Uncaptured:
    """As `GraphRunner`, without graphs."""

    def __init__(self, model, autocast) -> None:
        self.model, self.autocast = model, autocast
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        self.gradients = [p.grad for p in model.parameters()]

    def __call__(self, inputs, scale, first=False) -> PreTrainingOutput:
        if first:
            torch._foreach_zero_(self.gradients)
        assert all(
            p.grad is g for p, g in zip(self.model.parameters(), self.gradients, strict=True)
        )
        assert inputs.batch.total % 128 == 0
        with self.autocast:
            out = self.model(inputs)
        (out.mlm_loss_sum * scale[0] + out.nsp_loss_sum * scale[1]).backward()
        return out


def test_a_rehearsal_gives_a_whole_report(monkeypatch, tmp_path, capsys) -> None:
    pytest.importorskip("jsonargparse", reason="the trainer needs the extra `pretrain`")
    from bert_unpad.pretrain.gradients import cuda_graphs as graphs

    monkeypatch.setattr(graphs, "GraphRunner", Uncaptured)
    written = []
    setup = Setup("tiny", 0.1, 24, make_inputs(), torch.device("cpu"))
    run = model_gpu.Run(Host(), setup, 2, lambda r: written.append(json.dumps(r)))
    names = ["bert_unpad, bfloat16", "hf unpadded, flash", "hf padded"]
    report = run.measure(names, start_within=float("inf"))
    run.end()
    assert json.loads(written[-1]) == report
    # After each contender, so that what is measured is not lost.
    assert [len(json.loads(text)["results"]) for text in written] == [1, 2, 2, 3, 3]
    rows = {row["contender"]: row for row in report["results"]}
    assert list(rows) == [REFERENCE, "bert_unpad, bfloat16", "hf padded"]
    assert report["not_run"].keys() == {"hf unpadded, flash"}
    assert "NotImplementedError" in report["not_run"]["hf unpadded, flash"]
    for row in rows.values():
        assert len(row["rounds"]) == 2
        assert row["sequences_per_second"] == pytest.approx(5 / row["seconds"])
        assert row["share_of_matmul_peak"] == pytest.approx(
            report["flops"] / row["seconds"] / report["matmul_peak"]["bfloat16"]
        )
        assert row["peak_bytes"] == row["state_bytes"] + row["step_bytes"]
        assert row["state_bytes"] > 3 * 4 * 1101 * 64  # weights and two moments
        assert row["kernels"]["busy_ms"] > 0
    assert report["faster_than"][REFERENCE]["hf padded"] == pytest.approx(
        rows["hf padded"]["seconds"] / rows["hf padded"]["reference_seconds"]
    )
    model_gpu.show_table(report)
    assert "is faster than: hf padded" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    model_plot.draw(tmp_path / "model.png", report)
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")


def test_one_that_fails_does_not_keep_others_from_running(monkeypatch) -> None:
    def broken(setup: Setup):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setitem(CONTENDERS, REFERENCE, broken)
    setup = Setup("tiny", 0.1, 24, make_inputs(2), torch.device("cpu"))
    run = model_gpu.Run(Host(), setup, 1, lambda report: None)
    report = run.measure(["bert_unpad, fp8"], start_within=float("inf"))
    assert report["not_run"] == {
        REFERENCE: "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    }
    (row,) = report["results"]
    assert row["dtype"] == "float8"
    assert row["reference_seconds"] is None
    assert report["faster_than"] == {}
    report = run.measure(["hf padded"], start_within=-1)
    assert "--start-within" in report["not_run"]["hf padded"]


def test_peaks_by_name() -> None:
    peak = device.data_sheet_peak
    assert peak("NVIDIA H100 80GB HBM3") == peak("NVIDIA H200") == 989.4e12
    assert peak("NVIDIA A100-SXM4-80GB") == peak("NVIDIA A100 80GB PCIe") == 312e12
    assert peak("NVIDIA H100 PCIe") == 756e12
    assert peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None


def test_arguments_follow_the_device(capsys) -> None:
    arguments = script().arguments
    args = arguments(["--device", "cuda"])
    assert (args.size, args.sequences, args.max_length) == ("large", 48, 512)
    args = arguments([])
    assert (args.size, args.sequences, args.rounds, args.warmup) == ("base", 8, 3, 1)
    for given in (["--device", "cuda", "--keep-times"], ["--rehearse"]):
        with pytest.raises(SystemExit):
            arguments(given)
        assert "does not go with --device" in capsys.readouterr().err
    assert OURS[0] == REFERENCE
