"""Kernels by family: their names, ours from the sources and the compiled module, and profiles."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.lib.kernel_families import FAMILIES, OTHER, family
from benchmarks.lib.kernel_profile import Kernel, busy, kernels_of, record, summarise
from tests.support.paths import ROOT

NATIVE = "void at::native::"
EVENTS = "TensorIteratorBase&)::{lambda()#1}::operator()() const::{lambda(float)#1}"


def our_kernels() -> set[str]:
    """Names of all kernels in csrc, and of those in the module that was built from it."""
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cu", ".h")]
    names = {n for p in sources for n in re.findall(r"(\w+)\(BU_PARAMS", p.read_text())}
    assert len(names) > 25
    for module in (ROOT / "bert_unpad").glob("_C_cuda*.so"):
        # Mangled: the length of the name, then the name.
        mangled = re.findall(rb"_ZN10bert_unpad[A-Za-z0-9_]*?_kernel[IE]", module.read_bytes())
        names |= {re.split(r"\d+(?=[a-z])", m.decode()[:-1])[-1] for m in mangled}
    return names


def test_every_kernel_of_ours_has_a_family() -> None:
    found = {
        n: family(f"void bert_unpad::cuda::(anonymous namespace)::{n}<1>(P)") for n in our_kernels()
    }
    assert not [name for name, kind in found.items() if kind == OTHER]
    expected = {
        "attention_fp32_backward_dq_kernel": "attention",
        "attention_forward_kernel": "attention",
        "layer_norm_backward_kernel": "layer norm",
        "bias_gelu_kernel": "gelu",
        "embedding_backward_kernel": "embedding, gathers",
        "token_places_kernel": "embedding, gathers",
        "masked_cross_entropy_backward_kernel": "loss",
        "adam_kernel": "optimizer",
        "apply_ratios_kernel": "optimizer",
        "stable_adamw_moments_kernel": "optimizer",
        "frozen_adam_kernel": "optimizer",
        "frozen_lamb_sums_kernel": "optimizer",
        "sign_square_sum_kernel": "communication",
        "sign_pack_kernel": "communication",
        "clip_scale_kernel": "optimizer",
        "fp8_quantize_kernel": "copies, casts",
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute"
         "_segment_k_off_kernel__5x_cublas", "matmul"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_"
         "align8>(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8::Params)",
         "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, float, float>", "matmul"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float, float, 128, 16>", "matmul"),
        ("triton_tem_fused_addmm_5", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4, false, "
         "false, cutlass::bfloat16_t>, true>(pytorch_flash::Flash_fwd_params)", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits"
         "<64, 128, 128, 8, 4, 4, 4>>(pytorch_flash::Flash_bwd_params)", "attention"),
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<X>(pytorch_flash::P)", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_dropout_sm80(PyTorchMemEffAttention::"
         "AttentionBackwardKernel<cutlass::arch::Sm80, cutlass::bfloat16_t>::Params)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_0_64x128x64_4x1x1",
         "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>(X)", "attention"),
        (f"{NATIVE}(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>",
         "layer norm"),
        (f"{NATIVE}(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<float>(X)",
         "layer norm"),
        (f"{NATIVE}(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 64u>",
         "layer norm"),
        ("triton_per_fused__to_copy_add_native_dropout_native_layer_norm_view_4", "layer norm"),
        ("triton_red_fused_native_layer_norm_backward_sum_12", "layer norm"),
        (f"{NATIVE}vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::{EVENTS}",
         "gelu"),
        ("triton_poi_fused__to_copy_gelu_gelu_backward_7", "gelu"),
        (f"{NATIVE}(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int>(X)",
         "embedding, gathers"),
        (f"{NATIVE}vectorized_gather_kernel<16, long>(char*, char*, long*)", "embedding, gathers"),
        (f"{NATIVE}(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>",
         "embedding, gathers"),
        (f"{NATIVE}(anonymous namespace)::sum_and_scatter<float, long, false>(long const*)",
         "embedding, gathers"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy, false, long, long>",
         "embedding, gathers"),
        ("triton_poi_fused_embedding_dense_backward_20", "embedding, gathers"),
        ("triton_per_fused_add_embedding_native_dropout_native_layer_norm_0", "embedding, gathers"),
        (f"{NATIVE}(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::"
         "(anonymous namespace)::LogSoftMaxForwardEpilogue>(float*, float const*, int)", "loss"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 1, true, false>",
         "loss"),
        (f"{NATIVE}(anonymous namespace)::nll_loss_backward_reduce_cuda_kernel_2d<float, long>",
         "loss"),
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_3", "loss"),
        (f"{NATIVE}(anonymous namespace)::multi_tensor_apply_for_fused_optimizer<512, at::native::"
         "FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>", "optimizer"),
        (f"{NATIVE}(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1>",
         "elementwise, sums"),
        (f"{NATIVE}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, X>(int)",
         "elementwise, sums"),
        (f"{NATIVE}reduce_kernel<512, 1, at::native::ReduceOp<float, sum_functor<float>>>(X)",
         "elementwise, sums"),
        ("triton_poi_fused_add_native_dropout_native_dropout_backward_3", "elementwise, sums"),
        (f"{NATIVE}unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::{EVENTS}",
         "copies, casts"),
        (f"{NATIVE}vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::"
         f"{EVENTS}", "copies, casts"),
        ("triton_poi_fused__to_copy_t_view_1", "copies, casts"),
        ("Memcpy HtoD (Pinned -> Device)", "copies, casts"),
        ("Memset (Device)", "memset"),
        (f"{NATIVE}vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, X>", "memset"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "communication"),
        ("void somebody::unheard_of<3>(int)", "other"),
    ],
)  # fmt: skip
def test_names_of_others(name: str, expected: str) -> None:
    assert family(name) == expected


def event(name: str, start: float, end: float, device=DeviceType.CUDA, note=False, children=()):
    """As the profiler has it, in microseconds."""
    times = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(
        name=name, time_range=times, device_type=device, is_user_annotation=note,
        cpu_children=children,
    )  # fmt: skip


def test_a_gpu_profile_adds_up() -> None:
    recorded = [
        event("Optimizer.step#AdamW.step", 0, 90, note=True),
        event("cudaLaunchKernel", 0, 5, DeviceType.CPU),
        event("Stream Wait Event", 0, 80),
        event("nvjet_hsh_128x128", 10, 40),
        event("void bert_unpad::attention_forward_kernel<1>(P)", 30, 50),  # beside it
        event("void bert_unpad::attention_forward_kernel<1>(P)", 32, 36),  # within both
        event("Memset (Device)", 60, 70),
        event("mystery", 70, 72),
    ]
    kernels = kernels_of(recorded, on_gpu=True)
    assert [k.name[:6] for k in kernels] == ["nvjet_", "void b", "void b", "Memset", "myster"]
    assert busy(kernels) == pytest.approx(52e-6)
    found = summarise(kernels, steps=2, step_seconds=40e-6)
    assert found["families"].keys() == {"matmul", "attention", "memset", "other"}
    assert found["families"]["attention"] == pytest.approx(
        {"ms": 0.012, "share": 24 / 66, "launches": 1.0}
    )
    assert sum(f["share"] for f in found["families"].values()) == pytest.approx(1)
    assert found["kernel_ms"] == pytest.approx(0.033)
    assert found["busy_ms"] == pytest.approx(0.026)
    assert found["idle_ms"] == pytest.approx(0.014)
    assert found["idle_share"] == pytest.approx(0.35)
    assert found["longest_of_no_family"] == pytest.approx({"mystery": 0.001})
    assert list(found["families"]) == [f for f in FAMILIES if f in found["families"]]


def test_kernels_may_be_longer_than_the_step_without_the_profiler() -> None:
    assert summarise([Kernel("Memset", 0.0, 2.0)], 1, 1.0)["idle_ms"] == 0
    with pytest.raises(ValueError, match="no kernels"):
        summarise([], 1, 1.0)


def test_a_profile_of_a_cpu_has_its_operators() -> None:
    x = torch.randn(16, 16)
    kernels = record(lambda: x.relu(), 3, torch.device("cpu"))
    assert len([k for k in kernels if k.name == "aten::clamp_min"]) == 3
    assert not [k for k in kernels if k.name == "aten::relu"]  # it calls the other
    assert 0 < busy(kernels) <= sum(k.end - k.start for k in kernels) + 1e-9
