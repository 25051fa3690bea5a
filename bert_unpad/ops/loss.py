"""Cross-entropy of masked tokens: function, fake kernels and autograd over the C++ operator."""

import torch
from torch import Tensor

from bert_unpad.ops.registration import (
    first_order,
    register_autograd,
    register_fake,
    register_in_place,
)
from bert_unpad.ops.tensor_checks import check_tensors

_ops = torch.ops.bert_unpad


def masked_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sums the cross-entropy of all rows, and counts the rows that predict their label.

    One pass over the logits computes both, and the log-sum-exp that the backward pass needs
    (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The results are
    sums, not means, so that the caller can divide by the number of labels of all ranks.

    Args:
        logits: [rows, columns], float32, bfloat16 or float16.
        labels: int64 [rows], each `ignore_index` or in [0, vocab_size).
        vocab_size: number of columns that count; later columns are padding, which is ignored and
            gets a zero gradient. None counts all columns.
        ignore_index: rows with this label are ignored and get a zero gradient.
        inplace_backward: write the gradient over the logits, which saves a buffer of their size.
            Only for logits that nothing else reads: the backward pass of any other reader raises
            an error, as does a second backward pass through this operator. Has no effect under
            `torch.compile`, which allocates its buffers itself.

    Returns:
        The loss, a float32 scalar, and the number of rows whose label has the largest logit (the
        first of equal ones counts as the largest), an int64 scalar.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: a shape, dtype, device or label is wrong; the message names it.
    """
    check_tensors("masked_cross_entropy", {"logits": logits, "labels": labels})
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    arguments = (logits.contiguous(), labels.contiguous(), vocab_size, ignore_index)
    if inplace_backward and not torch.compiler.is_compiling():
        return _InplaceBackward.apply(*arguments)
    loss_sum, correct, _lse = _ops.masked_cross_entropy(*arguments)
    return loss_sum, correct


class _InplaceBackward(torch.autograd.Function):
    """The operator with the backward pass that overwrites the logits, for eager mode."""

    @staticmethod
    def forward(ctx, logits, labels, vocab_size, ignore_index):
        loss_sum, correct, lse = _ops.masked_cross_entropy(logits, labels, vocab_size, ignore_index)
        ctx.save_for_backward(logits, labels, lse)
        ctx.scalars = (vocab_size, ignore_index)
        ctx.mark_non_differentiable(correct)
        ctx.set_materialize_grads(False)
        return loss_sum, correct

    @staticmethod
    @first_order("masked_cross_entropy")
    def backward(ctx, saved, dloss, _dcorrect):
        if dloss is None:
            return None, None, None, None
        logits, labels, lse = saved
        dlogits = logits.detach()
        _ops.masked_cross_entropy_backward_(dloss, dlogits, labels, lse, *ctx.scalars)
        torch.autograd.graph.increment_version(dlogits)  # so that a later read of it is an error
        return dlogits, None, None, None


@register_fake("masked_cross_entropy")
def _(logits, labels):
    return (
        logits.new_empty((), dtype=torch.float32),
        labels.new_empty(()),
        logits.new_empty(labels.shape, dtype=torch.float32),
    )


@register_fake("masked_cross_entropy_backward")
def _(logits):
    return logits.new_empty(logits.shape)


def _backward(kept, dloss, _dcorrect, _dlse):
    dlogits = _ops.masked_cross_entropy_backward(
        dloss, kept.logits, kept.labels, kept.lse, kept.vocab_size, kept.ignore_index
    )
    return {"logits": dlogits}


register_in_place("masked_cross_entropy_backward_")
register_autograd(
    "masked_cross_entropy",
    _backward,
    ["logits", "labels", "lse", "vocab_size", "ignore_index"],
    constant=["correct", "lse"],
)
