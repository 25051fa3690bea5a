"""What every part of a run needs to know: its settings, processes, model, and how far it is."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.config import ClipConfig, CommConfig, PretrainConfig
from bert_unpad.pretrain.ranks import Ranks

_ACTIVATION_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


@dataclass
class Progress:
    """How far a run is, over all ranks."""

    step: int = 0
    """Updates made."""
    epoch: int = 0
    """Number of the epoch that the latest update's examples are from."""
    sequences: int = 0
    tokens: int = 0
    """Real tokens trained on."""
    padded: int = 0
    """Tokens that the same sequences would be with padding."""
    flops: float = 0.0
    """Floating-point operations of the model so far, forward and backward."""
    seconds: float = 0.0
    """Spent training."""
    joules: dict[str, float | None] = field(default_factory=dict)
    """Energy of the run so far, by source, see `output.energy`; None: not read all the time."""
    stage: int = 0
    """The stage of growth that the latest update was made in."""
    target_reached: bool = False
    """Whether evaluation.target_accuracy has ended the run."""
    rank_speeds: list[float] = field(default_factory=list)
    """What was measured last with batching.rank_speeds auto, by rank."""
    comm: dict[str, str] = field(default_factory=dict)
    """What comm.hook auto has chosen: `hook` and `wire_dtype`; empty without."""
    window: dict[str, float] = field(default_factory=dict)
    """Sums of the log's current interval."""
    window_seconds: float = 0.0
    """Value of `seconds` at the beginning of the log's current interval."""

    def add(self, counts: dict[str, float]) -> None:
        """Counts an update's examples."""
        self.sequences += int(counts["sequences"])
        self.tokens += int(counts["tokens"])
        self.padded += int(counts["padded"])
        self.flops += counts["flops"]


@dataclass
class Run:
    """One run on one process. The model lies on the device of `ranks` once training begins."""

    config: PretrainConfig
    ranks: Ranks
    model: EncoderForPreTraining
    """The bare model, neither compiled nor in DDP."""
    progress: Progress = field(default_factory=Progress)

    @property
    def comm(self) -> CommConfig:
        """How gradients travel now: as configured, or as comm.hook auto has chosen."""
        comm = self.config.comm
        if comm.hook != "auto":
            return comm
        hook: Any = self.progress.comm.get("hook", "allreduce")
        one_bucket = hook == "power_sgd" and self.device.type == "cpu"
        return replace(comm, hook=hook, bucket_mb=None if one_bucket else comm.bucket_mb)

    @property
    def clip(self) -> ClipConfig:
        """How gradients are clipped and cast now, see `comm`."""
        if self.config.comm.hook != "auto":
            return self.config.clip
        dtype: Any = self.progress.comm.get("wire_dtype", "fp32")
        return replace(self.config.clip, wire_dtype=dtype)

    @property
    def dir(self) -> Path:
        """The run's folder."""
        return Path(self.config.run_dir)

    @property
    def device(self) -> torch.device:
        """The device that this process trains on."""
        return self.ranks.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        return _ACTIVATION_DTYPES[self.config.precision]

    @property
    def autocast(self) -> AbstractContextManager:
        """A context for a forward pass in the configuration's precision."""
        if self.config.precision == "fp32":
            return nullcontext()
        # Nothing casts a weight twice in a pass, and a CUDA graph would read a cast that is gone.
        return torch.autocast(self.device.type, dtype=self.dtype, cache_enabled=False)
