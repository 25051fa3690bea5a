"""Names and defaults of the trainer's settings that cost models know too.

They are not in `bert_unpad.pretrain.config` because `python -m bert_unpad.simulate` and
`python -m bert_unpad.plan` must run without the packages that the trainer needs.
"""

from typing import Literal

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
"""`precision`: the type of the activations."""
OptimizerName = Literal[
    "adamw",
    "fused_adam",
    "lamb",
    "lans",
    "stable_adamw",
    "muon",
    "mt_dao",
    "onebit_adam",
    "onebit_lamb",
    "zero_one_adam",
]
"""`optimizer.name`, unless that is an import path: rows of `bert_unpad.pretrain.update.kinds`."""
ONE_BIT: tuple[OptimizerName, ...] = ("onebit_adam", "onebit_lamb", "zero_one_adam")
"""Optimizers whose ranks send one bit a number."""
COMMUNICATING: tuple[OptimizerName, ...] = ("mt_dao", *ONE_BIT)
"""Optimizers that average over the ranks by themselves: their property `averages_gradients` says
whether the next step takes gradients that are already averaged."""
Shard = Literal["none", "node", "world", "overlap", "fsdp"]
"""`optimizer.shard`: which ranks share the optimizer's state out among them, and how."""

POWER_SGD_RANK = 2
"""Columns of the thin matrices of `comm.hook: power_sgd`."""
LOCAL_SGD_PERIOD = 8
"""Default of `comm.local_sgd_period`: updates between averages of the models."""
