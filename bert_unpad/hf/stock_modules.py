"""Base models whose own modules run on packed tokens: what `unpad` does for most families.

The class of a stock model is swapped for a subclass that inherits from `PackedCall` first. Its
forward packs what a call has for each token, runs the stock forward on [1, T] with attention by
`bert_unpad_flash`, and pads once at the end. Families whose layers are swapped as well, which gains
more, are in `adapters.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bert_unpad.batch.rows import gather_rows
from bert_unpad.hf import flash
from bert_unpad.hf.fallback import recording_reason, warn_stock
from bert_unpad.hf.models import (
    DTYPES,
    STOCK_ARGUMENTS,
    bind,
    given_packing,
    missing_operator,
)
from bert_unpad.hf.packing import Packing, refuse_restarts
from bert_unpad.hf.verify import verify_once
from bert_unpad.ops.attention import HEAD_DIMS


@dataclass(frozen=True)
class StockFamily:
    """A family: class <prefix>Model of transformers.models.<package>.modeling_<package>."""

    package: str
    prefix: str
    counts_ids: bool = False
    """Whether missing positions are counted from the ids that are not padding, as in RoBERTa."""
    embeds_rows: bool = False
    """Whether embeddings need a sequence's other tokens, so that they are computed padded."""


STOCK_FAMILIES = (
    StockFamily("albert", "Albert"),
    StockFamily("ernie", "Ernie"),
    # ESM-2 scales a sequence by how many of its tokens are masked.
    StockFamily("esm", "Esm", embeds_rows=True),
    StockFamily("eurobert", "EuroBert"),
    StockFamily("jina_embeddings_v3", "JinaEmbeddingsV3"),
    StockFamily("modernbert", "ModernBert"),
    StockFamily("nomic_bert", "NomicBert"),
    StockFamily("roberta_prelayernorm", "RobertaPreLayerNorm", counts_ids=True),
    StockFamily("roc_bert", "RoCBert"),
    StockFamily("xlm_roberta_xl", "XLMRobertaXL", counts_ids=True),
)


def version_reason(model: nn.Module, family: StockFamily) -> str | None:
    """Returns why the installed transformers cannot run this family on packed tokens, or None."""
    modeling = sys.modules[f"transformers.models.{family.package}.modeling_{family.package}"]
    if not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        return "this version of transformers does not let its attention be chosen"
    rotary = getattr(model.config, "position_embedding_type", None) == "rotary"
    if family.package == "esm" and rotary and not hasattr(model, "rotary_embeddings"):
        return "this version of transformers counts its rotary positions from the row's beginning"
    return None


def stock_reason(model: nn.Module) -> str | None:
    """Returns why no call of this model can be packed, or None."""
    config = model.config
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return "it is a decoder"
    weight = model.get_input_embeddings().weight
    if weight.dtype not in DTYPES:
        return f"its parameters are {weight.dtype}"
    device = weight.device.type
    if device != "meta" and (missing := missing_operator(device)):
        return missing
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width not in HEAD_DIMS.get(device, HEAD_DIMS["cpu"]):
        return f"attention heads of dimension {width} are not supported on {device}"
    return None


def _has_windows(config: Any) -> bool:
    return hasattr(config, "local_attention") or "sliding_attention" in (
        getattr(config, "layer_types", None) or ()
    )


