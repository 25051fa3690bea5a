"""Swapped models of transformers on a GPU, against the stock ones: by `unpad` and by one string."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.support.cuda_checks import GPU_ONLY
from tests.support.hf_models import transformers
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_gradients, assert_same_values

# Skipped above where there is no transformers.
from bert_unpad import hf  # isort: skip
from tests.hf import test_flash  # isort: skip

pytestmark = [
    *GPU_ONLY,
    pytest.mark.filterwarnings("error::bert_unpad.hf.StockFallbackWarning"),
]
# Larger than on a CPU: heads of 32 columns, sequences of several tiles.
FIELDS = test_flash.FIELDS | {
    "hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 192,
    "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
_FLASH = ("Bert", "Roberta", "Electra", "Albert", "EuroBert", "NomicBert", "JinaEmbeddingsV3")
FAMILIES: dict[str, dict[str, object]] = {name: test_flash.FAMILIES[name][0] for name in _FLASH} | {
    "DistilBert": {"dim": 128, "n_layers": 3, "n_heads": 4, "hidden_dim": 192, "dropout": 0.0},
    "ModernBert": {"local_attention": 32},
    "Esm": {"position_embedding_type": "rotary", "token_dropout": True},
    "MPNet": {},
    "DebertaV2": {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32,
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    },
}  # fmt: skip
KNOWN = [name for name in FAMILIES if hasattr(transformers, f"{name}Config")]
BY_STRING = [name for name in KNOWN if name not in ("DebertaV2", "MPNet")]
LENGTHS = (197, 64, 1, 130)


def make(name: str, implementation: str | None = None) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(FIELDS | FAMILIES[name]))
    if name in ("DebertaV2", "MPNet"):
        implementation = None
    torch.manual_seed(derived(0))
    model = getattr(transformers, f"{name}Model")
    return model._from_config(config, attn_implementation=implementation).eval().cuda()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(derived(1))
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, 61, mask.shape, generator=generator)
    return {"input_ids": ids.where(mask, 1).cuda(), "attention_mask": mask.long().cuda()}


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens that are no padding, and the gradients of a random sum of them."""
    call = batch()
    out = model(**call).last_hidden_state[call["attention_mask"].bool()]
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(derived(2))).to(out)
    (out * probe).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["unpad", "string"])
@pytest.mark.parametrize("name", KNOWN)
def test_same_step_as_stock(name: str, way: str, dtype: torch.dtype) -> None:
    if way == "string" and name not in BY_STRING:
        pytest.skip("this family has no choice of attention")
    stock = make(name, "sdpa")
    truth, true_gradients = step(copy.deepcopy(stock).double())
    ours = hf.unpad(copy.deepcopy(stock)) if way == "unpad" else make(name, "bert_unpad_flash")
    if dtype == torch.float32:
        out, gradients = step(ours)
        want, want_gradients = step(stock)
        assert_same_values(out, want, truth=truth)
        assert_same_gradients(gradients, want_gradients, truth=true_gradients)
        return
    (out, gradients), (want, want_gradients) = (step(m.to(dtype)) for m in (ours, stock))
    assert (out - truth).norm() <= 1.5 * (want - truth).norm()
    errors = [_error(found, true_gradients) for found in (gradients, want_gradients)]
    assert errors[0] <= 1.5 * errors[1]


def _error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    return sum(float((g - truth[n]).norm() ** 2) for n, g in found.items()) ** 0.5


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_compiles(name: str) -> None:
    ours = hf.unpad(make(name, "sdpa"))
    call = batch()
    with torch.no_grad():
        want = ours(**call).last_hidden_state
        out = torch.compile(ours)(**call).last_hidden_state
    keep = call["attention_mask"].bool()
    torch.testing.assert_close(out[keep], want[keep], rtol=1e-4, atol=1e-4)
