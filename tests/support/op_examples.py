"""Arguments of every operator on `torch.ops.bert_unpad`, for what has to hold for all of them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bert_unpad import ops as _registers_them  # noqa: F401
from bert_unpad.batch import VarlenBatch

TOKENS, HEADS, WIDTH = 8, 2, 16
HIDDEN = HEADS * WIDTH


def operator_names() -> list[str]:
    """All operators of csrc/schemas.cpp, without the namespace; `hf_*` are Python's own."""
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    return sorted(op for space, op in names if space == "bert_unpad" and not op.startswith("hf_"))


def example(name: str) -> list[Any]:
    """Fresh arguments of an operator, on a CPU, in the order of its schema; nothing is left out."""
    return list(_examples()[name])


def tensor_arguments(name: str, args: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the tensors among `args`; of a list of tensors the last one."""
    schema = getattr(torch.ops.bert_unpad, name).default._schema
    for argument, value in zip(schema.arguments, args, strict=True):
        if isinstance(value, list) and value and isinstance(value[-1], Tensor):
            yield f"{argument.name}[{len(value) - 1}]", value[-1]
        elif isinstance(value, Tensor):
            yield argument.name, value


def replaced(args: list[Any], old: Tensor, new: Tensor) -> list[Any]:
    """`args` with `new` where `old` is, also within lists."""
    return [
        [new if t is old else t for t in value]
        if isinstance(value, list)
        else (new if value is old else value)
        for value in args
    ]


def _examples() -> dict[str, tuple]:
    def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape or (TOKENS, HIDDEN)).to(dtype)

    def low() -> Tensor:
        return rows(dtype=torch.bfloat16)

    def scalar() -> Tensor:
        return torch.ones(())

    def two(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [rows(3, dtype=dtype), rows(4, dtype=dtype)]

    batch = VarlenBatch.from_lengths([3, 5])
    rng, p = torch.tensor([1, 2]), 0.5
    # Copies: memory that numpy owns cannot be freed.
    schedule = (batch.order.clone(), batch.group_sizes.clone())
    cu_q, cu_k = batch.cu_seqlens.clone(), batch.cu_seqlens.clone()
    bias = (
        torch.zeros(3, dtype=torch.int32),
        rows(2, HEADS),
        *(rows(TOKENS, HEADS, 2) for _ in "12"),
    )
    window = (2, 1)
    positions = torch.arange(TOKENS, dtype=torch.int32)
    attend = (5, 0.25, p, rng, *schedule, 0, *window, *bias)
    cross = (cu_q, cu_k, 5, 5, 0.25, p, rng, *schedule, *window, positions, *bias)
    qkv, q, kv = (rows(TOKENS, *shape, WIDTH) for shape in [(3, HEADS), (HEADS,), (2, HEADS)])
    out, dout, lse = rows(*q.shape), rows(*q.shape), rows(HEADS, TOKENS)
    x, dy, vector = rows(), rows(), lambda: rows(HIDDEN)
    statistics = (rows(TOKENS), rows(TOKENS))
    layer = (
        [
            *(t for _ in range(7) for t in (rows(HIDDEN, HIDDEN), vector())),
            *(vector() for _ in range(6)),
        ],
        [HEADS, HEADS, WIDTH, HIDDEN, 0, 0, 0, -1, -1],
        [0.25, 1e-5, 1e-5, 1e-5, 0.0, 1.0],
    )
    tables = (*(torch.zeros(TOKENS, dtype=torch.int64) for _ in range(3)), *(rows() for _ in "123"))
    affines = [vector() for _ in range(4)]
    logits = (rows(), torch.zeros(TOKENS, dtype=torch.int64))
    loss = (scalar(), *logits, rows(TOKENS), HIDDEN, -100)
    weight = rows(WIDTH, HIDDEN)
    eight = [rows(WIDTH, HIDDEN, dtype=torch.float8_e4m3fn) for _ in range(2)]

    def update(scalars: tuple) -> tuple:
        lists = (two(torch.bfloat16), *(two() for _ in range(4)), [scalar(), scalar()])
        return (*lists, *scalars, 0.9, 0.99, 1e-6, 0.01, 1.0)

    steps, norms = torch.zeros((), dtype=torch.int64), rows(2)
    adam = update((scalar(), scalar(), scalar(), steps))
    lamb = update((scalar(), scalar(), scalar(), norms, steps))
    signs = (torch.zeros(2, 4, dtype=torch.uint8), rows(2), rows(30))
    rotation = (rows(TOKENS, HEADS, WIDTH), torch.arange(TOKENS), HEADS, 1e4, WIDTH, False, 1.0)
    apply = (two(torch.bfloat16), *(two() for _ in range(4)), rows(2, 3), rows(2, 4))
    return {
        "varlen_attention": (qkv, cu_q, *attend),
        "varlen_attention_backward": (dout, qkv, out, lse, cu_q, *attend, True),
        "varlen_cross_attention": (q, kv, *cross),
        "varlen_cross_attention_backward": (dout, q, kv, out, lse, *cross, True),
        "dropout_add_layer_norm": (
            *(x, vector(), dy, vector(), vector(), p, 1e-5, rng, False, True),
        ),
        "dropout_add_layer_norm_fp8": (
            *(x, vector(), dy, vector(), vector(), p, 1e-5, rng, False, True),
            *(scalar(), rows(1024), True),
        ),
        "dropout_add_layer_norm_backward": (
            *(dy, x, vector(), rows(), vector(), *statistics, p, rng, True),
        ),
        "dropout_add_norm_sum_backward": (
            *(dy, rows(), x, vector(), vector(), *statistics, p, rng, True, True),
        ),
        "bias_gelu": (x, vector(), False),
        "bias_gelu_backward": (dy, x, vector(), False),
        "bias_gelu_fp8": (x, vector(), False, scalar(), rows(1024), True),
        "bias_gelu_fp8_backward": (dy, x, vector(), False, scalar(), rows(1024), True),
        "glu": (x, vector(), 2),
        "glu_backward": (rows(TOKENS, HIDDEN // 2), x, vector(), 2),
        "rotary_": (*rotation, False),
        "rotary": (*rotation, True),
        "linear": (x, weight, rows(WIDTH), False),
        "linear_dgrad": (rows(TOKENS, WIDTH), weight, x, None),
        "linear_wgrad": (rows(TOKENS, WIDTH), x, True, torch.float32),
        "linear_wgrad_": (rows(TOKENS, WIDTH), x, weight, True, True),
        "packed_product_": (rows(), x, rows(HIDDEN, HIDDEN), rows(HIDDEN), rows()),
        "packed_wgrad_": (rows(TOKENS, HIDDEN), x, rows(HIDDEN, HIDDEN), False, True),
        "encoder_layers": (
            *(x, cu_q, 5, positions, torch.tensor([0, 4]), torch.tensor([0, 1, 2]).int(), *layer),
        ),
        "encoder_model": (
            *(tables[0][None], tables[1][None] == 0, tables[2][None], [*tables[3:], *affines]),
            *(0, -1, [1e-5, 1e-5], *layer, 0, False),
        ),
        "encoder_project": (x, *layer),
        "encoder_finish": (x, dy, *layer),
        "encoder_pack": (rows(HIDDEN, HIDDEN), torch.int8),
        "quantize_fp8": (x, False, True),
        "quantize_fp8_scaled": (x, False, True, scalar(), rows(1024), True),
        "quantize_weights_fp8_": (
            *([weight], [eight[0]], [rows(HIDDEN, WIDTH, dtype=torch.float8_e4m3fn)], [scalar()]),
        ),
        "fp8_product": (
            *(*eight, scalar(), scalar(), rows(WIDTH, dtype=torch.bfloat16), torch.float32, False),
        ),
        "fp8_product_": (*eight, scalar(), scalar(), rows(WIDTH, WIDTH), True),
        "embedding_layer_norm": (*tables, vector(), vector(), p, 1e-5, torch.float32, rng),
        "embedding_layer_norm_backward": (dy, *tables, vector(), *statistics, p, rng),
        "masked_cross_entropy": (*logits, HIDDEN, -100),
        "masked_cross_entropy_backward": loss,
        "masked_cross_entropy_backward_": loss,
        "clip_bucket_": (x, 1.0, scalar(), 1.0),
        "clip_bucket_into": (x, rows(dtype=torch.bfloat16), dy, 1.0, scalar(), 1.0),
        "multi_tensor_l2norm": (two(),),
        "multi_tensor_scale_": (two(), scalar()),
        "adam_": (*adam, True, True, False),
        "lamb_": (*lamb, True, True, True, True, False),
        "lamb_moments_": (*lamb, True, True, True, False),
        "lamb_apply_": (*apply, 0.9, 1e-6, 0.01, True, False),
        "stable_adamw_": (*adam, False),
        "stable_adamw_moments_": (*adam, False),
        "stable_adamw_apply_": (*apply, 1e-6, 0.01),
        "frozen_adam_": (
            *(two(torch.bfloat16), *(two() for _ in range(4)), [scalar(), scalar()], scalar()),
            *(rows(2), scalar(), scalar(), steps, 0.9, 0.99, 1e-6, 0.01, False, True),
        ),
        "frozen_lamb_sums_": (*(two() for _ in range(5)), scalar(), 0.9, 0.99, 1e-6, 0.01),
        "sign_scale": (x, dy),
        "sign_pack_": (rows(30), rows(30), torch.zeros(4, dtype=torch.uint8), scalar(), scalar()),
        "sign_mean_": (*signs, 0.5, True, scalar()),
        "sign_unpack_": (torch.zeros(2, 4, dtype=torch.uint8), rows(2), rows(60)),
    }
