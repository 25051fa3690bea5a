"""A checkpoint between two layouts: tensors under Hugging Face's names, and a configuration."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bert_unpad.nn import weights
from bert_unpad.nn.config import BertConfig


class Conversion(dict[str, Tensor]):
    """Tensors of a BERT under Hugging Face's names, and its configuration.

    Raises:
        ValueError: the configuration is that of another family.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], config: BertConfig, notes: tuple[str, ...] = ()
    ) -> None:
        if config.model_type != "bert":
            raise ValueError(f"model_type: expected 'bert', got {config.model_type!r}")
        super().__init__(tensors)
        self.config = config
        self.notes = notes
        """Messages for the user about what was left out on purpose."""

    def report(self) -> weights.LoadReport:
        """Returns the missing and unexpected tensors of a BertForPreTraining."""
        wanted = expected_shapes(self.config)
        return weights.LoadReport(
            missing=tuple(sorted(wanted.keys() - self.keys())),
            unexpected=tuple(sorted(self.keys() - wanted.keys())),
        )

    def check_tensors(self) -> None:
        """Raises a ValueError that names the tensors of a wrong shape or dtype."""
        wanted = expected_shapes(self.config)
        common = sorted(wanted.keys() & self.keys())
        weights.check_tensors(self, {name: wanted[name] for name in common})


def expected_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all parameters of BertForPreTraining, by Hugging Face's names."""
    from bert_unpad.nn import BertForPreTraining

    with torch.device("meta"):
        model = BertForPreTraining(config)
    return {name: tuple(t.shape) for name, t in weights.to_hf_state_dict(model).items()}
