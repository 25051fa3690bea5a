"""The GPU benchmark of attention, as far as it runs without a GPU.

A rehearsal on the CPU runs everything but the clock and the peers that need a GPU; those are called
on the meta device, which checks their arguments against PyTorch's schemas and shapes.
"""

import json

import pytest
import torch

from benchmarks.lib import attention, device, timers
from benchmarks.lib.attention_cases import AttentionCase, attention_cases
from benchmarks.lib.attention_peers import CONTENDERS, Inputs, errors

CASE = AttentionCase("small", (7, 33, 1, 64), 0.1, heads=2)


def test_cases_count_what_their_formulas_say() -> None:
    cases = attention_cases(48, seed=1)
    assert len(cases) == 8
    (even,) = [c for c in cases if c.lengths == (512,) * 48 and c.dropout_p == 0.1]
    hidden = 16 * 64
    assert even.flops("forward") == 4 * 48 * 512**2 * hidden
    assert even.flops("backward") == 10 * 48 * 512**2 * hidden
    rows = 48 * 512
    assert even.bytes("forward") == rows * (4 * hidden * 2 + 16 * 4)
    assert even.bytes("backward") == rows * (8 * hidden * 2 + 16 * 4)
    assert even.padded_share == 1.0
    assert even.floor("forward", 1e12, 1e30) == even.flops("forward") / 1e12
    assert even.floor("forward", 1e30, 1e12) == even.bytes("forward") / 1e12
    assert even.floor("both", 1e30, 1e12) == pytest.approx(12 * rows * hidden * 2e-12, rel=0.01)


def test_a_rehearsal_gives_a_whole_report(capsys) -> None:
    report = attention.run("cpu", batch_size=3, rounds=2, seed=1)
    assert json.loads(json.dumps(report)) == report
    assert len(report["results"]) == 8
    for row in report["results"]:
        assert {"list", "groups"} <= row["errors"].keys()
        assert max(row["errors"]["list"].values()) < attention.LARGEST_ERROR
        assert row["not_run"].keys() | row["errors"].keys() == CONTENDERS.keys()
        assert all(row["not_run"].values())
        for which in ("forward", "backward", "both"):
            for result in row["passes"][which]["contenders"].values():
                assert result["ms"] > 0
    assert "groups" in capsys.readouterr().out


def test_without_dropout_the_padded_peer_is_right_on_the_cpu() -> None:
    contenders, _, missing = attention.enter(
        Inputs.random(CASE, "cpu"), 0.0, skip=["cudnn, padded"]
    )
    assert "flash, padded" in contenders
    assert missing["cudnn, padded"] == "left out by --skip"


def test_a_wrong_contender_is_found(monkeypatch) -> None:
    class Wrong(type(CONTENDERS["list"](Inputs.random(CASE, "cpu"), 0.0))):
        def backward(self, saved):
            dq, dk, dv = super().backward(saved)
            return dq, dv, dk

    monkeypatch.setitem(CONTENDERS, "flash, packed", lambda inputs, p: Wrong(inputs, p, "list"))
    inputs = Inputs.random(CASE, "cpu")
    assert errors(CONTENDERS["flash, packed"](inputs, 0.0))["dk"] > 0.5
    contenders, _, missing = attention.enter(inputs, 0.0, skip=())
    assert "flash, packed" not in contenders
    assert "wrong result" in missing["flash, packed"]


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("name", ["flash, packed", "varlen_attn"])
def test_peers_take_the_arguments_they_are_given(name: str, p: float) -> None:
    inputs = Inputs.random(CASE, "meta")
    if name == "varlen_attn" and p:
        with pytest.raises(Exception, match="no dropout"):
            CONTENDERS[name](inputs, p)
        return
    contender = CONTENDERS[name](inputs, p)
    saved = contender.forward()
    assert saved[0].shape == inputs.dout.shape
    assert [x.shape for x in contender.backward(saved)] == [inputs.dout.shape] * 3


def test_cudnn_has_the_arguments_that_its_contender_gives() -> None:
    def names(op) -> list[str]:
        return [a.name for a in op.default._schema.arguments if not a.kwarg_only]

    lengths = ["cum_seq_q", "cum_seq_k", "max_q", "max_k"]
    qkv, options = ["query", "key", "value"], ["dropout_p", "is_causal"]
    assert names(torch.ops.aten._cudnn_attention_forward) == [
        *qkv, "attn_bias", *lengths, "compute_log_sumexp", *options, "return_debug_mask"
    ]  # fmt: skip
    assert names(torch.ops.aten._cudnn_attention_backward) == [
        "grad_out", *qkv, "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias", *lengths,
        *options,
    ]  # fmt: skip
    returns = [r.name for r in torch.ops.aten._cudnn_attention_forward.default._schema.returns]
    assert returns[:2] == ["output", "logsumexp"]
    assert returns[-3:] == ["philox_seed", "philox_offset", "debug_attn_mask"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_timed() -> None:
    with pytest.raises(SystemExit, match="sees no GPU"):
        timers.CudaTimer()


def test_folder_of_a_gpu() -> None:
    assert device.folder("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
