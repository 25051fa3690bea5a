"""`unpad`, `repad` and `supports`: swapping the classes of a model's modules in place.

Only `module.__class__` changes, and in families whose own forward runs packed which attention the
configuration chooses. Modules, parameters, buffers and their names stay the same objects,
so existing optimizers, tied weights, adapters and state dicts keep working. The subclasses have the
stock names, which transformers saves as `architectures` and uses to find classes.
"""

import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from bert_unpad.hf.adapters import FAMILIES, Family
from bert_unpad.hf.heads import (
    LOGITS,
    SPAN_LOSSES,
    HeadAdapter,
    PackedFirst,
    PackedLabels,
    PackedMlm,
    PackedSpans,
    PackedTokenLabels,
)
from bert_unpad.hf.layers import PackedLayer, PackedStack, unwrap
from bert_unpad.hf.models import PackedModel, static_reason
from bert_unpad.hf.rounded import WEIGHTS, choose_weights
from bert_unpad.hf.stock_modules import (
    STOCK_FAMILIES,
    FusedLayer,
    PackedCall,
    StockFamily,
    choose_attention,
    restore_attention,
    stock_reason,
    version_reason,
)

_STATE = (
    *("_bert_unpad_logits", "_bert_unpad_span_loss", "_bert_unpad_first_is_read"),
    "_bert_unpad_verify",
    "_bert_unpad_weights",
)


_LABELS = {
    PackedTokenLabels: ("ForTokenClassification", "ForMaskedLM"),
    PackedSpans: ("ForQuestionAnswering",),
    PackedLabels: ("ForSequenceClassification", "ForMultipleChoice"),
}


@dataclass(frozen=True)
class Support:
    """What `unpad` does with a model; true if it accelerates anything."""

    accelerated: dict[str, str]
    """What will run on packed tokens, by name of the module ("" is the model itself)."""
    stock: dict[str, str]
    """Why a module will not run on packed tokens, by name of the module."""

    def __bool__(self) -> bool:
        return bool(self.accelerated)

    def __str__(self) -> str:
        lists = (("packed", self.accelerated), ("stock", self.stock))
        lines = [
            f"{label}: {name or 'the model itself'}: {text}"
            for label, found in lists
            for name, text in found.items()
        ]
        return "\n".join(lines) or (
            "no module of a known family: "
            f"{', '.join(f'{f.prefix}Model' for f in (*FAMILIES, *STOCK_FAMILIES))}.\n"
            'Other encoders: from_pretrained(..., attn_implementation="bert_unpad_flash") '
            "packs their attention; bert_unpad.nn reads the checkpoints of more families"
        )


