"""Functions over the operators of `torch.ops.bert_unpad`.

Activations are float32, bfloat16 or float16, packed as [tokens, ...]. Statistics, softmax and sums
are computed in float32. Every operator works under `torch.compile(fullgraph=True)`. All have
gradients, except `multi_tensor_l2norm`, `sign_scale` and the in-place operators, whose names end in
an underscore; of these only `rotary_` has one. (`accumulate_in_place` and `time_algorithms` are
settings.) Second derivatives and forward-mode differentiation
raise a NotImplementedError; only `linear` supports both where it uses PyTorch's own product.
"""

from bert_unpad import _library

_library.require()  # before anything that needs a compiled module

from bert_unpad.ops.attention import varlen_attention, varlen_cross_attention  # noqa: E402
from bert_unpad.ops.clip import clip_bucket_  # noqa: E402
from bert_unpad.ops.embedding import embedding_layer_norm  # noqa: E402
from bert_unpad.ops.feed_forward import glu_mlp, mlp  # noqa: E402
from bert_unpad.ops.fp8 import fp8_linear  # noqa: E402
from bert_unpad.ops.gelu import bias_gelu  # noqa: E402
from bert_unpad.ops.glu import glu  # noqa: E402
from bert_unpad.ops.linear_layer import linear, linear_residual  # noqa: E402
from bert_unpad.ops.loss import masked_cross_entropy  # noqa: E402
from bert_unpad.ops.matmul import accumulate_in_place, time_algorithms  # noqa: E402
from bert_unpad.ops.norm import (  # noqa: E402
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    layer_norm,
    rms_norm,
)
from bert_unpad.ops.norm_fp8 import dropout_add_norm_fp8 as _registers_it  # noqa: E402, F401
from bert_unpad.ops.optim import (  # noqa: E402
    adam_,
    frozen_adam_,
    frozen_lamb_sums_,
    lamb_,
    multi_tensor_l2norm,
    multi_tensor_scale_,
    stable_adamw_,
)
from bert_unpad.ops.position_bias import (  # noqa: E402
    PositionBias,
    alibi_bias,
    alibi_slopes,
    deberta_buckets,
    t5_buckets,
)
from bert_unpad.ops.rotary import rotary_  # noqa: E402
from bert_unpad.ops.sign_compress import (  # noqa: E402
    sign_mean_,
    sign_pack_,
    sign_scale,
    sign_unpack_,
)

__all__ = [
    "PositionBias",
    "accumulate_in_place",
    "adam_",
    "alibi_bias",
    "alibi_slopes",
    "bias_gelu",
    "clip_bucket_",
    "deberta_buckets",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "embedding_layer_norm",
    "fp8_linear",
    "frozen_adam_",
    "frozen_lamb_sums_",
    "glu",
    "glu_mlp",
    "lamb_",
    "layer_norm",
    "linear",
    "linear_residual",
    "masked_cross_entropy",
    "mlp",
    "multi_tensor_l2norm",
    "multi_tensor_scale_",
    "rms_norm",
    "rotary_",
    "sign_mean_",
    "sign_pack_",
    "sign_scale",
    "sign_unpack_",
    "stable_adamw_",
    "t5_buckets",
    "time_algorithms",
    "varlen_attention",
    "varlen_cross_attention",
]
