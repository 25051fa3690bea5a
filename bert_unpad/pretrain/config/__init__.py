"""The configuration of a pretraining run: typed sections, read from YAML and the command line.

Everything a run depends on is a field here, so that the YAML saved with the run repeats it. Field
types are checked by jsonargparse while it reads; what no single field shows (two settings that
exclude each other, a share outside 0 .. 1) is checked in `PretrainConfig.validate`. Each error
names the key as it is written in YAML, for example `batching.global_batch_size`.
"""

from bert_unpad.data import DataConfig
from bert_unpad.pretrain.config.batching import BatchingConfig
from bert_unpad.pretrain.config.communication import CommConfig
from bert_unpad.pretrain.config.errors import ConfigError
from bert_unpad.pretrain.config.growth import GrowthConfig
from bert_unpad.pretrain.config.model import ModelConfig
from bert_unpad.pretrain.config.output import CheckpointConfig, EvaluationConfig, LoggingConfig
from bert_unpad.pretrain.config.run import PretrainConfig, read_config
from bert_unpad.pretrain.config.update import (
    ClipConfig,
    LossScaleConfig,
    OptimizerConfig,
    ScheduleConfig,
)

__all__ = [
    "BatchingConfig",
    "CheckpointConfig",
    "ClipConfig",
    "CommConfig",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "GrowthConfig",
    "LoggingConfig",
    "LossScaleConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PretrainConfig",
    "ScheduleConfig",
    "read_config",
]