def supports(model: nn.Module) -> Support:
    """Returns what `unpad(model)` would accelerate, and why it would not accelerate the rest.

    Calls that ask for what packed tokens cannot give (attentions, 4-D masks) still run the stock
    modules, with a `StockFallbackWarning`.

    Raises:
        TypeError: the model is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: expected a torch.nn.Module, got {model!r}; for a name or path, load it first, "
            "for example with transformers.AutoModel.from_pretrained"
        )
    accelerated, stock = {}, {}
    for name, module, family in _base_models(model):
        reason = _strange_part(module, family)
        reason = reason or static_reason(module, family.adapter, family.layer)
        if reason:
            stock[name] = reason
        else:
            accelerated[name] = "embeddings and layers"
    for name, module, stock_family in _stock_models(model):
        reason = version_reason(module, stock_family) or stock_reason(module)
        (stock if reason else accelerated)[name] = reason or "the call, and layers"
    for name, module in model.named_modules():
        found = _mlm(module)
        if found is None:
            continue
        if f"{name}.{found[1].base}".lstrip(".") in accelerated:
            accelerated[name] = "logits at labels only"
    return Support(accelerated, stock)


def unpad(
    model: nn.Module,
    *,
    logits: str = "lazy",
    span_loss: str = "packed",
    weights: str = "float32",
    verify: bool = False,
) -> nn.Module:
    """Makes a Hugging Face model compute only its real tokens, in place.

    The model is called, saved and loaded as before, and its outputs at real tokens and its state
    dict stay the same. Padded positions of `last_hidden_state` and of token logits become 0.

    Args:
        model: a model of a family that docs/huggingface.md lists, BERT's to ModernBERT's, or any
            module that contains one, for example a model with a head, a PEFT or a
            sentence-transformers model.
        logits: when a masked-language model called with labels computes its logits at all
            positions. "lazy": when they are read; "full": always; "none": never, `.logits` is None.
            `torch.compile` cannot return lazy logits, and FSDP reads all outputs: both treat
            "lazy" as "full".
        span_loss: the loss of question answering where a batch has padding, whose columns are part
            of the stock softmax. "packed": their logits are those of a zero vector. "stock": as in
            the stock model, whose modules then compute all batches with labels and padding.
        weights: those of calls without gradients, in evaluation mode, on a CPU. "float32": the
            model's, exactly. "bfloat16", on CPUs that multiply it, and "int8": rounded beside the
            model's own (about a half or a quarter of their memory more; `freeze` keeps no others),
            and activations too, in 8 bits token by token. Layers with adapters or hooks inside and
            all other calls go on with the model's weights. See `calibrate`.
        verify: run the first batch with padding by the stock modules too, layer by layer, in
            float32 and as the model computes, and backward where gradients are computed. A
            difference beyond rounding raises a `VerificationError`, and leaves the model stock. It
            takes memory for copies of the model and several times that batch's time; not under
            torch.compile or FSDP.

    Returns:
        The same object.

    Raises:
        TypeError: the model is not a module.
        ValueError: nothing in the model can be accelerated (the text says why); `logits`,
            `span_loss` or `weights` is unknown; `verify` is to compare rounded weights; or the
            model cannot be computed with them, and is unpadded in float32 then.
    """
    for name, value, known in (
        ("logits", logits, LOGITS),
        ("span_loss", span_loss, SPAN_LOSSES),
        ("weights", weights, WEIGHTS),
    ):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    if verify and weights != "float32":
        raise ValueError(f"verify: expected False with weights={weights!r}, which are not exact")
    support = supports(model)
    if not support:
        raise ValueError(f"bert_unpad.hf.unpad: nothing to accelerate in the model:\n{support}")
    chosen = [
        (module, family)
        for name, module, family in _base_models(model)
        if name in support.accelerated
    ]
    for module, family in chosen:
        module.__class__ = _packed_model(_stock(module), family)
        stack: Any = unwrap(getattr(module, family.adapter.stack))
        stack.__class__ = _packed_part(_stock(stack), family, "stack")
        for layer in map(unwrap, stack.layer):
            layer.__class__ = _packed_part(_stock(layer), family, "layer")
    stock = [found for found in _stock_models(model) if found[0] in support.accelerated]
    # All first: a configuration may be that of several models.
    own = {name: module.config._attn_implementation for name, module, _ in stock}
    for name, module, stock_family in stock:
        module.__class__ = _packed_call(_stock(module), stock_family)
        choose_attention(module, own[name])
        for layer in module.modules():
            stock_layer = _computes_as(layer, stock_family, stock_family.layer_class)
            if stock_layer and stock_family.layer.has_parts(layer):
                layer.__class__ = _packed_part(_stock(layer), stock_family, "fused")
    for module in model.modules():
        _swap_head(module, logits, span_loss)
    choose_weights(model, weights)
    for name in support.accelerated if verify else ():
        module = model.get_submodule(name)
        if isinstance(module, (PackedModel, PackedCall)):
            module._bert_unpad_verify = True
    return model


def repad(model: nn.Module) -> nn.Module:
    """Undoes `unpad`: every module has its stock class again.

    Returns:
        The same object.

    Raises:
        ValueError: a class was swapped again after `unpad`, for example by FSDP2, or the model is
            frozen, so that it cannot be undone.
    """
    for name, module in model.named_modules():
        if getattr(module, "_bert_unpad_frozen", False):
            raise ValueError(f"{name or 'the model'} is frozen: its layers are gone")
        kind: Any = type(module)
        if hasattr(kind, "_bert_unpad_stock") and "_bert_unpad_stock" not in vars(kind):
            raise ValueError(f"{name or 'the model'} became a {kind} after unpad: cannot undo that")
    choose_weights(model, "float32")
    for module in model.modules():
        if "_bert_unpad_attention" in vars(module):
            restore_attention(module)
        kind = type(module)
        if hasattr(kind, "_bert_unpad_stock"):
            module.__class__ = kind._bert_unpad_stock
        for attribute in _STATE:
            module.__dict__.pop(attribute, None)
    return model


def _stock(module: nn.Module) -> Any:
    return vars(type(module)).get("_bert_unpad_stock", type(module))


def _classes(family: Family | StockFamily) -> Any | None:
    """Returns the family's module in transformers, or None if it has not been imported."""
    return sys.modules.get(f"transformers.models.{family.package}.modeling_{family.package}")


