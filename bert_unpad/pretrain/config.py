"""The configuration of a pretraining run: typed sections, read from YAML and the command line.

Everything a run depends on is a field here, so that the YAML saved with the run repeats it. Field
types are checked by jsonargparse while it reads; what no single field shows (two settings that
exclude each other, a share outside 0 .. 1) is checked in `PretrainConfig.validate`. Each error
names the key as it is written in YAML, for example `batching.global_batch_size`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jsonargparse

from bert_unpad.data import DataConfig
from bert_unpad.nn import BertConfig

__all__ = [
    "BatchingConfig",
    "CheckpointConfig",
    "ClipConfig",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PretrainConfig",
    "ScheduleConfig",
    "read_config",
]

_SIZES = {
    "bert-base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "bert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}


class ConfigError(ValueError):
    """A setting is wrong; the message begins with its key."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


@dataclass
class ModelConfig:
    """The model: a preset, a folder, or sizes; sizes given here go before the preset's."""

    preset: str = "bert-base"
    """bert-base, bert-large, or a folder with config.json and model.safetensors in Hugging Face's
    layout, whose weights training then starts from."""
    vocab_size: int | None = None
    """By default the tokenizer's."""
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    intermediate_size: int | None = None
    hidden_act: Literal["gelu", "gelu_new", "gelu_pytorch_tanh"] | None = None
    hidden_dropout_prob: float | None = None
    attention_probs_dropout_prob: float | None = None
    max_position_embeddings: int | None = None
    type_vocab_size: int | None = None
    initializer_range: float | None = None
    layer_norm_eps: float | None = None

    @property
    def weights(self) -> Path | None:
        """The folder that training starts from, or None for fresh weights."""
        return None if self.preset in _SIZES else Path(self.preset)

    def overrides(self) -> dict[str, object]:
        """The sizes and rates that are given."""
        values = dataclasses.asdict(self)
        del values["preset"]
        return {name: value for name, value in values.items() if value is not None}

    def resolve(self, vocab_size: int) -> BertConfig:
        """The model's configuration, for a tokenizer with `vocab_size` tokens.

        Raises:
            ConfigError: the preset is no name and no folder, a size does not fit, or the
                vocabulary is smaller than the tokenizer's.
        """
        if self.weights is not None:
            path = self.weights / "config.json"
            if not path.is_file():
                raise ConfigError(
                    "model.preset",
                    f"expected one of {sorted(_SIZES)} or a folder with config.json, "
                    f"got {self.preset!r}",
                )
            values = BertConfig.from_json(path).to_dict()
        else:
            values = {"vocab_size": vocab_size, **_SIZES[self.preset]}
        try:
            config = BertConfig.from_dict(values | self.overrides())
        except ValueError as error:
            raise ConfigError("model", str(error)) from error
        if config.vocab_size < vocab_size:
            raise ConfigError(
                "model.vocab_size",
                f"the tokenizer has {vocab_size} tokens, the model only {config.vocab_size}",
            )
        return config


@dataclass
class BatchingConfig:
    """How many sequences make an update, and who gets which."""

    strategy: Literal["stratified", "random"] = "stratified"
    """stratified gives every rank the same work in every step; random is plain shuffling."""
    global_batch_size: int | None = None
    """Sequences per update, over all ranks. Give this or batch_size_per_rank."""
    batch_size_per_rank: int | None = None
    """Sequences per forward and backward pass on one rank."""
    accumulation: int = 1
    """Forward and backward passes per update."""
    prefetch: int = 2
    """Steps that a background thread prepares ahead of training."""

    def per_rank(self, world_size: int) -> int:
        """Sequences per update on one rank.

        Raises:
            ConfigError: the global batch cannot be split evenly.
        """
        if self.batch_size_per_rank is not None:
            return self.batch_size_per_rank * self.accumulation
        if self.global_batch_size % world_size:
            raise ConfigError(
                "batching.global_batch_size",
                f"{self.global_batch_size} is not a multiple of the number of ranks ({world_size})",
            )
        return self.global_batch_size // world_size


@dataclass
class OptimizerConfig:
    """The optimizer. Biases and LayerNorm parameters get no weight decay."""

    name: Literal["adamw", "fused_adam", "lamb", "lans"] = "adamw"
    """adamw: PyTorch's own; fused_adam: the same by bert_unpad.optim; lamb or lans, for large
    batches, whose learning rate counts relative to each weight's norm."""
    lr: float = 1e-4
    """Learning rate at the end of the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01


@dataclass
class ScheduleConfig:
    """Linear warm-up, then polynomial decay. Give total_steps or epochs."""

    total_steps: int | None = None
    epochs: int | None = None
    warmup_steps: int | None = None
    """Updates of the warm-up; 0 for none."""
    warmup_share: float | None = None
    """The same as a share of all updates."""
    start_warmup_step: int = 0
    """Update before which the warm-up begins, as in MLPerf's rules: negative numbers start it
    above zero."""
    power: float = 1.0
    """Degree of the decay."""
    end_lr_share: float = 0.0
    """Learning rate that the decay ends at, as a share of optimizer.lr."""


@dataclass
class ClipConfig:
    """Bound on the norm of the gradient."""

    max_norm: float = 1.0
    mode: Literal["bucket", "before", "after", "none"] = "after"
    """bucket: each rank clips bucket by bucket before they are averaged, while the backward pass
    goes on. before: each rank clips its whole gradient, then they are averaged. after: clip the
    average. The norm of the average is at most max_norm in all three."""
    policy: Literal["equal", "numel", "adaptive"] = "equal"
    """How bucket shares max_norm^2 out: in equal parts, by the buckets' sizes, or by their shares
    of the squared norm in the step before."""
    wire_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type in which gradients travel between ranks; fp16 with bucket and before only."""
    error_feedback: bool = False
    """Add what the cast to wire_dtype loses to the next step's gradient (takes memory for one more
    gradient; a resumed run begins without it)."""


