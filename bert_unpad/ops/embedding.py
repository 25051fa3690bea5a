"""Embeddings + LayerNorm + dropout: function, fake kernels and autograd over the C++ operator."""

import torch
from torch import Tensor

from bert_unpad.ops import rng as _rng
from bert_unpad.ops.norm import LAYER_NORM_EPS
from bert_unpad.ops.registration import argument_names, register_autograd, register_fake
from bert_unpad.ops.tensor_checks import check_tensors

_ops = torch.ops.bert_unpad


def embedding_layer_norm(
    input_ids: Tensor,
    position_ids: Tensor,
    token_type_ids: Tensor,
    word: Tensor,
    position: Tensor,
    token_type: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    *,
    dropout_p: float = 0.0,
    eps: float = LAYER_NORM_EPS,
    out_dtype: torch.dtype | None = None,
    rng: Tensor | None = None,
) -> Tensor:
    """dropout(LayerNorm(word[input_ids] + position[position_ids] + token_type[token_type_ids])).

    The embeddings of BERT (Devlin et al., NAACL 2019), for real tokens only. The backward pass
    sorts the tokens by id and sums each table row in token order, without atomics. So it gives the
    same bits with any number of threads. The tables' gradients are dense.

    Args:
        input_ids, position_ids, token_type_ids: int64 [tokens].
        word, position, token_type: [entries, hidden], all float32 or all of the output's dtype.
        ln_weight, ln_bias: [hidden], both float32 or both of the output's dtype.
        dropout_p: probability in [0, 1) that an element of the output is dropped. Pass 0 in
            evaluation.
        eps: added to the variance; BERT's is 1e-12.
        out_dtype: float32, bfloat16 or float16; None means the tables' dtype.
        rng: int64 [2] (seed, offset) on the data's device; None draws one from PyTorch's default
            generator. The mask is a pure function of it and of (token, column).

    Returns:
        Hidden states, [tokens, hidden], of out_dtype.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: a shape, dtype, device or probability is wrong, or on a CPU an id lies outside
            its table; the message names it.
    """
    ids = {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "token_type_ids": token_type_ids,
    }
    tables = {"word": word, "position": position, "token_type": token_type}
    norm = {"ln_weight": ln_weight, "ln_bias": ln_bias}
    check_tensors("embedding_layer_norm", {**ids, **tables, **norm}, {"rng": rng})
    rng = _rng.draw(dropout_p, rng, word.device)
    return _ops.embedding_layer_norm(
        *(t.contiguous() for t in ids.values()),
        *tables.values(),
        *norm.values(),
        dropout_p,
        eps,
        word.dtype if out_dtype is None else out_dtype,
        rng,
    )[0]


@register_fake("embedding_layer_norm")
def _(input_ids, word, out_dtype):
    tokens = input_ids.shape[0]
    statistics = [word.new_empty((tokens,), dtype=torch.float32) for _ in range(2)]
    return word.new_empty((tokens, word.shape[1]), dtype=out_dtype), *statistics


@register_fake("embedding_layer_norm_backward")
def _(word, position, token_type, weight):
    tables = [t.new_empty(t.shape) for t in (word, position, token_type)]
    return *tables, weight.new_empty(weight.shape), weight.new_empty(weight.shape)


_READ = argument_names("embedding_layer_norm_backward")[1:]


def _backward(kept, dy, _dmean, _drstd):
    arguments = (getattr(kept, name) for name in _READ)
    gradients = _ops.embedding_layer_norm_backward(dy.contiguous(), *arguments)
    names = ("word", "position", "token_type", "weight", "bias")
    return dict(zip(names, gradients, strict=True))


register_autograd("embedding_layer_norm", _backward, _READ, constant=["mean", "rstd"])
