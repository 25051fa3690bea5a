"""The models of docs/models.md by `attn_implementation="bert_unpad_flash"`: each is what the page
says, with small random weights, in outputs and gradients."""

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_unpad import hf
from bert_unpad.hf.flash import NAME, attention
from tests.support.hf_models import transformers
from tests.support.paths import ROOT
from tests.support.seeds import derived
from tests.support.tiny_models import (
    Call,
    inputs,
    model_class,
    packed_inputs,
    tiny_config,
    tiny_model,
)
from tests.support.tolerances import assert_same_gradients, assert_same_values

assert hf.unpad  # importing hf registers the implementation

PAGE = (ROOT / "docs" / "models.md").read_text()
ROWS = re.findall(r"^\| (\w+) \| `(\w+)` \| (.+?) \|(?: (.+?) \|)?$", PAGE, re.M)
# What the page says is of one version. In others a model may be refused or not served as well.
VERSION = re.search(r"transformers (\d+\.\d+)", PAGE)[1]
OTHER_VERSION = not transformers.__version__.startswith(f"{VERSION}.")
Step = tuple[dict[str, Tensor], dict[str, Tensor]]


@pytest.fixture
def masks() -> Iterator[list[Tensor | None]]:
    """The mask of each call of our attention."""
    found: list[Tensor | None] = []

    def spy(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        found.append(args[4] if len(args) > 4 else kwargs["attention_mask"])
        return attention(*args, **kwargs)

    transformers.AttentionInterface.register(NAME, spy)
    yield found
    transformers.AttentionInterface.register(NAME, attention)


def real(name: str, x: Tensor, call: Call, masks: list[Tensor | None]) -> Tensor:
    """What of an output belongs to tokens that the mask keeps, and frames made of such."""
    decoded = {"decoder_input_ids", "encoder_hidden_states"} & {*call}
    decoded = decoded and not name.startswith("encoder")
    for mask in masks:
        if mask is None or decoded or x.dim() < 3 or len(x) != len(mask):
            continue
        if mask.shape[1] == x.shape[1] + 1:  # a class token before
            mask = mask[:, 1:]
        if x.shape[1] % mask.shape[1] == 0:
            mask = mask.repeat_interleave(x.shape[1] // mask.shape[1], 1)
        if mask.shape[1] % x.shape[1] == 0:
            return x[mask.bool().unflatten(1, (x.shape[1], -1)).all(-1)]
    return x


def step(model: nn.Module, call: Call, masks: list[Tensor | None]) -> Step:
    """All outputs, and the gradients of a sum of them."""
    kind = next(model.parameters()).dtype

    def cast(x: Any) -> Any:
        if isinstance(x, list):
            return [cast(item) for item in x]
        return x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() else x

    torch.manual_seed(derived(7))  # ViT-MAE leaves out random patches
    out = model(**{name: cast(x) for name, x in call.items()})
    named = out.items() if hasattr(out, "items") else [("out", out)]
    outs = {
        f"{name} {number}": real(name, x, call, masks)
        for name, value in named
        for number, x in enumerate(value if isinstance(value, (list, tuple)) else [value])
        if isinstance(x, Tensor) and x.requires_grad
    }
    generator = torch.Generator().manual_seed(derived(5))
    total = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in outs.values())
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: x.detach() for name, x in outs.items()}, gradients


def assert_same_step(got: Step, want: Step, truth: Step) -> None:
    assert_same_values(got[0], want[0], truth=truth[0])
    assert_same_gradients(got[1], want[1], truth=truth[1])


def models(package: str, name: str) -> tuple[nn.Module, nn.Module]:
    """The model with its own attention and with ours."""
    kind = model_class(package, name)
    if kind is None:
        pytest.skip("this version of transformers lacks it")
    stock = tiny_model(kind)
    ours = kind._from_config(tiny_config(kind), attn_implementation=NAME).float().eval()
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def refused(result: str) -> Any:
    named = re.search("`(.+?)`", result)
    return pytest.raises(ValueError, match=named[1])


@contextlib.contextmanager
def other_versions_may_raise() -> Iterator[None]:
    """Models of other versions than the page's may be refused, and built or called otherwise."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        if OTHER_VERSION:
            pytest.skip(f"transformers {transformers.__version__}: {error}")
        raise


def rows(column: int) -> Any:
    found = [(*row[:2], row[column]) for row in ROWS if row[column] not in ("", "not seen")]
    return pytest.mark.parametrize(("package", "name", "result"), found, ids=[r[1] for r in found])


@rows(2)
def test_a_model(package: str, name: str, result: str, masks: list[Tensor | None]) -> None:
    with other_versions_may_raise():
        if "its own kernels" in result:
            assert NAME not in model_class(package, name)._compatible_flash_implementations
            return
        stock, ours = models(package, name)
        call = inputs(stock)
        if result.startswith("refused"):
            with refused(result):
                ours(**call)
            return
        if result.startswith("not served"):
            with contextlib.suppress(NameError, RuntimeError):  # of transformers
                ours(**call)
            assert not masks
            return
        got = step(ours, call, masks)
        want, truth = (step(m, call, masks) for m in (stock, copy.deepcopy(stock).double()))
        assert masks
    if OTHER_VERSION and "attention_mask" in call and not any(mask is not None for mask in masks):
        pytest.skip("this version of transformers drops the mask")
    assert_same_step(got, want, truth)


@rows(3)
def test_packed_input(package: str, name: str, result: str) -> None:
    with other_versions_may_raise():
        stock, ours = models(package, name)
        together, alone = packed_inputs(stock)
        if result.startswith("refused"):
            with refused(result):
                ours(**together)
            return
        with torch.no_grad():
            got = ours(**together)[0]
            want, truth = (
                torch.cat([model(input_ids=row)[0] for row in alone], 1)
                for model in (stock, copy.deepcopy(stock).double())
            )
    assert_same_values(got, want, truth=truth)
