"""Base models whose own forward runs on packed tokens: what `unpad` does for most families.

The class of a stock model is swapped for a subclass that inherits from `PackedCall` first. Its
forward packs what a call has for each token, runs the stock forward on [1, T], and pads once at the
end. The layers, as `FusedLayer`s, compute with our operators; layers that these do not fit stay
stock, with attention by `bert_unpad_flash`. Families whose stack of layers is swapped as well, and
whose heads choose rows, are in `adapters.py`.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bert_unpad.batch.rows import gather_rows
from bert_unpad.hf import flash, layer_parts
from bert_unpad.hf.fallback import warn_stock
from bert_unpad.hf.layer_parts import LayerAdapter
from bert_unpad.hf.layers import StockModule, compute
from bert_unpad.hf.models import (
    STOCK,
    Freezable,
    bind,
    kind_reason,
    packing_or_reason,
    token_positions,
    wants_dict,
    whole_output,
    width_reason,
)
from bert_unpad.hf.packing import Packing
from bert_unpad.hf.verify import verify_once


@dataclass(frozen=True, eq=False)
class StockFamily:
    """A family: class <prefix>Model of transformers.models.<package>.modeling_<package>."""

    package: str
    prefix: str
    layer_class: str
    layer: LayerAdapter
    counts_ids: bool = False
    """Whether missing positions are counted from the ids that are not padding, as in RoBERTa."""
    embeds_rows: bool = False
    """Whether embeddings need a sequence's other tokens, so that they are computed padded."""
    outer: Mapping[str, str] | None = None
    """Paths of what is before and after the layers, by the fields of `EncoderEmbeddings`, if that
    is all there is."""
    passes_on: ClassVar[bool] = True
    first_readers: ClassVar[tuple[str, ...]] = ("ForSequenceClassification", "ForMultipleChoice")
    """Heads that read the rows of the output themselves where the base model has no pooler."""


