"""The attention implementation "bert_unpad_flash": transformers' own flash attention path over the
functions of `bert_unpad.flash`.

    AutoModel.from_pretrained(name, attn_implementation="bert_unpad_flash")

serves every model whose attention can be chosen, on CPUs and GPUs, in float32 too: padded batches,
whose attention runs on packed tokens, and packed ones with `cu_seq_lens_q`, with dropout, windows,
fewer heads of keys, causal and cross attention. Positions that restart are not enough: some models
(DistilBERT, ModernBERT, ESM-2, Jina v3) do not show them to their attention. `docs/models.md` lists
the models that were tried.

The path has faults of its own, which show nowhere: masks that are not of padding are dropped, and
cross attention takes the queries that the mask of the keys keeps. Here the first raise, and the
second is computed right.

transformers knows a flash implementation by "flash" in its name, and finds the functions of those
that it does not know in a private function, which `register` extends.
"""

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn

from bert_unpad import flash

NAME = "bert_unpad_flash"
_OLD_NAME = "bert_unpad"
# Attention that has these is refused: transformers would leave them out without a word.
_NOT_COMPUTED = ("s_aux", "softcap", "position_bias", "block_table")
# What masks may be made of, by the names of transformers' functions: what attention gets as
# `is_causal`, `sliding_window`, positions or lengths. All else would be left out too.
_MASKS = (
    *("causal_mask_function", "bidirectional_mask_function", "and_masks", "or_masks"),
    *("sliding_window_overlay", "sliding_window_bidirectional_overlay", "chunked_overlay"),
    *("packed_sequence_mask_function", "remap_positions_for_packed_sequence"),
    *("Gemma3TextModel", "_bidirectional_window_overlay"),  # bidirectional in place of causal
)
# Attention of decoders that says it is not causal, and leaves that to the mask: by the name of the
# module or the type of the model.
_CAUSAL_BY_MASK = (
    *("BigBirdPegasusDecoderAttention", "Llama4TextAttention", "NllbMoeAttention"),
    *("PegasusXAttention", "aimv2_text_model"),
)
# Attention whose queries may be other tokens than its keys, by prefix, where the module does not
# say so; or is read at padding: SigLIP's text model takes the last column, and Nemotron's
# upsampling mixes neighbours.
_ALL_QUERIES = ("Blip2", "InstructBlip", "Moonshine", "Nemotron3", "Sam3", "Siglip")
# Models of which a packed token depends on others outside of attention, by prefix: MobileBERT
# embeds neighbours together, the others count positions from the beginning of the row.
_ROWS = ("MobileBert", "Bart", "Blenderbot", "M2M100", "MBart", "Marian", "PLBart", "Pegasus")
_ADVICE = 'choose attn_implementation="sdpa" or "eager"'


def register() -> None:
    """Registers the implementation and its mask function with transformers.

    Raises:
        ImportError: this version of transformers looks flash attention's functions up elsewhere.
    """
    import transformers.modeling_flash_attention_utils as utils
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    if not hasattr(utils, "_lazy_imports"):
        raise ImportError(
            f"{NAME}: expected transformers.modeling_flash_attention_utils to have _lazy_imports"
        )
    if not isinstance(utils._lazy_imports, _Imports):
        utils._lazy_imports = _Imports(utils._lazy_imports)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _mask)
    AttentionInterface.register(_OLD_NAME, _renamed)
    AttentionMaskInterface.register(_OLD_NAME, _renamed)


def _renamed(*_arguments: object, **_more: object) -> NoReturn:
    raise ValueError(
        f"attn_implementation: expected {NAME!r}, which computes packed input too, got the earlier "
        f"name {_OLD_NAME!r}"
    )


class _Imports:
    """transformers' `_lazy_imports`, which knows one more name."""

    def __init__(self, stock: Callable) -> None:
        self._stock = stock

    def __call__(self, implementation: str | None, *args, **kwargs) -> tuple:
        if implementation != NAME:
            return self._stock(implementation, *args, **kwargs)
        import transformers.modeling_flash_attention_utils as utils

        functions = flash.flash_attn_func, flash.flash_attn_varlen_func
        padding = utils._pad_input, utils._unpad_input
        # Newer versions of transformers expect a function for caches in pages in third place.
        pages = [None] if hasattr(utils, "_flash_with_kvcache_fn") else []
        return (*functions, *pages, *padding)


