"""The configuration of a pretraining run: typed sections, read from YAML and the command line.

Everything a run depends on is a field here, so that the YAML saved with the run repeats it. A field
is an option, `section.key`; `_tiers` says which page of help lists it. `ranges` checks each option
by itself, `rules` the rules between options, which `limits` lists; both raise `ConfigError`, whose
message is `name: expected X, got Y`.
"""

from bert_unpad.data import DataConfig
from bert_unpad.pretrain.config.batching import BatchingConfig
from bert_unpad.pretrain.config.communication import CommConfig
from bert_unpad.pretrain.config.errors import ConfigError
from bert_unpad.pretrain.config.growth import GrowthConfig
from bert_unpad.pretrain.config.model import ModelConfig
from bert_unpad.pretrain.config.output import CheckpointConfig, EvaluationConfig, LoggingConfig
from bert_unpad.pretrain.config.read import Settings, read_config, read_settings
from bert_unpad.pretrain.config.run import PretrainConfig
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
    "Settings",
    "read_config",
    "read_settings",
]
