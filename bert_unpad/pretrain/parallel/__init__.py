"""The ways in which ranks share an update, by the words of `optimizer.shard`.

A way is a subclass of `Way`. Nothing else asks for the word: what a way does not go with stands in
`config/limits.py`.
"""

from bert_unpad._choices import Shard
from bert_unpad.pretrain.parallel.captured import with_graphs
from bert_unpad.pretrain.parallel.ddp import Ddp, NodeSharded, Sharded
from bert_unpad.pretrain.parallel.fsdp import Fsdp
from bert_unpad.pretrain.parallel.overlap import Overlap
from bert_unpad.pretrain.parallel.way import Way
from bert_unpad.pretrain.run import Run

__all__ = ["WAYS", "Way", "make_way"]

WAYS: dict[Shard, type[Way]] = {
    "none": Ddp,
    "node": NodeSharded,
    "world": Sharded,
    "overlap": Overlap,
    "fsdp": Fsdp,
}


def make_way(run: Run) -> Way:
    """The way of a run; one rank shares with none. Every rank must call it.

    Raises:
        ConfigError: machines have different numbers of processes, and each should shard.
    """
    kind = Way if run.ranks.world_size == 1 else WAYS[run.config.optimizer.shard]
    return (with_graphs(kind) if run.config.cuda_graphs else kind)(run)
