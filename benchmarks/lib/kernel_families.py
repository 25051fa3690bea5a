"""What a GPU kernel is for, by its name: ours, PyTorch's, cuBLAS's, cuDNN's, and those of Triton.

Kernels that do two things count where the dearer one does: dropout + residual + LayerNorm as layer
norm, embedding + LayerNorm as embedding. PyTorch's embedding is a gather of rows, so other gathers
and scatters of rows count there too, and so do the sorts of its backward pass.
"""

from __future__ import annotations

import re

__all__ = ["FAMILIES", "OTHER", "family"]

MATMUL, ATTENTION, NORM, GELU = "matmul", "attention", "layer norm", "gelu"
EMBEDDING, LOSS, OPTIMIZER = "embedding, gathers", "loss", "optimizer"
ELEMENTWISE, COPIES = "elementwise, sums", "copies, casts"
MEMSET, COMMUNICATION, OTHER = "memset", "communication", "other"
FAMILIES = (
    MATMUL, ATTENTION, NORM, GELU, EMBEDDING, LOSS, OPTIMIZER, ELEMENTWISE, COPIES, MEMSET,
    COMMUNICATION, OTHER,
)  # fmt: skip

# The first that is found in the name decides.
_OURS = (
    (ATTENTION, r"attention_"),
    (GELU, r"bias_gelu_|\bglu_"),
    (EMBEDDING, r"embedding_|table_(pieces|rows)_|token_(digits|places|first)_"),
    (NORM, r"layer_norm_"),
    (LOSS, r"masked_cross_entropy_|sum_losses_"),
    (COMMUNICATION, r"sign_\w+_kernel"),
    (
        OPTIMIZER,
        r"(adam|frozen_\w+|\w+_moments|apply_ratios|step|scale|square_sum|chunk_sum|clip_\w+)_kernel",
    ),
    (COPIES, r"fp8_"),  # quantisation
    # gradients of position biases; rotations; what cuBLASLt's epilogues would do
    (ELEMENTWISE, r"column_sum_|rotary_|epilogue_"),
)
# torch.compile names a kernel after the operators that it fuses.
_TRITON = (
    (MATMUL, r"^triton_tem_"),
    (EMBEDDING, r"embedding"),
    (LOSS, r"nll_loss|log_softmax"),
    (NORM, r"layer_norm"),
    (GELU, r"gelu"),
    (ATTENTION, r"flash|scaled_dot|softmax"),
    # nothing but these
    (COPIES, r"^triton_\w*?fused(__?(to_copy|unsafe_view|clone|copy|view|t|cat|slice|select"
             r"|transpose|permute|expand|unsqueeze|squeeze|constant_pad_nd))+(_\d+)?$"),
    (ELEMENTWISE, r""),
)  # fmt: skip
_LIBRARIES = (
    (COMMUNICATION, r"^nccl|gloo::"),
    (MEMSET, r"^Memset|FillFunctor"),
    (COPIES, r"^Memcpy|copy_kernel|CatArray"),
    (ATTENTION, r"flash|fmha|Attention|sdpa|_dot_do_o|convert_dq"),
    (OPTIMIZER, r"multi_tensor_apply|Fused(Adam|Optimizer)"),
    (NORM, r"layer_norm|LayerNorm|GammaBeta|RowwiseMoments|cuCompute"),
    (GELU, r"Gelu"),
    (LOSS, r"nll_loss|SoftMax|softmax_warp"),
    (EMBEDDING, r"[Ee]mbedding|compute_grad_weight|sum_and_scatter|krn_partial|partial_segment"
                r"|num_of_segments|indexSelect|indexFunc|index_elementwise|indexing_backward"
                r"|vectorized_gather|scatter_gather|\bcub::|thrust::"),
    (MATMUL, r"gemm|gemv|nvjet|xmma|cutlass|cublas|splitKreduce|_s16816|mma_"),
    (ELEMENTWISE, r"elementwise_kernel|reduce_kernel|dropout|masked_scale"),
)  # fmt: skip


def family(name: str) -> str:
    """The family, one of `FAMILIES`, of a kernel or copy with this name in a profile."""
    if "bert_unpad::" in name:
        rules = _OURS
    else:
        rules = _TRITON if name.startswith("triton_") else _LIBRARIES
    return next((found for found, pattern in rules if re.search(pattern, name)), OTHER)
