"""A run's whole configuration: the sections together, what they exclude, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jsonargparse

from bert_unpad._choices import Precision
from bert_unpad.data import DataConfig
from bert_unpad.data.streams.text_stream import is_streamed
from bert_unpad.nn.encoder import Recompute
from bert_unpad.pretrain.config.batching import BatchingConfig
from bert_unpad.pretrain.config.communication import CommConfig, check_comm
from bert_unpad.pretrain.config.errors import ConfigError
from bert_unpad.pretrain.config.growth import GrowthConfig, check_growth
from bert_unpad.pretrain.config.model import ModelConfig
from bert_unpad.pretrain.config.output import CheckpointConfig, EvaluationConfig, LoggingConfig
from bert_unpad.pretrain.config.ranges import check_ranges
from bert_unpad.pretrain.config.update import (
    ClipConfig,
    LossScaleConfig,
    OptimizerConfig,
    ScheduleConfig,
    check_clip,
    check_loss_scale,
)


@dataclass
class PretrainConfig:
    """Everything that a pretraining run depends on."""

    run_dir: str = "runs/pretrain"
    """Where metrics, checkpoints, plots and the final model go."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto continues from the newest checkpoint if there is one; must refuses to start without
    one; never sets an earlier run's folder aside and starts anew."""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision = "fp32"
    """Type of the activations; parameters and optimizer states are fp32 in all. fp16: with scaled
    losses, see loss_scale; a CPU keeps its activations so and multiplies them in fp32. fp8: bf16,
    with the products of the encoder's linear layers in 8 bits (twice the rate of bf16 on a GPU from
    sm_89 on; a CPU only rounds as such a GPU does, and is slower)."""
    threads: int | None = None
    """CPU threads per process; by default OMP_NUM_THREADS, or cores / processes on this machine
    (also where torchrun alone has set OMP_NUM_THREADS to 1)."""
    rank_timeout: float = 300.0
    """Seconds that ranks wait for one that does not come along, or does not join, before the run
    ends and names it."""
    compile: bool = False
    """Run the model through torch.compile."""
    cuda_graphs: bool = False
    """Replay each forward and backward pass as one CUDA graph; batches are padded to a few token
    counts, at the end of the packed buffer. Needs a GPU, and clip.mode before with more than one
    rank."""
    recompute: Recompute = "none"
    """What the backward pass computes again, to save memory: nothing; the GELU's output of each
    layer; or whole layers, of which only the input is kept."""
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
        """Where checkpoints go."""
        return Path(self.checkpoint.dir or Path(self.run_dir) / "checkpoints")

    def validate(self) -> None:
        """Checks what the types do not.

        Raises:
            ConfigError: see its message.
        """
        check_ranges(self)
        _exactly_one(self.batching, "batching", "global_batch_size", "batch_size_per_rank")
        _exactly_one(self.schedule, "schedule", "total_steps", "epochs")
        if self.schedule.warmup_steps is not None and self.schedule.warmup_share is not None:
            raise ConfigError("schedule.warmup_share", "give this or warmup_steps, not both")
        check_clip(self.clip)
        check_loss_scale(self.loss_scale)
        check_comm(self.comm, self.clip)
        if self.comm.hook == "post_local_sgd" and self.optimizer.shard != "none":
            raise ConfigError(
                "optimizer.shard", "comm.hook post_local_sgd, with models of their own, needs none"
            )
        if self.cuda_graphs and self.compile:
            raise ConfigError("cuda_graphs", "give this or compile, not both")
        if is_streamed(self.data.source):
            self._check_streamed()
        check_growth(self.growth)
        self._check_growth_fits()
        for value in self.optimizer.betas:
            if not 0 <= value < 1:
                raise ConfigError("optimizer.betas", f"expected numbers in [0, 1), got {value!r}")

    def _check_streamed(self) -> None:
        if self.batching.strategy != "exchange":
            raise ConfigError(
                "batching.strategy",
                f"{self.batching.strategy} needs the lengths of all examples, which data.source "
                f"{self.data.source} cannot give: use exchange",
            )
        if self.schedule.total_steps is None:
            raise ConfigError(
                "schedule.total_steps",
                f"give this instead of epochs: nobody knows how long data.source "
                f"{self.data.source} is",
            )

    def _check_growth_fits(self) -> None:
        name = self.growth.name
        if name != "none" and self.schedule.total_steps is None:
            raise ConfigError("growth.name", f"{name} needs schedule.total_steps, not epochs")
        if name in ("mslt", "stacking") and self.model.weights is not None:
            raise ConfigError("growth.name", f"{name} begins with fresh weights, not model.preset")
        if name != "none" and self.comm.hook != "allreduce":
            raise ConfigError("comm.hook", f"growth.name {name} needs allreduce")
        if name != "none" and self.cuda_graphs:
            raise ConfigError("cuda_graphs", f"growth.name {name} goes without")
        if name in ("mslt", "stacking") and self.optimizer.shard != "none":
            raise ConfigError("optimizer.shard", f"growth.name {name} needs none")
        if name == "layer_drop" and self.compile:
            raise ConfigError(
                "compile", "growth.name layer_drop would compile anew for each choice of layers"
            )


def _exactly_one(section: object, name: str, first: str, second: str) -> None:
    given = [getattr(section, key) is not None for key in (first, second)]
    if all(given):
        raise ConfigError(f"{name}.{second}", f"give this or {first}, not both")
    if not any(given):
        raise ConfigError(f"{name}.{first}", f"give this or {second}")


def _parser() -> jsonargparse.ArgumentParser:
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog="pretrain.py", description="Pretrains BERT on packed tokens; see configs/ for recipes."
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below.")
    parser.add_class_arguments(PretrainConfig)
    return parser


def read_config(arguments: Sequence[str] | None = None) -> tuple[PretrainConfig, str]:
    """Reads `--config FILE` and `--section.key value` overrides, the later ones winning.

    Args:
        arguments: the command line, by default the process's own.

    Returns:
        The configuration, and the same resolved in full as YAML.

    Raises:
        ConfigError: a file is no text, a number is out of range, or settings contradict each other.
        SystemExit: (code 2) a key is unknown or a value has the wrong type; the message on stderr
            names the key.
    """
    parser = _parser()
    try:
        parsed = parser.parse_args(None if arguments is None else list(arguments))
    except UnicodeDecodeError as error:
        raise ConfigError("config", f"expected a YAML file in UTF-8, got bytes: {error}") from error
    except OverflowError as error:  # of an integer of some 300 digits
        raise ConfigError(
            "config", f"expected numbers of 64 bits, got a larger one: {error}"
        ) from error
    del parsed["config"]
    text = parser.dump(parsed)
    try:
        fields = parser.instantiate(parsed)
    except ValueError as error:  # DataConfig checks itself; its message begins with the field
        raise ConfigError("data", str(error)) from error
    config = PretrainConfig(**vars(fields))
    config.validate()
    return config, text