class PackedCall:
    """Mixin for the class of a stock base model; it comes first in the bases."""

    _bert_unpad_family: StockFamily
    _bert_unpad_arguments: tuple[str, ...]
    _bert_unpad_attention: str
    """The attention of calls that cannot be packed: the model's own."""

    def forward(self, *args, **kwargs):
        call = bind(self._bert_unpad_arguments, args, kwargs)
        if "_bert_unpad_stock_call" in vars(self):  # a head has warned already
            with self._bert_unpad_own_attention():
                return super().forward(**call)
        packing = self._bert_unpad_packing(call)
        if isinstance(packing, str):
            warn_stock(type(self).__name__, packing)
            with self._bert_unpad_own_attention():
                return super().forward(**call)
        verify_once(self, call)
        return_dict = call.pop("return_dict", None)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        cu_seqlens, longest = packing.cu_seqlens, packing.max_seqlen
        lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        lengths |= {"max_length_q": longest, "max_length_k": longest}
        if self._bert_unpad_family.embeds_rows:
            lengths[flash.APART] = True
        call = self._bert_unpad_tokens(call, packing) | lengths
        out = super().forward(**call, return_dict=True)
        if getattr(self, "pooler", None) is not None:
            first = gather_rows(out.last_hidden_state[0], packing.first_rows())[:, None]
            if hasattr(self, "pooler_activation"):  # ALBERT's is two modules
                out.pooler_output = self.pooler_activation(self.pooler(first[:, 0]))
            else:
                out.pooler_output = self.pooler(first)
        if not packing.given:
            out.last_hidden_state = packing.pad(out.last_hidden_state)
            if out.get("hidden_states") is not None:
                out.hidden_states = tuple(
                    None if x is None else packing.pad(x) for x in out.hidden_states
                )
        return out if return_dict else out.to_tuple()

    @contextmanager
    def _bert_unpad_own_attention(self) -> Iterator[None]:
        """The model's own attention for a call, if the configuration has ours.

        Raises:
            ValueError: layers would be computed again, by then with ours.
        """
        config = self.config
        if config._attn_implementation != flash.NAME or self._bert_unpad_attention == flash.NAME:
            yield
            return
        if self.training and torch.is_grad_enabled() and self.is_gradient_checkpointing:
            raise ValueError(
                f"{type(self).__name__}: gradient checkpointing cannot go with a call that the "
                "stock modules have to compute: pad on the right, without holes, or train without"
            )
        config._attn_implementation = self._bert_unpad_attention
        try:
            yield
        finally:
            config._attn_implementation = flash.NAME

    def _bert_unpad_packing(self, call: dict[str, Any]) -> Packing | str:
        """Returns the packing of a call, or why the stock modules have to run it.

        Raises:
            ValueError: the input is packed, and would have to be padded.
        """
        source = call.get("input_ids")
        source = call.get("inputs_embeds") if source is None else source
        mask, cu_seqlens = call.get("attention_mask"), call.get("cu_seq_lens_q")
        reason = self._bert_unpad_reason(call, source, mask)
        if reason and cu_seqlens is not None:
            raise ValueError(
                f"{type(self).__name__}: packed input (cu_seq_lens_q) cannot be computed, because "
                f"{reason}; pass a padded batch"
            )
        if reason:
            return reason
        if cu_seqlens is not None:
            return given_packing(self, call, source)
        if mask is None:
            refuse_restarts(call.get("position_ids"), source.shape[0])
            return Packing.dense(source.shape[0], source.shape[1], source.device)
        try:
            packing = Packing.from_mask(mask, reads_first=True, windows=_has_windows(self.config))
        except (TypeError, ValueError) as error:
            if torch.compiler.is_compiling():
                raise
            return str(error)
        return packing if packing.stock_reason is None else packing.stock_reason

    def _bert_unpad_reason(self, call: dict[str, Any], source: Any, mask: Any) -> str | None:
        asked = call.get("output_attentions")
        if asked or (asked is None and getattr(self.config, "output_attentions", False)):
            return "output_attentions is asked for"
        for name in STOCK_ARGUMENTS:
            if call.get(name) is not None and call[name] is not False:
                return f"{name} is given"
        if reason := recording_reason() or stock_reason(self):
            return reason
        if self.config._attn_implementation != flash.NAME:
            return f"its attention became {self.config._attn_implementation!r} after `unpad`"
        if not isinstance(source, Tensor) or source.dim() < 2 or source.device.type == "meta":
            return "there are no input_ids or inputs_embeds of shape [batch, tokens, ...]"
        if mask is not None and tuple(getattr(mask, "shape", ())) != tuple(source.shape[:2]):
            return "attention_mask is not [batch, tokens]"
        if call.get("cu_seq_lens_q") is not None and self._bert_unpad_family.embeds_rows:
            return "its embeddings need to know each sequence's tokens"
        return None

    def _bert_unpad_tokens(self, call: dict[str, Any], packing: Packing) -> dict[str, Any]:
        """The arguments of the same call on packed tokens."""
        family, ids = self._bert_unpad_family, call.get("input_ids")
        call = call | {"attention_mask": None}
        if ids is not None and family.embeds_rows:
            mask = packing.pad(torch.ones_like(packing.pack(ids)))
            call["inputs_embeds"] = self.embeddings(
                input_ids=ids, attention_mask=mask, position_ids=call.get("position_ids")
            )
            call["input_ids"] = None
        elif ids is not None and family.counts_ids and call.get("position_ids") is None:
            rule = self.embeddings
            if not packing.given:
                call["position_ids"] = rule.create_position_ids_from_input_ids(
                    ids, rule.padding_idx
                )
        if call.get("position_ids") is None:
            first = self.embeddings.padding_idx + 1 if family.counts_ids else 0
            call["position_ids"] = self._bert_unpad_columns(packing) + first
        elif not packing.given:
            call["position_ids"] = packing.pack(call["position_ids"].expand(packing.shape))
        if packing.given:
            return call
        return {
            name: packing.pack(value)
            if name != "position_ids"
            and isinstance(value, Tensor)
            and tuple(value.shape[:2]) == packing.shape
            else value
            for name, value in call.items()
        }

    def _bert_unpad_columns(self, packing: Packing) -> Tensor:
        if packing.columns is not None:
            return packing.columns[None]
        rows, columns = packing.shape
        device = packing.cu_seqlens.device
        return torch.arange(columns, device=device).repeat(rows)[None]


def choose_attention(model: nn.Module, own: str) -> None:
    """Lets a swapped model's packed calls compute attention by `bert_unpad_flash`; `own` is what
    its other calls keep."""
    vars(model).setdefault("_bert_unpad_attention", own)
    model.config._attn_implementation = flash.NAME


def restore_attention(model: nn.Module) -> None:
    """Undoes `choose_attention`."""
    model.config._attn_implementation = model.__dict__.pop("_bert_unpad_attention")