@dataclass
class CheckpointConfig:
    """Checkpoints to resume from."""

    dir: str | None = None
    """By default `checkpoints` in run_dir. All ranks must see the same folder."""
    every: int = 1000
    """Updates between checkpoints; 0 saves at the end and on SIGTERM only."""
    keep_last: int = 2
    """Older ones are deleted."""


@dataclass
class EvaluationConfig:
    """Masked-token accuracy and loss on held-out examples, always with the same masks."""

    every: int = 1000
    """Updates between evaluations; 0 evaluates at the end only."""
    examples: int = 10_000
    """How many, at most."""
    batch_size: int = 32
    """Sequences per forward pass on one rank."""
    target_accuracy: float | None = None
    """Training ends when masked-token accuracy reaches this, in 0 .. 1."""


@dataclass
class LoggingConfig:
    """What a run tells while it runs and when it ends."""

    every: int = 10
    """Updates between lines of metrics.jsonl; losses stay on the device in between."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """auto: a bar on a terminal, else lines."""
    plots: bool = True
    """Draw PNGs when the run ends (needs matplotlib)."""
    tensorboard: bool = False
    """Write TensorBoard event files too (needs tensorboard)."""
    examples: bool = False
    """Write which examples each rank used in each step, to examples.rank<r>.jsonl."""


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
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of the activations; parameters and optimizer states are fp32 in both."""
    threads: int | None = None
    """CPU threads per process; by default OMP_NUM_THREADS, or cores / processes on this machine
    (also where torchrun alone has set OMP_NUM_THREADS to 1)."""
    compile: bool = False
    """Run the model through torch.compile."""
    gradient_checkpointing: bool = False
    """Keep each layer's input only and compute the layer again in the backward pass."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
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
        _exactly_one(self.batching, "batching", "global_batch_size", "batch_size_per_rank")
        _exactly_one(self.schedule, "schedule", "total_steps", "epochs")
        if self.schedule.warmup_steps is not None and self.schedule.warmup_share is not None:
            raise ConfigError("schedule.warmup_share", "give this or warmup_steps, not both")
        _check_clip(self.clip)
        at_least = {
            "batching.global_batch_size": 1,
            "batching.batch_size_per_rank": 1,
            "batching.accumulation": 1,
            "batching.prefetch": 1,
            "schedule.total_steps": 1,
            "schedule.epochs": 1,
            "schedule.warmup_steps": 0,
            "schedule.power": 0,
            "optimizer.lr": 0,
            "optimizer.eps": 0,
            "optimizer.weight_decay": 0,
            "clip.max_norm": 0,
            "checkpoint.every": 0,
            "checkpoint.keep_last": 1,
            "evaluation.every": 0,
            "evaluation.examples": 0,
            "evaluation.batch_size": 1,
            "logging.every": 1,
            "threads": 1,
            "seed": 0,
        }
        for key, bound in at_least.items():
            value = self._get(key)
            if value is not None and not value >= bound:
                raise ConfigError(key, f"expected a number >= {bound}, got {value!r}")
        for key in ("schedule.warmup_share", "schedule.end_lr_share", "evaluation.target_accuracy"):
            value = self._get(key)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(key, f"expected a number in 0 .. 1, got {value!r}")
        for value in self.optimizer.betas:
            if not 0 <= value < 1:
                raise ConfigError("optimizer.betas", f"expected numbers in [0, 1), got {value!r}")

    def _get(self, key: str):
        value = self
        for name in key.split("."):
            value = getattr(value, name)
        return value


def _exactly_one(section: object, name: str, first: str, second: str) -> None:
    given = [getattr(section, key) is not None for key in (first, second)]
    if all(given):
        raise ConfigError(f"{name}.{second}", f"give this or {first}, not both")
    if not any(given):
        raise ConfigError(f"{name}.{first}", f"give this or {second}")


def _check_clip(clip: ClipConfig) -> None:
    bounded = clip.mode in ("bucket", "before")
    if bounded and not clip.max_norm > 0:
        raise ConfigError("clip.max_norm", f"clip.mode {clip.mode} needs more than 0")
    if clip.wire_dtype == "fp16" and not (bounded and clip.max_norm <= 65504):
        raise ConfigError(
            "clip.wire_dtype",
            "fp16 needs clip.mode bucket or before, with clip.max_norm of at most 65504",
        )
    if clip.error_feedback and (clip.wire_dtype == "fp32" or clip.mode == "before"):
        raise ConfigError(
            "clip.error_feedback",
            "needs clip.wire_dtype bf16 or fp16, and another mode than before",
        )


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
        ConfigError: a number is out of range, or settings contradict each other.
        SystemExit: (code 2) a key is unknown or a value has the wrong type; the message on stderr
            names the key.
    """
    parser = _parser()
    parsed = parser.parse_args(None if arguments is None else list(arguments))
    del parsed["config"]
    text = parser.dump(parsed)
    try:
        fields = parser.instantiate(parsed)
    except ValueError as error:  # DataConfig checks itself; its message begins with the field
        raise ConfigError("data", str(error)) from error
    config = PretrainConfig(**vars(fields))
    config.validate()
    return config, text
