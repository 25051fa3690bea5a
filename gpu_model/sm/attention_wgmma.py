"""The launches of csrc/attention's kernels with wgmma for a batch, as attention.py has them of the
others: what launch_wgmma.h starts on an H100. bf16, head dimension 64 or 128, as many heads of keys
as of queries."""

from __future__ import annotations

from collections.abc import Mapping

from gpu_model.sm.architectures import Architecture
from gpu_model.sm.attention import (
    DISTANCES,
    GRADIENT_TILE,
    STRIP,
    Batch,
    kernel_name,
    launch_of,
    split_stages,
)
from gpu_model.sm.kernel import Kernel, Stage

TILE = 64 * 64 * 2  # bytes of 64 rows of 64 columns
HALVES = ("dq", "keys")  # of the backward pass by two kernels


def backward_name(groups: int, dropout: bool) -> str:
    """The mangled name of the fused backward kernel for bf16, which takes no position bias."""
    return (
        "_ZN10bert_unpad31attention_backward_wgmma_kernelINS_4bf16E"
        f"Li{groups}ELb{int(dropout)}EEEvNS_15AttentionLaunchE"
    )


def forward_groups(max_q: int, window: int) -> int:
    """Warpgroups of a block: wgmma_forward_groups of csrc/attention/choice.h, and one with a
    window."""
    return 2 if max_q > 192 and window < 0 else 1


def backward_groups(longest: int) -> int:
    """wgmma_backward_groups of csrc/attention/choice.h, where queries are the keys."""
    return 2 if longest > 192 else 1


def backward_shared(groups: int, longest: int) -> int:
    """WgmmaBackwardShared::bytes of csrc/attention/backward_wgmma.h."""
    rows = -(-longest // 64) * 64
    sums = rows * 64 * 4 if longest > 64 * groups else 0
    return 4 * TILE + 2 * groups * TILE + 8 * rows + sums


def backward_is_fused(batch: Batch, architecture: Architecture) -> bool:
    """wgmma_backward_is_fused of csrc/attention/choice.h, for head dimension 64; others never."""
    if batch.head_dim != 64:
        return False
    longest, sequences, sms = max(batch.lengths, default=0), len(batch.lengths), architecture.sms
    fits = backward_shared(backward_groups(longest), longest) <= architecture.block_shared
    alike = batch.tokens == sequences * longest
    rounds = -(-sequences * batch.heads // sms) if alike and longest > 256 else 1
    filled = 3 * batch.tokens * batch.heads >= 2 * rounds * sms * longest
    return batch.window < 0 and longest <= 1024 and fits and filled


def forward(available: Mapping[str, Kernel], batch: Batch, dropout_p: float) -> list[Stage]:
    """The launches of a forward pass."""
    found = []
    for run in batch.runs:
        groups = forward_groups(run[2], batch.window)
        flags = (dropout_p > 0, batch.window >= 0)
        name = kernel_name("attention_forward_wgmma_kernel", batch.head_dim, groups, *flags)
        shared = 2 * TILE * batch.head_dim // 64 * (3 if groups == 1 else 4)
        found.append(
            launch_of(available, batch, dropout_p, name, 128 * groups, shared, run, 64 * groups)
        )
    return [Stage("forward", found, batch.tokens * batch.heads * (8 * batch.head_dim + 4))]


def backward(
    available: Mapping[str, Kernel], batch: Batch, dropout_p: float, architecture: Architecture
) -> list[Stage]:
    """The launches of a backward pass."""
    if batch.buckets or not backward_is_fused(batch, architecture):
        return _split_backward(available, batch, dropout_p)
    found = []
    for run in batch.runs:
        groups = backward_groups(run[2])
        name = backward_name(groups, dropout_p > 0)
        shared = backward_shared(groups, run[2])
        found.append(launch_of(available, batch, dropout_p, name, 128 * groups, shared, run, 0))
    return [Stage("backward", found, batch.tokens * batch.heads * (8 * 128 + 4))]


def _split_backward(available: Mapping[str, Kernel], batch: Batch, dropout_p: float) -> list[Stage]:
    queries, keys = [], []
    bias = bool(batch.buckets)
    tiles = 6 * TILE * batch.head_dim // 64 + (4 * GRADIENT_TILE[64] if bias else 0)
    for found, name, shared in (
        (queries, "attention_backward_dq_wgmma_kernel", 4 * STRIP + 5 * DISTANCES if bias else 0),
        (keys, "attention_backward_keys_wgmma_kernel", 2 * 1280),
    ):
        mangled = kernel_name(name, batch.head_dim, dropout_p > 0 or bias, bias=bias)
        found += [
            launch_of(available, batch, dropout_p, mangled, 128, tiles + shared, run, 64)
            for run in batch.runs
        ]
    return split_stages(batch, queries, keys)


def bias_kernel_names(head_dim: int) -> list[str]:
    """Those of a backward pass with a position bias."""
    return [
        kernel_name(f"attention_backward_{half}_wgmma_kernel", head_dim, True, bias=True)
        for half in HALVES
    ]


def kernel_names(head_dim: int = 64) -> list[str]:
    """The mangled names of all kernels that these launches may need."""
    names = []
    for dropout in (False, True):
        for groups, window in ((1, False), (2, False), (1, True)):
            flags = (head_dim, groups, dropout, window)
            names.append(kernel_name("attention_forward_wgmma_kernel", *flags))
        for half in HALVES:
            names.append(kernel_name(f"attention_backward_{half}_wgmma_kernel", head_dim, dropout))
        if head_dim == 64:
            names += [backward_name(groups, dropout) for groups in (1, 2)]
    return names
