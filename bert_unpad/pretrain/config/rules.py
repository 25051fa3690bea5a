"""The rules between options: which of them exclude or need each other.

What a run needs beyond its options (the data, the number of ranks, the device) is checked where
that is known.
"""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

from bert_unpad._choices import COMMUNICATING, ONE_BIT, OptimizerName
from bert_unpad.data.streams.text_stream import is_streamed
from bert_unpad.pretrain.config.errors import ConfigError
from bert_unpad.pretrain.config.growth import GrowthConfig
from bert_unpad.pretrain.config.mlperf import check_mlperf
from bert_unpad.pretrain.config.update import ClipConfig

if TYPE_CHECKING:
    from bert_unpad.pretrain.config.run import PretrainConfig

__all__ = ["check_rules"]

_FP16_MAX = 65504
# The options that each kind of growth reads.
_GROWTH_OPTIONS = {
    "none": set(),
    "mslt": {"layers", "shares", "joint_share", "learning_rate"},
    "stacking": {"layers", "shares", "learning_rate"},
    "layer_drop": set(),
    "lengths": {"lengths", "shares", "learning_rate"},
}
# The options that each shape of the learning rate reads besides the warm-up.
_SHAPE_OPTIONS = {
    "polynomial": {"power", "end_lr_share", "decay_from"},
    "linear": {"end_lr_share", "decay_from"},
    "cosine": {"end_lr_share", "decay_from"},
    "constant": set(),
    "inverse_sqrt": set(),
    "wsd": {"decay_share", "end_lr_share"},
}


def check_rules(config: PretrainConfig) -> None:
    """Checks all rules between options.

    Raises:
        ConfigError: options contradict each other, or one is missing.
    """
    _check_pairs(config)
    _check_optimizer(config.optimizer.name)
    _check_read(
        *("schedule", config.schedule, {"power", "decay_share", "end_lr_share", "decay_from"}),
        _SHAPE_OPTIONS[config.schedule.name],
    )
    _check_batch_warmup(config)
    _check_rank_speeds(config)
    _check_clip(config.clip)
    _check_comm(config)
    _check_shard(config)
    _check_growth(config.growth)
    _check_growth_fits(config)
    _check_replaced_tokens(config)
    if config.amax_history is not None and (config.precision != "fp8" or config.compile):
        raise ConfigError(
            "amax_history",
            f"expected null unless precision is fp8 and compile false, got {config.amax_history}",
        )
    if config.compile and config.cuda_graphs:
        raise ConfigError("cuda_graphs", "expected false with compile true, got true")
    if config.cuda_graphs and config.attention_schedule != "list":
        raise ConfigError(
            "attention_schedule",
            "expected list with cuda_graphs, which replay the launches of another batch, got "
            f"{config.attention_schedule}",
        )
    if config.evaluation.target_accuracy is not None and config.evaluation.examples == 0:
        raise ConfigError("evaluation.examples", "expected a number > 0 for a target, got 0")
    check_mlperf(config)
    if is_streamed(config.data.source):
        _check_streamed(config)
    if config.data.mixture is not None and config.batching.strategy == "packed":
        raise ConfigError(
            "batching.strategy",
            "expected another than packed with data.mixture, whose epochs have different examples, "
            "got packed",
        )


def _check_pairs(config: PretrainConfig) -> None:
    """Options of which exactly one, or at most one, must be given."""
    for section, first, second, needed in (
        ("batching", "global_batch_size", "batch_size_per_rank", True),
        ("schedule", "total_steps", "epochs", True),
        ("schedule", "warmup_steps", "warmup_share", False),
    ):
        options = getattr(config, section)
        given = [getattr(options, name) is not None for name in (first, second)]
        if all(given):
            raise ConfigError(
                f"{section}.{second}", f"expected this or {section}.{first}, got both"
            )
        if needed and not any(given):
            raise ConfigError(
                f"{section}.{first}", f"expected this or {section}.{second}, got neither"
            )


def _check_read(section: str, options: Any, names: set[str], read: set[str]) -> None:
    """Options that have their default unless the section's `name` reads them."""
    for field in fields(options):
        value, default = getattr(options, field.name), field.default
        if field.name in names - read and value != default:
            default = "null" if default is None else default
            raise ConfigError(
                f"{section}.{field.name}",
                f"expected {default}, since {section}.name {options.name} does not read it, got "
                f"{value}",
            )


def _check_optimizer(name: str) -> None:
    """A name of the table, or what may be an import path; nothing is imported yet."""
    known = get_args(OptimizerName)
    if name not in known and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
        raise ConfigError(
            "optimizer.name",
            f"expected one of {', '.join(known)}, or an import path such as torch.optim.SGD, got "
            f"{name!r}",
        )


