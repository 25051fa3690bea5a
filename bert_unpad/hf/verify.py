"""`unpad(model, verify=True)`, and `verify(model)` where "bert_unpad_flash" is the attention: the
first batch with padding runs stock and packed, with one result.

What is compared are the outputs of all layers at the tokens that the mask keeps and, where
gradients are computed, those of all parameters; in float32, and as the model computes otherwise.
How much rounding explains is measured: the same stock model in float64 tells how far the stock
model itself is off. Dropout is off meanwhile; where the model trains, how often both drop at which
rate is compared.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bert_unpad._sharded_types import is_fsdp_module
from bert_unpad.hf import flash

# Times the stock model's own error, and steps of the dtype at the size of the largest value: two
# ways to add differ by some of both.
_ERRORS, _STEPS = 16.0, 16.0
_ASKED = ("return_dict", "output_hidden_states", "output_attentions", "labels")


class VerificationError(RuntimeError):
    """Packed modules or attention compute something else than stock ones do; the model is stock
    again."""


Found = dict[str, Tensor]


def verify(model: nn.Module) -> nn.Module:
    """Lets a model with attn_implementation="bert_unpad_flash", or all such encoders inside, check
    its first batch with padding, as `unpad(model, verify=True)` does.

    Returns:
        The model. The call that checks raises a VerificationError where attention differs from
        the stock one by more than rounding, and leaves the model with the stock one.

    Raises:
        ValueError: no model inside has this attention.
    """
    served = [
        module
        for module in model.modules()
        if getattr(module, "base_model", None) is module
        and getattr(module.config, "_attn_implementation", None) == flash.NAME
    ]
    inner = {part for module in served for part in module.modules() if part is not module}
    if not served:
        raise ValueError(
            f"{type(model).__name__}: attn_implementation: expected {flash.NAME!r}, got none inside"
        )
    for encoder in served:
        if encoder not in inner:
            encoder.register_forward_pre_hook(_verify_attention, with_kwargs=True)
    return model


def _verify_attention(model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """The hook that `verify` registers: removes itself with the first call that is checked."""
    call = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
    if _has_padding(model, call):
        for number, hook in list(model._forward_pre_hooks.items()):
            if hook is _verify_attention:
                del model._forward_pre_hooks[number], model._forward_pre_hooks_with_kwargs[number]
        stock = "sdpa" if model._supports_sdpa else "eager"
        _compare_call(model, call, lambda found: found.set_attn_implementation(stock))


def verify_once(model: Any, call: Mapping[str, Any]) -> None:
    """Compares a swapped base model with its stock modules on the first eager call whose batch has
    padding.

    Raises:
        VerificationError: they differ by more than rounding. The model has its stock modules then.
        RuntimeError: FSDP has sharded the model, which then cannot be copied.
    """
    if "_bert_unpad_verify" in vars(model) and _has_padding(model, call):
        from bert_unpad.hf.swap import repad

        _compare_call(model, call, repad)
        del model._bert_unpad_verify


def _has_padding(model: nn.Module, call: Mapping[str, Any]) -> bool:
    mask = call.get("attention_mask")
    if torch.compiler.is_compiling() or mask is None or bool((mask != 0).all()):
        return False
    if any(
        is_fsdp_module(module) or getattr(module, "_is_fsdp_managed_module", False)
        for module in model.modules()
    ):
        raise RuntimeError(
            f"{type(model).__name__}: verify: expected a model that is not sharded; make a padded "
            "call before FSDP"
        )
    return True


def _compare_call(model: Any, call: Mapping[str, Any], make_stock: Callable[[Any], object]) -> None:
    """Compares a model with what `make_stock` makes of it, on one call with a padded batch.

    Raises:
        VerificationError: they differ by more than rounding. The model is stock then.
    """
    given = {name: x for name, x in call.items() if x is not None and name not in _ASKED}
    kept = given["attention_mask"].bool()
    stock = copy.deepcopy(model)
    make_stock(stock)
    if "flash" in stock.config._attn_implementation:  # which has no float64
        stock.config._attn_implementation = "sdpa"
    try:
        with torch.autocast(kept.device.type, enabled=False):
            truth = _run(copy.deepcopy(stock).double(), given, kept)
            found = _pair(stock, model, torch.float32, given, kept)
            _compare(model, "float32", torch.float32, *found, truth)
        dtype = model.get_input_embeddings().weight.dtype
        if torch.is_autocast_enabled(kept.device.type):
            name, narrow = "autocast", torch.get_autocast_dtype(kept.device.type)
        else:
            name = narrow = dtype
        if narrow != torch.float32:
            found = _pair(stock, model, dtype, given, kept)
            _compare(model, f"{name}".removeprefix("torch."), narrow, *found, truth)
        if model.training:
            _compare_rates(model, stock, given)
    except VerificationError:
        make_stock(model)
        raise


class _Rates(TorchFunctionMode):
    """Counts the calls of functions and operators that drop something, by rate."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[float] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names: list[str] = []
        if isinstance(func, torch._ops.OpOverloadPacket) and "default" in func.overloads():
            names = [argument.name for argument in func.default._schema.arguments]
        call = dict(zip(names, args, strict=False)) | kwargs
        if func is functional.dropout and not call.get("training", True):
            call = {}
        rate = call.get("p" if func is functional.dropout else "dropout_p")
        if rate:
            self.found[rate] += 1
        return func(*args, **kwargs)


