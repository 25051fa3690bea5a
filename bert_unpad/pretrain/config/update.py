"""Options of an update of the parameters: optimizer, learning rate, gradient clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bert_unpad._choices import Shard
from bert_unpad._tiers import advanced


@dataclass
class OptimizerConfig:
    """The optimizer. Biases and LayerNorm parameters have no weight decay."""

    name: str = "adamw"
    """adamw: PyTorch's AdamW. fused_adam: the same, by bert_unpad.optim. lamb, lans: for large
    batches; their learning rate is relative to the norm of each weight. stable_adamw: AdamW that
    makes a smaller step for weights whose gradient has grown suddenly. muon: orthogonalized
    momentum for the encoder's matrices, AdamW for the rest. mt_dao (experimental): AdamW with a
    slow momentum; after comm.start updates each rank makes its own, and every 32 updates ("period"
    in optimizer.arguments) models and momenta are averaged (Iacob et al., 2026). onebit_adam,
    onebit_lamb, zero_one_adam (experimental): Adam and LAMB whose momenta travel with one bit a
    value after comm.start updates (Tang et al., 2021; Li et al., 2021; Lu et al., 2022). An import
    path such as torch.optim.SGD: that class, with the options below that it has."""
    lr: float = 1e-4
    """Learning rate at the end of the warm-up."""
    betas: tuple[float, float] | None = advanced(None)
    """Decay rates of the averages of the gradient and of its square. By default 0.9 and 0.999, with
    mt_dao 0.999 twice, or those of the class that an import path names."""
    eps: float | None = advanced(None)
    """Number added to the denominator of the update. By default 1e-6, or that of the class that an
    import path names."""
    weight_decay: float | None = None
    """Factor of the decoupled weight decay. By default 0.01, or that of the class that an import
    path names."""
    arguments: dict[str, Any] | None = advanced(None)
    """Arguments of the optimizer that have no option here, such as {"momentum": 0.9}."""
    shard: Shard = advanced("none")
    """Ranks that share the optimizer's state. none: every rank keeps all of it. node: the ranks of
    a machine keep a part each. world: all ranks keep a part each. Updated weights then travel
    between the ranks that share. overlap: as world, but gradients travel only to the rank that
    updates them, during the backward pass, and weights during the next forward pass (the bytes of
    an allreduce). fsdp: all ranks share parameters and gradients too, by FSDP2, which sends about
    1.5 times as many bytes."""
    overlap: bool = advanced(False)
    """Make each update beside the next forward pass, which waits for a layer's new weights only
    when it comes to that layer; needs a GPU. Gradients stay in memory during that pass. For
    fused_adam, lamb, lans and stable_adamw, without optimizer.shard and compile."""


@dataclass
class ScheduleConfig:
    """Length of the run and learning rate: linear warm-up, then what schedule.name says."""

    name: Literal["polynomial", "linear", "cosine", "constant", "inverse_sqrt", "wsd"] = (
        "polynomial"
    )
    """Learning rate after the warm-up. polynomial, linear, cosine: decay to the end of the run.
    constant: none. inverse_sqrt: as the inverse square root of the updates. wsd: constant, then a
    decay by 1 - sqrt over the last schedule.decay_share of the run."""
    total_steps: int | None = None
    """Updates of the run. Give this or schedule.epochs."""
    epochs: int | None = None
    """Passes over the training data. Give this or schedule.total_steps."""
    warmup_steps: int | None = None
    """Updates of the warm-up. By default there is none. Give this or schedule.warmup_share."""
    warmup_share: float | None = None
    """Warm-up as a share of all updates. Give this or schedule.warmup_steps."""
    start_warmup_step: int = advanced(0)
    """Update before which the warm-up begins, as in MLPerf's rules. With a negative number the
    first update has a learning rate that is already further up the warm-up."""
    decay_from: Literal["warmup", "start"] = advanced("warmup")
    """With schedule.name polynomial, linear or cosine: where the decay begins. warmup: at the end
    of the warm-up, with the whole of optimizer.lr. start: at the first update; the warm-up takes
    the place of the decay as long as it lasts, as in MLPerf's reference for BERT."""
    power: float = advanced(1.0)
    """With schedule.name polynomial: degree of the decay. 1 is linear."""
    decay_share: float = advanced(0.1)
    """With schedule.name wsd: share of the run's updates that the decay takes."""
    end_lr_share: float = advanced(0.0)
    """Learning rate at the end of the decay, as a share of optimizer.lr."""


@dataclass
class ClipConfig:
    """Limit on the norm of the gradient, and its type between ranks."""

    max_norm: float = 1.0
    """Largest norm of the averaged gradient."""
    mode: Literal["bucket", "before", "after", "none"] = "after"
    """What is clipped. bucket: each rank's gradient, bucket by bucket, before buckets are averaged
    and during the backward pass. before: each rank's whole gradient, before gradients are averaged.
    after: the average. none: nothing. The first three keep the norm of the average within
    clip.max_norm."""
    policy: Literal["equal", "adaptive"] = advanced("equal")
    """With clip.mode bucket: how clip.max_norm is divided among buckets. equal: in equal parts.
    adaptive: by each bucket's share of the squared norm in the previous step."""
    wire_dtype: Literal["fp32", "bf16", "fp16"] = advanced("fp32")
    """Type of gradients between ranks. fp16 needs clip.mode bucket or before."""
    error_feedback: bool = advanced(False)
    """Add what the cast to clip.wire_dtype loses to the next step's gradient. Takes memory for one
    more gradient; a resumed run begins without it."""


@dataclass
class LossScaleConfig:
    """The factor on losses with precision fp16, which keeps gradients from underflow.

    It doubles after growth_interval updates without an overflow, and halves after an overflow, as
    in torch.amp.GradScaler.
    """

    initial: float = advanced(65536.0)
    """With precision fp16: the factor on losses at the start of the run."""
    growth_interval: int = advanced(2000)
    """With precision fp16: updates without an overflow after which the factor doubles."""
