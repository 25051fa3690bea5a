"""`unpad(model, verify=True)`: the first batch with padding runs stock and packed, with one result.

What is compared are the outputs of all layers at the tokens that the mask keeps and, where
gradients are computed, those of all parameters; in float32, and as the model computes otherwise.
How much rounding explains is measured: the same stock model in float64 tells how far the stock
model itself is off. Dropout is off meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bert_unpad._sharded_types import is_fsdp_module

# Times the stock model's own error, and steps of the dtype at the size of the largest value: two
# ways to add differ by some of both.
_ERRORS, _STEPS = 16.0, 16.0
_ASKED = ("return_dict", "output_hidden_states", "output_attentions", "labels")


class VerificationError(RuntimeError):
    """Packed modules compute something else than the stock modules; the model is stock again."""


Found = dict[str, Tensor]


def verify_once(model: nn.Module, call: Mapping[str, Any]) -> None:
    """Runs `verify` on the first eager call whose batch has padding.

    Raises:
        VerificationError: see `verify`.
        RuntimeError: FSDP has sharded the model, which then cannot be copied.
    """
    mask = call.get("attention_mask")
    if "_bert_unpad_verify" not in vars(model) or torch.compiler.is_compiling() or mask is None:
        return
    if bool((mask != 0).all()):
        return
    if any(
        is_fsdp_module(module) or getattr(module, "_is_fsdp_managed_module", False)
        for module in model.modules()
    ):
        raise RuntimeError(
            f"{type(model).__name__}: verify=True: expected a model that is not sharded; make a "
            "padded call before FSDP"
        )
    verify(model, call)
    del model._bert_unpad_verify


def verify(model: nn.Module, call: Mapping[str, Any]) -> None:
    """Compares a swapped base model with its stock modules on one call with a padded batch.

    Raises:
        VerificationError: they differ by more than rounding. The model has its stock modules then.
    """
    from bert_unpad.hf.swap import repad

    given = {name: x for name, x in call.items() if x is not None and name not in _ASKED}
    kept = given["attention_mask"].bool()
    stock = repad(copy.deepcopy(model))
    if "flash" in stock.config._attn_implementation:  # which has no float64
        stock.config._attn_implementation = "sdpa"
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


def _pair(
    stock: nn.Module, packed: nn.Module, dtype: torch.dtype, given: Mapping[str, Any], kept: Tensor
) -> list[Found]:
    models = [copy.deepcopy(model).to(dtype) for model in (stock, packed)]
    models[1].__dict__.pop("_bert_unpad_verify", None)
    return [_run(model, given, kept) for model in models]


def _run(model: nn.Module, given: Mapping[str, Any], kept: Tensor) -> Found:
    """All layers' outputs at the tokens that are kept, and gradients; in order, in float64."""
    found: Found = {}
    tokens = int(kept.sum())

    def rows(x: Tensor) -> Tensor:
        padded = tuple(x.shape[:2]) == tuple(kept.shape)
        return (x[kept] if padded else x.flatten(0, 1)).detach().double()

    def keep(name: str):
        def hook(_module: nn.Module, _inputs: object, out: object) -> None:
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
    last = out.last_hidden_state
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
    from bert_unpad.hf.swap import repad

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
        repad(model)
        raise VerificationError(
            f"{type(model).__name__}: {name}: in {how} stock and packed modules {said}; the "
            "model has its stock modules again"
        )
