"""python -m bert_unpad.info --check: that it runs every operator, and notices broken ones."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bert_unpad import _library, info, ops, self_test
from bert_unpad.ops import matmul
from bert_unpad.self_test.compare import CASES

# Called on a GPU only; on a CPU their Python functions take PyTorch's products.
NOT_OPERATORS = {
    "PositionBias",
    "accumulate_in_place",
    "alibi_bias",
    "alibi_slopes",
    "deberta_buckets",
    "t5_buckets",
    "time_algorithms",
}
GPU_ONLY = {"linear", "linear_dgrad", "linear_wgrad", "linear_wgrad_"}
# Only where they are the fastest.
OF_SOME_CPUS = set() if matmul._PACKED_DTYPES else {"packed_wgrad_"}
OF_SOME_CPUS |= set() if matmul._AVX512_UNUSED else {"packed_product_"}
SEED = 7


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "bert_unpad":
            self.names.add(function._schema.name.removeprefix("bert_unpad::"))
        return function(*args, **(kwargs or {}))


def test_every_operator_is_run_and_right(capsys):
    with Calls() as calls:
        assert self_test.run(["cpu"], SEED) == []
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"cpu: largest error against float64, inputs from seed {SEED}"
    assert [line.split()[0] for line in lines[1:-1]] == list(CASES)
    assert all("fp32 " in line and "bf16 " in line and "fp16 " in line for line in lines[1:-1])
    compiled = {name for name in info.collect()["operators"] if not name.startswith("hf_")}
    assert calls.names == compiled - GPU_ONLY - OF_SOME_CPUS
    documented = set(ops.__all__) - NOT_OPERATORS
    of_encoders = {
        *("encoder_layers", "encoder_layers_bf16", "encoder_layers_int8", "encoder_model")
    }
    assert set(CASES) == documented | of_encoders | {"lamb_halves", "stable_adamw_halves"}


def wrong(original):
    return lambda *args, **kwargs: original(*args, **kwargs) * 1.1


def not_finite(original):
    return lambda *args, **kwargs: original(*args, **kwargs) * float("nan")


def raising(original):
    def function(*args, **kwargs):
        raise RuntimeError("no kernel image is available\nand more")

    return function


def another_mask_each_time(original):
    return lambda *args, rng=None, **kwargs: original(
        *args, **kwargs, rng=None if rng is None else torch.randint(2**62, (2,))
    )


def gradient_wrong(original):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy * 1.1

    return lambda x, *args, **kwargs: original(Wrong.apply(x), *args, **kwargs)


def nothing(original):
    return lambda *args, **kwargs: None


@pytest.mark.parametrize(
    ("operator", "broken", "said"),
    [
        ("bias_gelu", wrong, "fp32: result: error 0.1, at most 1e-05 expected"),
        ("bias_gelu", not_finite, "fp32: result: error nan"),
        ("bias_gelu", gradient_wrong, "fp32: gradient of x: error 0.1"),
        ("varlen_attention", gradient_wrong, "fp32: gradient of qkv"),
        ("varlen_attention", another_mask_each_time, "fp32: result"),
        ("dropout_add_layer_norm", another_mask_each_time, "fp32: result"),
        ("embedding_layer_norm", another_mask_each_time, "fp32: result"),
        ("mlp", raising, "fp32: no kernel image is available"),
        ("adam_", nothing, "fp32: weights: error"),
        ("clip_bucket_", wrong, "fp32: norm: error 0.1"),
        ("multi_tensor_scale_", nothing, "fp32: result: error"),
    ],
)
def test_a_broken_operator_fails_the_check(operator, broken, said, monkeypatch, capsys):
    monkeypatch.setattr(self_test, "CASES", {operator: CASES[operator]})
    monkeypatch.setattr(ops, operator, broken(getattr(ops, operator)))
    assert info.main(["--check", "cpu"]) == 1
    out = capsys.readouterr().out
    assert f"  {operator:<26}FAILED  {said}" in out
    assert out.splitlines()[-1].startswith(f"check failed: cpu: {operator}: {said}")
    assert "more" not in out


def test_a_16_bit_operator_that_is_wrong_in_its_own_precision_fails(monkeypatch):
    original = ops.bias_gelu

    def rounded(x, *args, **kwargs):
        out = original(x, *args, **kwargs)
        return out if x.dtype != torch.float16 else out.bfloat16().half() * 1.01

    monkeypatch.setattr(self_test, "CASES", {"bias_gelu": CASES["bias_gelu"]})
    monkeypatch.setattr(ops, "bias_gelu", rounded)
    (problem,) = self_test.run(["cpu"], SEED)
    assert problem.startswith("cpu: bias_gelu: fp16: result: error")


def test_bf16_is_not_checked_on_a_gpu_that_does_not_multiply_it(monkeypatch):
    cuda = torch.device("cuda", 0)
    for capability, checked in (((7, 5), False), ((8, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert ("bf16" in self_test._dtypes(cuda)) is checked
        assert {"fp32", "fp16"} <= set(self_test._dtypes(cuda))
    assert "bf16" in self_test._dtypes(torch.device("cpu"))


def test_a_gpu_that_cannot_be_used_fails_the_check(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert self_test.run(["cuda"]) == ["cuda: PyTorch sees no GPU"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(_library, "cuda_missing", "not built")
    monkeypatch.setattr(self_test, "CASES", {})
    assert self_test.run() == ["cuda: not built"]  # the CPU has been checked before
    assert capsys.readouterr().out.splitlines()[-1] == "check failed: cuda: not built"


def test_a_card_without_8_bit_products_skips_them(monkeypatch, capsys):
    from bert_unpad.self_test.compare import Skip

    def case(inputs):
        raise Skip("needs more")
        yield

    monkeypatch.setattr(self_test, "CASES", {"fp8_linear": case})
    assert self_test.run(["cpu"], SEED) == []
    assert "skipped: needs more" in capsys.readouterr().out


def test_the_command_exits_with_its_result():
    command = [sys.executable, "-m", "bert_unpad.info", "--check", "tpu"]
    out = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent
    )
    assert out.returncode == 2
    assert "invalid choice: 'tpu'" in out.stderr
