"""What every part of a run needs to know: its settings, processes, model, and how far it is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.config import PretrainConfig
from bert_unpad.pretrain.progress import Progress
from bert_unpad.pretrain.ranks import Ranks

_ACTIVATION_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


@dataclass
class Run:
    """One run on one process. The model lies on the device of `ranks` once training begins."""

    config: PretrainConfig
    ranks: Ranks
    model: EncoderForPreTraining
    """The bare model, neither compiled nor in DDP."""
    progress: Progress = field(default_factory=Progress)

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
        return torch.autocast(
            self.device.type,
            dtype=self.dtype,
            # A CUDA graph would read casts that were freed long ago.
            cache_enabled=not self.config.cuda_graphs,
        )