def _is(module: nn.Module, family: Family | StockFamily, head: str) -> bool:
    """Whether the module is a <prefix><head>, or a subclass with the same forward function."""
    return _computes_as(module, family, family.prefix + head)


def _computes_as(module: nn.Module, family: Family | StockFamily, name: str) -> bool:
    wanted = getattr(_classes(family), name, None)
    if wanted is None or not isinstance(module, wanted):
        return False
    return inspect.unwrap(_stock(module).forward) is inspect.unwrap(wanted.forward)


def _base_models(model: nn.Module) -> Iterator[tuple[str, Any, Family]]:
    for name, module in model.named_modules():
        for family in FAMILIES:
            if _is(module, family, "Model"):
                yield name, module, family


def _stock_models(model: nn.Module) -> Iterator[tuple[str, Any, StockFamily]]:
    for name, module in model.named_modules():
        for family in STOCK_FAMILIES:
            if _is(module, family, "Model"):
                yield name, module, family


def _strange_part(module: nn.Module, family: Family) -> str | None:
    stack: Any = unwrap(getattr(module, family.adapter.stack))
    if not _computes_as(stack, family, family.stack_class):
        return f"its stack of layers is a {type(stack).__name__}, not a {family.stack_class}"
    for index, layer in enumerate(stack.layer):
        if not _computes_as(unwrap(layer), family, family.layer_class):
            return f"layer {index} is a {type(layer).__name__}, not a {family.layer_class}"
    return None


def _mlm(module: nn.Module) -> tuple[Family, HeadAdapter] | None:
    for family in FAMILIES:
        for name, head in family.mlm.items():
            if _is(module, family, name):
                return family, head
    return None


def _swap_head(module: Any, logits: str, span_loss: str) -> None:
    found = _mlm(module)
    if found is not None:
        module.__class__ = _packed_mlm(_stock(module), *found)
        module._bert_unpad_logits = logits
        return
    for family in (*FAMILIES, *STOCK_FAMILIES):
        for mixin, names in _LABELS.items():
            wanted = mixin is not PackedLabels or not family.passes_on
            if wanted and any(_is(module, family, name) for name in names):
                module.__class__ = _packed_labels(_stock(module), mixin, family.passes_on)
                module._bert_unpad_span_loss = span_loss
        if any(_is(module, family, name) for name in family.first_readers):
            children: Iterator[Any] = map(unwrap, module.children())
            for child in children:
                alone = isinstance(child, PackedCall) and getattr(child, "pooler", None) is None
                if isinstance(child, PackedModel) or alone:
                    child._bert_unpad_first_is_read = True
    for family in FAMILIES:
        for name, classifier in family.first_only.items():
            if _is(module, family, name):
                module.__class__ = _packed_first(_stock(module), family.base_attribute, classifier)