OUTER = {
    "word": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "token_type": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
"""`StockFamily.outer` of models like BERT."""

STOCK_FAMILIES = (
    StockFamily("albert", "Albert", "AlbertLayer", layer_parts.ALBERT),
    StockFamily("ernie", "Ernie", "ErnieLayer", layer_parts.BERT),
    # ESM-2 scales a sequence by how many of its tokens are masked.
    StockFamily("esm", "Esm", "EsmLayer", layer_parts.ESM, embeds_rows=True),
    StockFamily(
        *("eurobert", "EuroBert", "EuroBertDecoderLayer", layer_parts.EUROBERT),
        outer={"word": "embed_tokens", "final_norm": "norm"},
    ),
    StockFamily(
        *("jina_embeddings_v3", "JinaEmbeddingsV3", "JinaEmbeddingsV3Layer", layer_parts.JINA),
        outer=OUTER,
    ),
    StockFamily(
        *("modernbert", "ModernBert", "ModernBertEncoderLayer", layer_parts.MODERNBERT),
        outer={
            "word": "embeddings.tok_embeddings",
            "norm": "embeddings.norm",
            "final_norm": "final_norm",
        },
    ),
    StockFamily("nomic_bert", "NomicBert", "NomicBertLayer", layer_parts.NOMIC, outer=OUTER),
    StockFamily(
        *("roberta_prelayernorm", "RobertaPreLayerNorm", "RobertaPreLayerNormLayer"),
        layer_parts.PRE_LAYER_NORM,
        counts_ids=True,
        outer=OUTER | {"final_norm": "LayerNorm"},
    ),
    StockFamily("roc_bert", "RoCBert", "RoCBertLayer", layer_parts.BERT),
    StockFamily(
        *("xlm_roberta_xl", "XLMRobertaXL", "XLMRobertaXLLayer"),
        layer_parts.XLM_ROBERTA_XL,
        counts_ids=True,
        outer=OUTER | {"final_norm": "encoder.LayerNorm"},
    ),
)


_NARROW = (torch.bfloat16, torch.float16)


def version_reason(model: nn.Module, family: StockFamily) -> str | None:
    """Returns why the installed transformers cannot run this family on packed tokens, or None."""
    modeling = sys.modules[f"transformers.models.{family.package}.modeling_{family.package}"]
    if not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        return "this version of transformers does not let its attention be chosen"
    rotary = getattr(model.config, "position_embedding_type", None) == "rotary"
    if family.package == "esm" and rotary and not hasattr(model, "rotary_embeddings"):
        return "this version of transformers counts its rotary positions from the row's beginning"
    return None


def stock_reason(model: Any) -> str | None:
    """Returns why no call of this model can be packed, or None."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    device = model.get_input_embeddings().weight.device.type
    return kind_reason(model) or width_reason(width, device)


def _has_windows(config: Any) -> bool:
    return hasattr(config, "local_attention") or "sliding_attention" in (
        getattr(config, "layer_types", None) or ()
    )


class PackedCall(Freezable):
    """Mixin for the class of a stock base model; it comes first in the bases."""

    _bert_unpad_family: StockFamily
    _bert_unpad_arguments: tuple[str, ...]
    _bert_unpad_attention: str
    """The attention of calls that cannot be packed: the model's own."""
    _bert_unpad_exact_angles: bool
    """Whether operators may rotate instead of the stock layers; see `angles_are_exact`."""
    _bert_unpad_padded: tuple[str, ...] = ("output_attentions",)

    def forward(self, *args, packing: str | None = None, **kwargs):
        """The stock forward; `packing` is `STOCK` or None."""
        call = bind(self._bert_unpad_arguments, args, kwargs)
        if packing is None and (out := whole_output(self, call)) is not None:
            return out
        found = packing or packing_or_reason(self, call)
        if isinstance(found, str):
            if found is not STOCK:
                warn_stock(type(self).__name__, found)
            with self._bert_unpad_own_attention():
                return super().forward(**call)
        return self._bert_unpad_packed_call(call, found)

    def _bert_unpad_packed_call(self, call: dict[str, Any], packing: Packing):
        verify_once(self, call)
        return_dict = wants_dict(self, call)
        cu_seqlens, longest = packing.cu_seqlens, packing.max_seqlen
        lengths: dict[str, Any] = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        lengths |= {"max_length_q": longest, "max_length_k": longest}
        call = self._bert_unpad_tokens(call, packing) | lengths
        positions = call["position_ids"][0] if self._bert_unpad_exact_angles else None
        inner = dataclasses.replace(packing, positions=positions)
        out = super().forward(**call, packing=inner, return_dict=True)
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

    def _bert_unpad_reason(self, packed: bool) -> str | None:
        if not self._bert_unpad_frozen and (reason := stock_reason(self)):
            return reason
        if self.config._attn_implementation != flash.NAME:
            return f"its attention became {self.config._attn_implementation!r} after `unpad`"
        if packed and self._bert_unpad_family.embeds_rows:
            return "its embeddings need to know each sequence's tokens"
        return None

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)
        self._bert_unpad_exact_angles = angles_are_exact(self)
        return self

    def _bert_unpad_layout(self) -> tuple[bool, bool]:
        return True, _has_windows(self.config)  # heads may read the first column

    def _bert_unpad_tokens(self, call: dict[str, Any], packing: Packing) -> dict[str, Any]:
        """The arguments of the same call on packed tokens."""
        family, ids = self._bert_unpad_family, call.get("input_ids")
        positions = token_positions(
            getattr(self, "embeddings", None), family.counts_ids, call, packing
        )
        rest = call | {"attention_mask": None, "position_ids": None}
        if not packing.given:
            if ids is not None and family.embeds_rows:
                mask = packing.pad(torch.ones_like(packing.pack(ids)))
                embeds = self.embeddings(
                    input_ids=ids, attention_mask=mask, position_ids=call.get("position_ids")
                )
                rest |= {"input_ids": None, "inputs_embeds": embeds}
            rest = {
                name: packing.pack(value)
                if isinstance(value, Tensor) and tuple(value.shape[:2]) == packing.shape
                else value
                for name, value in rest.items()
            }
        return rest | {"position_ids": positions}


class FusedLayer(StockModule):
    """Mixin for the class of a stock layer of these families; it comes first in the bases."""

    _bert_unpad_layer: LayerAdapter

    def forward(self, hidden_states: Tensor, *args, packing: Packing | None = None, **kwargs):
        """The stock forward; with a packing ours, if the layer has nothing that it would miss."""
        if packing is None:
            return super().forward(hidden_states, *args, **kwargs)
        if not self._bert_unpad_layer.fits(self, packing):
            return super().forward(hidden_states, *args, packing=packing, **kwargs)
        out = compute(self, self._bert_unpad_layer, hidden_states, packing)
        return out.to(hidden_states.dtype)


def angles_are_exact(model: nn.Module) -> bool:
    """Whether a stock model rotates by angles that are not rounded: `model.bfloat16()` rounds them,
    for good, and `from_pretrained(dtype=...)` does not."""
    buffers = (buffer for child in model.children() for buffer in child._buffers.items())
    angles = [x for name, x in buffers if name.endswith("inv_freq") and x is not None]
    return all(
        x.dtype == torch.float32
        and (x.is_meta or not any(torch.equal(x, x.to(kind).float()) for kind in _NARROW))
        for x in angles
    )


def choose_attention(model: Any, own: str) -> None:
    """Lets a swapped model's packed calls compute attention by `bert_unpad_flash`; `own` is what
    its other calls keep."""
    vars(model).setdefault("_bert_unpad_attention", own)
    model._bert_unpad_exact_angles = angles_are_exact(model)
    model.config._attn_implementation = flash.NAME


def restore_attention(model: Any) -> None:
    """Undoes `choose_attention`."""
    model.config._attn_implementation = model.__dict__.pop("_bert_unpad_attention")
    del model._bert_unpad_exact_angles