def _check_batch_warmup(config: PretrainConfig) -> None:
    first, steps = config.batching.warmup_batch_size, config.batching.warmup_steps
    if (first is None) != (steps is None):
        missing, given = ("warmup_batch_size", "warmup_steps")[:: 1 if first is None else -1]
        raise ConfigError(
            f"batching.{missing}", f"expected a number with batching.{given}, got null"
        )
    if first is not None and config.schedule.total_steps is None:
        raise ConfigError(
            "schedule.total_steps",
            "expected a number with batching.warmup_steps, where epochs have unequal numbers of "
            "updates, got null",
        )


def _check_rank_speeds(config: PretrainConfig) -> None:
    batching = config.batching
    if batching.rank_speeds is None:
        return
    if batching.strategy == "exchange" and batching.scope == "none":
        raise ConfigError(
            "batching.scope",
            "expected node, world or two_level with batching.rank_speeds, got none",
        )
    if config.cuda_graphs:
        raise ConfigError(
            "cuda_graphs",
            "expected false with batching.rank_speeds, since graphs have one number of sequences, "
            "got true",
        )


def _check_clip(clip: ClipConfig) -> None:
    per_rank = clip.mode in ("bucket", "before")
    if per_rank and not clip.max_norm > 0:
        raise ConfigError(
            "clip.max_norm", f"expected a number > 0 with clip.mode {clip.mode}, got 0"
        )
    if clip.wire_dtype == "fp16" and not per_rank:
        raise ConfigError(
            "clip.wire_dtype", f"expected fp32 or bf16 with clip.mode {clip.mode}, got fp16"
        )
    if clip.wire_dtype == "fp16" and clip.max_norm > _FP16_MAX:
        raise ConfigError(
            "clip.max_norm",
            f"expected at most {_FP16_MAX} with clip.wire_dtype fp16, got {clip.max_norm!r}",
        )
    if clip.error_feedback and clip.wire_dtype == "fp32":
        raise ConfigError(
            "clip.error_feedback", "expected false with clip.wire_dtype fp32, got true"
        )
    if clip.error_feedback and clip.mode == "before":
        raise ConfigError("clip.error_feedback", "expected false with clip.mode before, got true")


def _check_comm(config: PretrainConfig) -> None:
    comm, clip = config.comm, config.clip
    if comm.bucket_mb is not None and clip.mode == "before":
        raise ConfigError(
            "comm.bucket_mb",
            f"expected null with clip.mode before, which has one bucket, got {comm.bucket_mb}",
        )
    if comm.hook not in ("allreduce", "hierarchical") and clip.mode == "before":
        raise ConfigError(
            "comm.hook",
            f"expected allreduce or hierarchical with clip.mode before, got {comm.hook}",
        )
    if comm.hook in ("power_sgd", "dream_ddp", "gradient_flow") and clip.wire_dtype != "fp32":
        raise ConfigError(
            "clip.wire_dtype", f"expected fp32 with comm.hook {comm.hook}, got {clip.wire_dtype}"
        )
    if config.optimizer.name in ONE_BIT and comm.start == 0:
        raise ConfigError(
            "comm.start",
            f"expected a number >= 1 with optimizer.name {config.optimizer.name}, which needs a "
            "variance before it compresses, got 0",
        )
    if comm.hook in ("post_local_sgd", "dream_ddp") and config.optimizer.shard != "none":
        raise ConfigError(
            "optimizer.shard",
            f"expected none with comm.hook {comm.hook}, got {config.optimizer.shard}",
        )


def _check_shard(config: PretrainConfig) -> None:
    """What does not go with an update that is part of the passes (overlap, fsdp)."""
    shard = config.optimizer.shard
    if shard not in ("overlap", "fsdp"):
        return
    given = f"with optimizer.shard {shard}"
    clip, comm = config.clip, config.comm
    if clip.mode == "before":
        raise ConfigError(
            "clip.mode",
            f"expected bucket, after or none {given}, which sends gradients before the whole "
            "gradient is there, got before",
        )
    if comm.hook != "allreduce":
        raise ConfigError(
            "comm.hook", f"expected allreduce {given}, which averages without DDP, got {comm.hook}"
        )
    if config.growth.name != "none":
        raise ConfigError(
            "growth.name",
            f"expected none {given}, whose buckets do not change, got {config.growth.name}",
        )
    for name in ("cuda_graphs", "compile"):
        if getattr(config, name):
            raise ConfigError(
                name, f"expected false {given}, whose exchanges run between modules, got true"
            )
    if config.batching.rank_speeds == "auto":
        raise ConfigError(
            "batching.rank_speeds",
            f"expected numbers or null {given}, where ranks wait for each other as they compute, "
            "got auto",
        )
    if shard == "fsdp":
        _check_fsdp(config)