def _arguments(stock: Any) -> tuple[str, ...]:
    """Returns the names of forward's positional parameters."""
    parameters = list(inspect.signature(stock.forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD)


def _subclass(mixin: type, stock: Any, **attributes: Any) -> type:
    """Makes a subclass of `mixin` and `stock`, in this order, with the name of `stock`."""
    forward = functools.wraps(stock.forward)(_forwarder(mixin))
    namespace = {
        # transformers and the Trainer read forward's signature and documentation.
        "forward": forward,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": _reduce,
        "_bert_unpad_stock": stock,
        **attributes,
    }
    return type(stock.__name__, (mixin, stock), namespace)


def _forwarder(mixin: type):
    def forward(self, *args, **kwargs):
        return mixin.forward(self, *args, **kwargs)

    return forward


def _embeds_argument(family: Family) -> str:
    """What embeddings call embedded tokens; DistilBERT's had a name of their own until 5.0."""
    kind = getattr(_classes(family), "Embeddings", None)
    names = () if kind is None else inspect.signature(kind.forward).parameters
    return "input_embeds" if "input_embeds" in names else "inputs_embeds"


@functools.cache
def _packed_model(stock: type, family: Family) -> type:
    return _subclass(
        PackedModel,
        stock,
        _bert_unpad_adapter=family.adapter,
        _bert_unpad_embeds=_embeds_argument(family),
        _bert_unpad_layer=family.layer,
        _bert_unpad_arguments=_arguments(stock),
        _bert_unpad_rebuild=("model", family.package),
    )


@functools.cache
def _packed_call(stock: type, family: StockFamily) -> type:
    return _subclass(
        PackedCall,
        stock,
        _bert_unpad_family=family,
        _bert_unpad_arguments=_arguments(stock),
        _bert_unpad_rebuild=("call", family.package),
    )


@functools.cache
def _packed_part(stock: type, family: Family | StockFamily, role: str) -> type:
    """The class of a "layer", of the "stack" of layers, or of a layer that stays in its stack."""
    return _subclass(
        {"layer": PackedLayer, "stack": PackedStack, "fused": FusedLayer}[role],
        stock,
        _bert_unpad_layer=family.layer,
        _bert_unpad_rebuild=(role, family.package),
    )


@functools.cache
def _packed_mlm(stock: type, family: Family, head: HeadAdapter) -> type:
    return _subclass(
        PackedMlm,
        stock,
        _bert_unpad_head=head,
        _bert_unpad_arguments=_arguments(stock),
        _bert_unpad_passes_on=family.passes_on,
        _bert_unpad_rebuild=("mlm",),
    )


@functools.cache
def _packed_labels(stock: type, mixin: type, passes_on: bool) -> type:
    return _subclass(
        mixin,
        stock,
        _bert_unpad_arguments=_arguments(stock),
        _bert_unpad_passes_on=passes_on,
        _bert_unpad_rebuild=("labels", mixin, passes_on),
    )


@functools.cache
def _packed_first(stock: type, base: str, classifier: str | None) -> type:
    return _subclass(
        PackedFirst,
        stock,
        _bert_unpad_base=base,
        _bert_unpad_classifier=classifier,
        _bert_unpad_rebuild=("first", base, classifier),
    )


def _reduce(self, protocol: int):
    """Pickles and copies through the stock class, because a subclass cannot be found by name."""
    kind: Any = next(k for k in type(self).__mro__ if "_bert_unpad_stock" in vars(k))
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return _rebuild, (kind._bert_unpad_stock, *kind._bert_unpad_rebuild), state


def _family(package: str) -> Family | StockFamily:
    return next(f for f in (*FAMILIES, *STOCK_FAMILIES) if f.package == package)


def _rebuild(stock: type, role: str, *given: Any) -> nn.Module:
    """Makes a module of the packed class of `stock`, without state, which pickle sets later."""
    if role == "model":
        kind: Any = _packed_model(stock, _family(given[0]))
    elif role in ("layer", "stack", "fused"):
        kind = _packed_part(stock, _family(given[0]), role)
    elif role == "call":
        kind = _packed_call(stock, _family(given[0]))
    elif role == "mlm":
        names = [base.__name__ for base in stock.__mro__]
        heads = {f.prefix + name: (f, head) for f in FAMILIES for name, head in f.mlm.items()}
        kind = _packed_mlm(stock, *next(heads[name] for name in names if name in heads))
    else:
        kind = (_packed_first if role == "first" else _packed_labels)(stock, *given)
    return kind.__new__(kind)
