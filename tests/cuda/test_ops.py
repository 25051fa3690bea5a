"""CUDA operators are registered wherever they are built."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import bert_unpad

built = pytest.mark.skipif(find_spec("bert_unpad._C_cuda") is None, reason="built without nvcc")


@built
def test_kernels_are_built_and_registered():
    """In its own process: elsewhere the CUDA module is loaded under a CUDA PyTorch only."""
    code = """
import torch, bert_unpad
from bert_unpad import _C_cuda
print(_C_cuda.archs(), _C_cuda.cuda_version())
names = [
    "bias_gelu", "varlen_attention", "varlen_cross_attention", "masked_cross_entropy",
    "dropout_add_layer_norm", "embedding_layer_norm", "glu",
]
for op in [f"{name}{part}" for name in names for part in ("", "_backward")] + [
    "masked_cross_entropy_backward_", "linear", "linear_dgrad", "linear_wgrad", "linear_wgrad_",
    "bias_gelu_fp8", "bias_gelu_fp8_backward", "quantize_fp8", "quantize_weights_fp8_",
    "quantize_fp8_scaled", "fp8_product", "fp8_product_", "rotary", "rotary_",
    "dropout_add_norm_sum_backward", "dropout_add_layer_norm_fp8", "clip_bucket_",
    "clip_bucket_into", "sign_scale", "sign_pack_", "sign_mean_", "sign_unpack_", "frozen_adam_",
    "frozen_lamb_sums_",
]:
    print(torch._C._dispatch_has_kernel_for_dispatch_key(f"bert_unpad::{op}", "CUDA"))
"""
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    module, *kernels = out.stdout.splitlines()
    assert re.fullmatch(r"\d+\.\d+[af]?(\+PTX)?(,\d+\.\d+[af]?(\+PTX)?)* \d+\.\d+", module)
    assert kernels == ["True"] * 38


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of PyTorch")
@built
def test_import_loads_the_cuda_module():
    assert bert_unpad._library.cuda_missing is None