def _check_fsdp(config: PretrainConfig) -> None:
    clip, given = config.clip, "with optimizer.shard fsdp"
    if config.comm.bucket_mb is not None:
        raise ConfigError(
            "comm.bucket_mb",
            f"expected null {given}, whose buckets are the encoder's layers, got "
            f"{config.comm.bucket_mb}",
        )
    if clip.wire_dtype == "fp16":
        raise ConfigError(
            "clip.wire_dtype", f"expected fp32 or bf16 {given}, which averages in it, got fp16"
        )
    if clip.error_feedback:
        raise ConfigError(
            "clip.error_feedback", f"expected false {given}, which casts gradients itself, got true"
        )
    if clip.mode == "bucket" and clip.policy != "equal":
        raise ConfigError("clip.policy", f"expected equal {given}, got {clip.policy}")


def _check_growth(growth: GrowthConfig) -> None:
    options = {field.name for field in fields(growth)} - {"name"}
    _check_read("growth", growth, options, _GROWTH_OPTIONS[growth.name])
    if growth.name == "lengths" and growth.lengths is None:
        raise ConfigError(
            "growth.lengths",
            "expected numbers such as [128, 512] with growth.name lengths, got null",
        )
    for name in ("layers", "lengths"):
        values = getattr(growth, name)
        if values is not None and not (values and all(a < b for a, b in pairwise(values))):
            raise ConfigError(f"growth.{name}", f"expected ascending numbers >= 1, got {values}")
    _check_shares(growth)


def _check_shares(growth: GrowthConfig) -> None:
    if growth.shares is None:
        return
    total = sum(growth.shares) + (growth.joint_share or 0.0)
    if abs(total - 1) > 1e-6:
        raise ConfigError(
            "growth.shares", f"expected a sum of 1 together with growth.joint_share, got {total:g}"
        )
    stages = growth.lengths if growth.name == "lengths" else growth.layers
    if stages is not None and len(growth.shares) != len(stages):
        raise ConfigError(
            "growth.shares",
            f"expected a number for each of {len(stages)} stages, got {len(growth.shares)}",
        )


def _check_growth_fits(config: PretrainConfig) -> None:
    name = config.growth.name
    if name == "none":
        return
    if config.schedule.total_steps is None:
        raise ConfigError(
            "schedule.total_steps", f"expected a number with growth.name {name}, got null"
        )
    if config.comm.hook != "allreduce":
        raise ConfigError(
            "comm.hook", f"expected allreduce with growth.name {name}, got {config.comm.hook}"
        )
    optimizer = config.optimizer.name
    if optimizer in COMMUNICATING:
        raise ConfigError(
            "optimizer.name",
            f"expected another than {optimizer} with growth.name {name}, got {optimizer}",
        )
    if config.cuda_graphs:
        raise ConfigError("cuda_graphs", f"expected false with growth.name {name}, got true")
    if name == "layer_drop" and config.compile:
        raise ConfigError(
            "compile",
            "expected false with growth.name layer_drop, whose every choice of layers would be "
            "compiled, got true",
        )
    if name in ("mslt", "stacking"):
        if config.model.weights is not None:
            raise ConfigError(
                "model.preset",
                f"expected no folder with weights with growth.name {name}, got "
                f"{config.model.preset!r}",
            )
        if config.optimizer.shard != "none":
            raise ConfigError(
                "optimizer.shard",
                f"expected none with growth.name {name}, got {config.optimizer.shard}",
            )


def _check_replaced_tokens(config: PretrainConfig) -> None:
    """What does not go with the two encoders of replaced-token detection."""
    share, objective = config.model.generator_share, config.data.objective
    if objective != "rtd":
        default = type(config.model).generator_share
        if share != default:
            raise ConfigError(
                "model.generator_share",
                f"expected {default} with data.objective {objective}, which has no generator, got "
                f"{share}",
            )
        return
    if config.cuda_graphs:
        raise ConfigError(
            "cuda_graphs",
            "expected false with data.objective rtd, which draws tokens in the middle of a pass, "
            "got true",
        )
    if config.growth.name not in ("none", "lengths"):
        raise ConfigError(
            "growth.name",
            "expected none or lengths with data.objective rtd, of whose two encoders stages would "
            f"change one, got {config.growth.name}",
        )


def _check_streamed(config: PretrainConfig) -> None:
    source = config.data.source
    if config.batching.strategy != "exchange":
        raise ConfigError(
            "batching.strategy",
            f"expected exchange with data.source {source}, which has no index of lengths, got "
            f"{config.batching.strategy}",
        )
    if config.schedule.total_steps is None:
        raise ConfigError(
            "schedule.total_steps",
            f"expected a number with data.source {source}, whose length is not known, got null",
        )
