"""The work of a sequence by its length, by which the ranks' batches are balanced."""

from __future__ import annotations

from bert_unpad._balancer import WorkModel
from bert_unpad._cost_file import read_cost
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.nn.flops import flops_by_length
from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.ranks import Ranks

__all__ = ["sequence_work"]


def sequence_work(
    model: EncoderForPreTraining, cost_file: str | None, longest: int, ranks: Ranks
) -> WorkModel:
    """The work of a sequence: measured, or the floating-point operations of what the model trains.

    All ranks call it, and get the same numbers; rank 0 reads the file.

    Args:
        model: with the layers that it has now, some of them maybe frozen.
        cost_file: see `batching.cost_file`.
        longest: tokens of the longest sequence.
        ranks: the processes of the run.

    Raises:
        ConfigError: the file cannot be read or is none.
    """
    if cost_file is None:
        return WorkModel(*flops_by_length(model.num_flops, longest))

    def read() -> tuple[float, float]:
        try:
            linear, quadratic, _ = read_cost(cost_file)
            WorkModel(linear, quadratic)  # which checks them
        except (OSError, ValueError) as error:
            raise ConfigError("batching.cost_file", str(error)) from error
        return linear, quadratic

    return WorkModel(*ranks.on_first(read))
