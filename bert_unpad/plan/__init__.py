"""Plans a training run: the best configuration for given hardware, its time and its cost.

As a command: `python -m bert_unpad.plan --help`. In code: a `Workload` (what is trained), a
`Device` (`card_device` of a `CARDS` entry, or `calibrate`), a `Cluster` (`gpu_cluster`, or one of
`bert_unpad.simulate`), and a `Planner` of them; `best` and `curve` choose. The time of an update is
the `StepTime` of `bert_unpad.simulate`, here under the name `UpdateTime`.
"""

from bert_unpad.costs.cards import CARDS, Card
from bert_unpad.costs.device import Device, card_device, mixed_device
from bert_unpad.costs.links import card_link, gpu_cluster, intra_node_link, network_link
from bert_unpad.costs.step import StepTime as UpdateTime
from bert_unpad.costs.workload import Workload
from bert_unpad.plan.candidates import Allowed, Candidate
from bert_unpad.plan.choose import Choice, alternatives, best, curve
from bert_unpad.plan.planner import Planner

__all__ = [
    "CARDS",
    "Allowed",
    "Candidate",
    "Card",
    "Choice",
    "Device",
    "Planner",
    "UpdateTime",
    "Workload",
    "alternatives",
    "best",
    "card_device",
    "card_link",
    "curve",
    "gpu_cluster",
    "intra_node_link",
    "mixed_device",
    "network_link",
]