def _mask(*args, mask_function: Callable, **kwargs) -> Tensor | None:
    """transformers' `flash_attention_mask`, which see for the arguments.

    Raises:
        ValueError: the mask is made of more than causality, windows, sequences and padding.
    """
    from transformers.masking_utils import flash_attention_mask

    if not torch.compiler.is_compiling() and (name := _unknown_part(mask_function)):
        raise ValueError(
            f"mask: expected one of causality, windows and padding, which is all that {NAME!r} "
            f"computes, got {name}; {_ADVICE}"
        )
    mask = flash_attention_mask(*args, **kwargs | {"mask_function": mask_function})
    # SigLIP 2 pools by a PyTorch module, which takes a mask of pairs.
    model_type = getattr(kwargs.get("config"), "model_type", None)
    if model_type == "siglip2_vision_model" and kwargs.get("q_length") == 1 and mask is not None:
        return mask[:, None, None]
    return mask


def _unknown_part(mask_function: Callable) -> str | None:
    """Returns the name of a function that a mask is made of and `_MASKS` lacks, or None."""
    name = getattr(mask_function, "__qualname__", repr(mask_function)).split(".")[0]
    if name not in _MASKS:
        return name
    cells = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    parts = [part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,))]
    return next(filter(None, (_unknown_part(part) for part in parts if callable(part))), None)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' `flash_attention_forward`, which see for the arguments.

    Raises:
        ValueError: attention has sinks, a soft cap, a bias or a cache in pages; the mask is one of
            pairs of tokens, or says alone that attention is causal; or the input is packed and the
            model mixes its tokens elsewhere.
    """
    from transformers.integrations.flash_attention import flash_attention_forward

    if type(module).__name__.startswith("Moonshine"):  # which says False where it has a mask
        kwargs["is_causal"] = module.is_causal
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    _refuse(module, attention_mask, **kwargs)
    kwargs.pop("packing", None)
    if kwargs.get("sliding_window") and not causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{type(module).__name__}: sliding_window: expected None where queries are not the "
            f"tokens of the keys, as windows of {NAME!r} are counted from the last key; {_ADVICE}"
        )
    if attention_mask is None or causal or not _takes_all_queries(module, query, key):
        return flash_attention_forward(module, query, key, value, attention_mask, **kwargs)
    # Packed here: transformers would leave out the queries that the mask of the keys leaves out.
    batch, _, queries, _ = query.shape
    kept = attention_mask.bool()
    tokens = (x[:, :, : kept.shape[1]].transpose(1, 2)[kept] for x in (key, value))
    query, key, value = (
        x.transpose(0, 1)[None] for x in (query.transpose(1, 2).flatten(0, 1), *tokens)
    )
    lengths = kept.sum(1, dtype=torch.int32)
    kwargs |= {
        "cu_seq_lens_q": torch.arange(batch + 1, dtype=torch.int32, device=query.device) * queries,
        "cu_seq_lens_k": nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        "max_length_q": queries,
        "max_length_k": int(lengths.max()),
    }
    out, _ = flash_attention_forward(module, query, key, value, None, **kwargs)
    return out.view(batch, queries, *out.shape[2:]), None


def _refuse(module: nn.Module, attention_mask: Tensor | None, **kwargs) -> None:
    """Raises ValueError for what `attention` does not compute."""
    name, config = type(module).__name__, getattr(module, "config", None)
    for argument in _NOT_COMPUTED:
        if kwargs.get(argument) is not None:
            raise ValueError(
                f"{name}: {argument}: expected None, which is all that {NAME!r} computes; {_ADVICE}"
            )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"{name}: attention_mask: expected shape [batch, tokens], which is all that {NAME!r} "
            f"takes, got {list(attention_mask.shape)}"
        )
    if name in _CAUSAL_BY_MASK or getattr(config, "model_type", None) in _CAUSAL_BY_MASK:
        raise ValueError(
            f"{name}: is_causal: expected True of a decoder, got False, as its mask makes it "
            f"causal, which {NAME!r} does not take; {_ADVICE}"
        )
    # A call of `unpad` sees to it that sequences do not see one another outside of attention.
    packed = kwargs.get("cu_seq_lens_q") is not None and "packing" not in kwargs
    # ESM-2 scales a row by how many of its tokens are masked.
    scaled = name.startswith("Esm") and getattr(config, "token_dropout", False)
    if packed and (scaled or name.startswith(_ROWS)):
        raise ValueError(
            f"{name}: cu_seq_lens_q: expected a padded batch, as a token of this model depends on "
            "others outside of its attention, got a packed one"
        )


def _takes_all_queries(module: nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether attention that is not causal needs the queries that the mask of the keys leaves out:
    they are other tokens, or their results are read."""
    name = type(module).__name__
    return (
        query.shape[2] != key.shape[2]
        or "Cross" in name
        or name.startswith(_ALL_QUERIES)
        or getattr(module, "is_decoder", False)
    )
