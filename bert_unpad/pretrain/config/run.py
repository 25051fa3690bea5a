"""All options of a run together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bert_unpad._choices import Precision
from bert_unpad._tiers import advanced
from bert_unpad.data import DataConfig
from bert_unpad.nn.encoder import Recompute
from bert_unpad.ops.attention import AttentionSchedule
from bert_unpad.pretrain.config.batching import BatchingConfig
from bert_unpad.pretrain.config.communication import CommConfig
from bert_unpad.pretrain.config.growth import GrowthConfig
from bert_unpad.pretrain.config.model import ModelConfig
from bert_unpad.pretrain.config.output import CheckpointConfig, EvaluationConfig, LoggingConfig
from bert_unpad.pretrain.config.ranges import check_ranges
from bert_unpad.pretrain.config.rules import check_rules
from bert_unpad.pretrain.config.update import (
    ClipConfig,
    LossScaleConfig,
    OptimizerConfig,
    ScheduleConfig,
)


@dataclass
class PretrainConfig:
    """The run as a whole."""

    run_dir: str = "runs/pretrain"
    """Folder of metrics, checkpoints, plots and the final model. All ranks must see it."""
    resume: Literal["auto", "never", "must"] = "auto"
    """What to do with an earlier run in run_dir. auto: continue from its newest checkpoint, if
    there is one. must: end with an error without a checkpoint. never: move the earlier run aside
    and start again."""
    seed: int = 0
    """Seed of weights, dropout and the order of examples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of each process. auto: a GPU if there is one."""
    precision: Precision = "fp32"
    """Type of activations; parameters and optimizer states are always fp32. fp16: losses are
    scaled (see loss_scale); a CPU keeps activations in fp16 and multiplies in fp32. fp8: bf16, with
    the matrix products of the encoder's linear layers in 8 bits (twice the rate of bf16 on GPUs of
    compute capability 8.9 and later; a CPU only rounds as such a GPU does, and is slower)."""
    amax_history: int | None = advanced(None)
    """With precision fp8, the number of updates whose largest values give the scales of activations
    and gradients (delayed scaling; 1024 in Transformer Engine), so that they are rounded in one
    pass. null: by their own largest values, which takes two."""
    rank_timeout: float = advanced(300.0)
    """Seconds that ranks wait for a rank that hangs, does not join, or does not read its examples,
    before the run ends with an error that names it."""
    bind_cores: bool = advanced(False)
    """Bind each process of a machine to its own share of the cores, within one memory node where
    the nodes divide the processes evenly. For training on CPUs with several processes a machine."""
    compile: bool = advanced(False)
    """Run the model through torch.compile."""
    cuda_graphs: bool = advanced(False)
    """Replay each forward and backward pass as one CUDA graph. Batches are padded to a few token
    counts at the end of the packed buffer. Needs a GPU, and with more than one rank comm.hook
    allreduce or hierarchical."""
    time_products: bool = advanced(True)
    """Time cuBLASLt's algorithms once for each shape of a matrix product, and use the fastest; the
    choices are kept in the cache folder for later runs. Without, cuBLASLt's first guess is used. It
    has no effect on a CPU."""
    attention_schedule: AttentionSchedule = advanced("list")
    """How a GPU starts a batch's sequences in attention, longest first. list: in one launch.
    groups: in up to 4 launches side by side, each for sequences of similar length. Results are the
    same; which is faster depends on the GPU and the lengths. It has no effect on a CPU."""
    recompute: Recompute = "none"
    """What the backward pass computes again to save memory. gelu: the output of each layer's GELU.
    layer: whole layers, of which only the input is kept."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the checkpoints."""
        return Path(self.run_dir) / "checkpoints"

    def validate(self) -> None:
        """Checks every option by itself, and the rules between options.

        Raises:
            ConfigError: an option is out of range, or options contradict each other.
        """
        check_ranges(self)
        check_rules(self)
