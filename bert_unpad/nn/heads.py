"""The heads on top of the encoder in pretraining; `EncoderConfig.heads` says which a model has."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.nn.config_checks import GELU
from bert_unpad.nn.norms import make_norm, normalise


class Pooler(nn.Module):
    """tanh(dense(x)) of the first token of each sequence."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Pools the hidden states of first tokens: [N, hidden] -> [N, hidden]."""
        return torch.tanh(ops.linear(x, self.dense.weight, self.dense.bias))


def _activate(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """act(x + bias): [rows, features] -> [rows, features]."""
    if (approximate := GELU.get(act)) is not None:
        return ops.bias_gelu(x, bias, approximate=approximate)
    x = x if bias is None else x + bias.to(x.dtype)
    return {"silu": F.silu, "relu": F.relu}[act](x)


class MlmTransform(nn.Module):
    """norm(act(dense(x))), the first part of the masked-token head."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_width
        self.dense = nn.Linear(config.hidden_size, width, bias=config.head_bias)
        self.LayerNorm = make_norm(config, width)
        self.act = config.head_act or config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        """Transforms hidden states: [rows, hidden] -> [rows, embedding width]."""
        x = _activate(ops.linear(x, self.dense.weight), self.dense.bias, self.act)
        return normalise(self.LayerNorm, x)


class MlmHead(nn.Module):
    """The masked-token head: logits over the vocabulary.

    The decoder is the word embedding, or a weight of its own without `tie_word_embeddings`.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        if config.mlm_transform:
            self.transform = MlmTransform(config)
        self.bias: nn.Parameter | None = None
        if config.decoder_bias:
            self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size))
        if not config.tie_word_embeddings:
            self.decoder = nn.Linear(config.embedding_width, config.padded_vocab_size, bias=False)
        self._transforms, self._tied = config.mlm_transform, config.tie_word_embeddings

    def forward(self, x: Tensor, word_embeddings: Tensor) -> Tensor:
        """Computes the logits.

        Args:
            x: hidden states, [rows, hidden].
            word_embeddings: the decoder's weight if it is tied, [padded_vocab_size, embedding
                width].

        Returns:
            Logits, [rows, padded_vocab_size]; the loss ignores the padded columns.
        """
        x = self.transform(x) if self._transforms else x
        weight = word_embeddings if self._tied else self.decoder.weight
        return ops.linear(x, weight, self.bias)


class SentenceHead(nn.Linear):
    """A linear layer whose weights may stay fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits of a relation of two sentences: [N, hidden] -> [N, 2]."""
        return ops.linear(x, self.weight, self.bias)


class ReplacedTokenHead(nn.Module):
    """ELECTRA's discriminator (Clark et al., 2020, arXiv:2003.10555): one logit per token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense_prediction = nn.Linear(config.hidden_size, 1)
        self.act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        """Computes the logits that tokens are replaced: [rows, hidden] -> [rows]."""
        x = _activate(ops.linear(x, self.dense.weight), self.dense.bias, self.act)
        last = self.dense_prediction
        return ops.linear(x, last.weight, last.bias).squeeze(-1)


class PreTrainingHeads(nn.Module):
    """The heads of one model, which Hugging Face's BERT names `cls`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        if "mlm" in config.heads:
            self.predictions = MlmHead(config)
        if "nsp" in config.heads:
            self.seq_relationship = SentenceHead(config.hidden_size, 2)
        if "rtd" in config.heads:
            self.detector = ReplacedTokenHead(config)

    def next_sentence(self, pooled: Tensor) -> Tensor:
        """Computes sentence logits [N, 2] (0 = is next, or in order) of pooled [N, hidden]."""
        return self.seq_relationship(pooled)
