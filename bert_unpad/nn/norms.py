"""The norms of an encoder: LayerNorm with or without bias, or RMSNorm."""

from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.ops.delayed_scaling import DelayedScale
from bert_unpad.ops.fp8 import RoundedInput
from bert_unpad.ops.norm import NormOptions
from bert_unpad.ops.norm_fp8 import dropout_add_norm_fp8

Norm = nn.LayerNorm | nn.RMSNorm


def make_norm(config: EncoderConfig, width: int) -> Norm:
    """A norm of the configuration's kind over `width` features."""
    if config.norm == "rms_norm":
        return nn.RMSNorm(width, eps=config.layer_norm_eps)
    return nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.norm_bias)


def normalise(norm: Norm, x: Tensor) -> Tensor:
    """The norm of x: [rows, width] -> [rows, width], of x's dtype."""
    if isinstance(norm, nn.RMSNorm):
        return ops.rms_norm(x, norm.weight, norm.eps)  # type: ignore[arg-type]  # never None
    return ops.layer_norm(x, norm.weight, norm.bias, norm.eps)


def dropout_add_norm(
    norm: Norm,
    x: Tensor,
    residual: Tensor,
    x_bias: Tensor | None,
    dropout_p: float,
    rng: Tensor | None,
    return_sum: bool,
    scale: DelayedScale | None = None,
) -> Tensor | RoundedInput | tuple[Tensor, Tensor | RoundedInput]:
    """The norm of residual + dropout(x + x_bias), all [rows, width].

    Args:
        norm: what to normalise with.
        x, residual, x_bias, dropout_p, rng: as in `ops.dropout_add_layer_norm`.
        return_sum: return the sum too, before the norm.
        scale: round the norm too, by the scale of the linear layer that takes it.
    """
    eps: float = norm.eps  # type: ignore[assignment]  # None only if made so, see `make_norm`
    more: NormOptions = {
        "dropout_p": dropout_p,
        "eps": eps,
        "x_bias": x_bias,
        "rng": rng,
        "return_sum": return_sum,
    }
    if scale is not None:
        rms = isinstance(norm, nn.RMSNorm)
        bias = None if isinstance(norm, nn.RMSNorm) else norm.bias
        return dropout_add_norm_fp8(x, residual, norm.weight, bias, scale, rms=rms, **more)
    if isinstance(norm, nn.RMSNorm):
        return ops.dropout_add_rms_norm(x, residual, norm.weight, **more)
    return ops.dropout_add_layer_norm(x, residual, norm.weight, norm.bias, **more)