def _compare_rates(model: Any, stock: Any, given: Mapping[str, Any]) -> None:
    """Compares how often both models drop at which rate.

    Raises:
        VerificationError: not equally often.
    """
    rates = []
    device = model.get_input_embeddings().weight.device
    devices = [device] if device.type == "cuda" else []
    for copied in (copy.deepcopy(stock), copy.deepcopy(model)):
        copied.__dict__.pop("_bert_unpad_verify", None)
        with torch.random.fork_rng(devices), torch.no_grad(), _Rates() as counted:
            copied.train()(**given)
        rates.append(dict(sorted(counted.found.items())))
    if rates[0] != rates[1]:
        raise VerificationError(
            f"{type(model).__name__}: dropout: stock modules drop at the rates (and so often) "
            f"{rates[0]}, packed ones at {rates[1]}; the model is stock again"
        )


def _pair(
    stock: nn.Module, packed: nn.Module, dtype: torch.dtype, given: Mapping[str, Any], kept: Tensor
) -> tuple[Found, Found]:
    models = [copy.deepcopy(model).to(dtype) for model in (stock, packed)]
    models[1].__dict__.pop("_bert_unpad_verify", None)
    return _run(models[0], given, kept), _run(models[1], given, kept)


def _run(model: Any, given: Mapping[str, Any], kept: Tensor) -> Found:
    """All layers' outputs at the tokens that are kept, and gradients; in order, in float64."""
    found: Found = {}
    tokens = int(kept.sum())

    def rows(x: Tensor) -> Tensor:
        padded = tuple(x.shape[:2]) == tuple(kept.shape)
        return (x[kept] if padded else x.flatten(0, 1)).detach().double()

    def keep(name: str):
        def hook(_module: nn.Module, _inputs: object, out: Any) -> None:
            x = out[0] if isinstance(out, tuple) else out
            times = sum(key.split("#")[0] == name for key in found)  # ALBERT calls a layer again
            found[f"{name}#{times}" if times else name] = rows(x)

        return hook

    handles = [
        layer.register_forward_hook(keep(f"{name}.{number}"))
        for name, layers in model.named_modules()
        if isinstance(layers, nn.ModuleList)
        for number, layer in enumerate(layers)
        if not isinstance(layer, nn.ModuleList)
    ]
    dtype = model.get_input_embeddings().weight.dtype
    given = {
        name: x.detach().to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }
    out = model.eval()(**given, return_dict=True)
    for handle in handles:
        handle.remove()
    last = out.get("last_hidden_state")
    if last is None or last.shape[:2] != kept.shape:
        raise ValueError(
            f"{type(model).__name__}: verify: expected an encoder of text, whose last_hidden_state "
            f"is {list(kept.shape)} as its mask, got {None if last is None else list(last.shape)}"
        )
    found["last_hidden_state"] = rows(last)
    pooled = out.get("pooler_output")
    if pooled is not None:
        found["pooler_output"] = pooled.detach().double()
    if torch.is_grad_enabled() and last.requires_grad:
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn((tokens, last.shape[-1]), generator=generator).to(last)
        total = (last[kept] * probe).sum()
        if pooled is not None:
            total = total + (pooled * probe[: len(pooled), : pooled.shape[-1]]).sum()
        total.backward()
        found |= {
            f"gradient of {name}": p.grad.double()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
    return found


def _compare(
    model: nn.Module, how: str, dtype: torch.dtype, stock: Found, packed: Found, truth: Found
) -> None:
    step = torch.finfo(dtype).eps
    for name, want in stock.items():
        got, exact = packed.get(name), truth[name]
        size = exact.abs().max().item()
        limit = _ERRORS * (want - exact).abs().max().item() + _STEPS * step * size
        if got is not None and got.shape == want.shape:
            difference = (got - want).abs().max().item()
            if difference <= limit:
                continue
            said = f"differ by {difference:.2g}, rounding explains {limit:.2g}"
        else:
            shape = "nothing" if got is None else list(got.shape)
            said = f"have {list(want.shape)} and {shape}"
        raise VerificationError(
            f"{type(model).__name__}: {name}: in {how} stock and packed modules {said}; the "
            "model is stock again"
        )
