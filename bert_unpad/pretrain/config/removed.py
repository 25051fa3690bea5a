"""Removed and renamed options, and what to give instead; one table."""

from __future__ import annotations

from typing import Any

from bert_unpad.pretrain.config.errors import ConfigError

__all__ = ["check_removed"]

_CONFIG_JSON = "a config.json that sets it, as model.preset"
_IN_CODE = "bert_unpad.data.DataConfig, in code"
_SCHEDULE = "for others write a schedule, see docs/training/growth.md"

# What to give instead, by name; an entry `name=value` is of that value only.
_REMOVED: dict[str, str] = {
    "threads": "the environment variable OMP_NUM_THREADS",
    "model.vocab_size": _CONFIG_JSON,
    "model.hidden_act": _CONFIG_JSON,
    "model.type_vocab_size": _CONFIG_JSON,
    "model.initializer_range": _CONFIG_JSON,
    "model.layer_norm_eps": _CONFIG_JSON,
    "data.short_seq_prob": _IN_CODE,
    "data.dupe_factor": _IN_CODE,
    "data.seed": _IN_CODE,
    "data.verify": _IN_CODE,
    "data.whole_word": "data.mask_unit word",
    "data.file_per_document": "data.source PATH?file_per_document=true",
    "batching.prefetch": "nothing (two steps are prepared ahead)",
    "batching.exchange": "batching.scope (none, node for group, world, two_level for hierarchical)",
    "batching.dealing": "nothing (examples are dealt as lpt was; ExampleExchange has others)",
    "batching.reader_timeout": "rank_timeout",
    "batching.row_packing": "nothing (rows are packed as best_fit was; PackedSampler has others)",
    "batching.max_sequences_per_row": "nothing (there is no limit; PackedSampler has one)",
    "growth.new_layers": f"nothing (new layers are copies; {_SCHEDULE})",
    "growth.decoder": "nothing (the word embedding trains as the decoder)",
    "growth.pooler": "nothing (the pooler trains)",
    "growth.theta": f"nothing (it is 0.5; {_SCHEDULE})",
    "growth.gamma": f"nothing (it is 100 / schedule.total_steps; {_SCHEDULE})",
    "loss_scale.growth_factor": "nothing (it is 2)",
    "loss_scale.backoff_factor": "nothing (it is 0.5)",
    "clip.policy=numel": "equal or adaptive (bert_unpad.distributed.BucketClip has numel)",
    "comm.power_sgd_error_feedback": "nothing (it is always on)",
    "checkpoint.dir": "run_dir, which holds the folder checkpoints",
    "evaluation.batch_size": "nothing (batches are as large as those of training)",
    "logging.plots": "nothing (plots are drawn where matplotlib is installed)",
}


def check_removed(name: str, value: Any) -> None:
    """Checks that an option, or its value, still exists.

    Raises:
        ConfigError: it does not; the message says what to give instead.
    """
    if (instead := _REMOVED.get(name)) is not None:
        raise ConfigError(name, f"expected {instead}, got a removed option")
    if (instead := _REMOVED.get(f"{name}={value}")) is not None:
        raise ConfigError(name, f"expected {instead}, got the removed value {value}")
