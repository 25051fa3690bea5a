"""The attention implementation "bert_unpad_flash": transformers' own flash attention path over the
functions of `bert_unpad.flash`.

    AutoModel.from_pretrained(name, attn_implementation="bert_unpad_flash")

serves every model whose attention can be chosen, on CPUs and GPUs, in float32 too: padded batches,
whose attention runs on packed tokens, and packed ones with `cu_seq_lens_q`, with dropout, windows,
fewer heads of keys and causal attention. Positions that restart are not enough: some models
(DistilBERT, ModernBERT, ESM-2, Jina v3) do not show them to their attention.

transformers knows a flash implementation by "flash" in its name, and finds the functions of those
that it does not know in a private function, which `register` extends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import Tensor, nn

from bert_unpad import flash

NAME = "bert_unpad_flash"
_OLD_NAME = "bert_unpad"
# What says that sequences do not see one another outside of attention, in calls from `unpad`.
APART = "bert_unpad_apart"
# Attention that has these is refused: transformers would leave them out without a word.
_NOT_COMPUTED = ("s_aux", "softcap", "position_bias", "block_table")


def register() -> None:
    """Registers the implementation and its mask function with transformers.

    Raises:
        ImportError: this version of transformers looks flash attention's functions up elsewhere.
    """
    import transformers.modeling_flash_attention_utils as utils
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    if not hasattr(utils, "_lazy_imports"):
        raise ImportError(
            f"{NAME}: expected transformers.modeling_flash_attention_utils to have _lazy_imports"
        )
    if not isinstance(utils._lazy_imports, _Imports):
        utils._lazy_imports = _Imports(utils._lazy_imports)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
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
            pairs of tokens; or the input is packed and the model mixes its tokens elsewhere.
    """
    from transformers.integrations.flash_attention import flash_attention_forward

    name = type(module).__name__
    for argument in _NOT_COMPUTED:
        if kwargs.get(argument) is not None:
            raise ValueError(
                f"{name}: {argument}: expected None, which is all that {NAME!r} computes; choose "
                'attn_implementation="sdpa" or "eager"'
            )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"{name}: attention_mask: expected shape [batch, tokens], which is all that {NAME!r} "
            f"takes, got {list(attention_mask.shape)}"
        )
    apart = kwargs.pop(APART, False)
    if kwargs.get("cu_seq_lens_q") is not None and not apart and _mixes_tokens(module):
        raise ValueError(
            f"{name}: cu_seq_lens_q: expected a padded batch, as a token of this model depends on "
            "others outside of its attention, got a packed one"
        )
    return flash_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _mixes_tokens(module: nn.Module) -> bool:
    """Whether packed sequences would see one another: MobileBERT embeds neighbouring tokens
    together, ESM-2 scales a row by how many of its tokens are masked."""
    name, config = type(module).__name__, getattr(module, "config", None)
    return name.startswith("MobileBert") or (
        name.startswith("Esm") and getattr(config, "token_dropout", False)
    )
