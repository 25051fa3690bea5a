"""The attention-only implementation: by transformers' interface, and by the tables of 4.57."""

from types import ModuleType

import pytest
import torch
from torch import nn

from bert_unpad import hf
from bert_unpad.hf import attention_v4
from bert_unpad.hf.attention import attention
from tests.support.hf_models import (
    BATCH,
    MASKS,
    SEQLEN,
    UNPADS,
    assert_same_step,
    call_arguments,
    clone,
    make,
    needs_unpad,
    run,
    transformers,
)
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_gradients, assert_same_values

pytestmark = pytest.mark.filterwarnings("ignore::bert_unpad.hf.StockFallbackWarning")
CASES = [
    *(
        (name, kind)
        for name in ("BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM")
        for kind in MASKS
        if kind != "empty"
    ),
    *((f"{family}ForMaskedLM", "holes") for family in ("XLMRoberta", "Camembert", "Electra")),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_numbers(name, kind, packed_calls):
    mask = MASKS[kind]
    stock, ours = make(name), make(name, attention="bert_unpad")
    call = call_arguments(name, mask)
    assert_same_step(run(ours, call), run(stock, call), mask)
    assert packed_calls == [BATCH * SEQLEN if mask is None else int(mask.sum())] * 2


@pytest.mark.parametrize("name", ["BertModel", "DistilBertModel"])
def test_dropout_follows_the_seed(name, packed_calls):
    model = make(name, attention="bert_unpad", dropout=0.3)
    call = call_arguments(name, MASKS["right"], labels=False)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(derived(seed))
        outs.append(model(**call)[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])
    assert len(packed_calls) == 6


def test_other_attention_is_left_to_transformers(packed_calls):
    call = call_arguments("BertModel", MASKS["right"], labels=False)
    keep = MASKS["right"].bool()
    # A mask for each query.
    stock, ours = make("BertModel").eval(), make("BertModel", attention="bert_unpad").eval()
    shape = (-1, 1, SEQLEN, -1) if UNPADS else (-1, SEQLEN, -1)
    each = MASKS["right"].bool().view(BATCH, *[1] * (len(shape) - 2), SEQLEN).expand(shape)
    full = call | {"attention_mask": each}
    assert_same_values(ours(**full)[0], stock(**full)[0])
    # A decoder, with a cache and with cross-attention.
    decoder = {"is_decoder": True, "add_cross_attention": True}
    stock = make("BertModel", **decoder).eval()
    ours = make("BertModel", attention="bert_unpad", **decoder).eval()
    states = torch.randn(BATCH, 5, 64, generator=torch.Generator().manual_seed(derived(0)))
    seen = torch.ones(BATCH, 5, dtype=torch.int64)
    seen[1, 3:] = 0
    more = {"encoder_hidden_states": states, "encoder_attention_mask": seen}
    for extra in ({"use_cache": False}, {**more, "use_cache": True}):
        got, want = ours(**call, **extra), stock(**call, **extra)
        assert_same_values(got[0][keep], want[0][keep])
    assert packed_calls == []


def test_cross_attention_of_equal_lengths_is_left_to_transformers(packed_calls):
    """The mask is that of the encoder's tokens, not of the queries."""
    decoder = {"is_decoder": True, "add_cross_attention": True}
    stock = make("BertModel", **decoder).eval()
    ours = make("BertModel", attention="bert_unpad", **decoder).eval()
    call = call_arguments("BertModel", None, labels=False)
    call["encoder_hidden_states"] = torch.randn(BATCH, SEQLEN, 64)
    call["encoder_attention_mask"] = MASKS["right"]
    assert_same_values(ours(**call)[0], stock(**call)[0])
    assert packed_calls == []


def windowed(name: str, attention: str) -> nn.Module:
    """A small model with windows (ModernBERT) or with fewer heads of keys (EuroBERT)."""
    fields = {
        "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 64, "initializer_range": 0.2,
        "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "mask_token_id": 4,
    }  # fmt: skip
    if name == "ModernBert":
        more = {"local_attention": 4, "cls_token_id": 2, "sep_token_id": 3}
    else:
        more = {"num_key_value_heads": 2}
    torch.manual_seed(derived(0))
    config = getattr(transformers, f"{name}Config")(**fields | more)
    return getattr(transformers, f"{name}Model")._from_config(config, attn_implementation=attention)


def flattened(lengths: tuple[int, ...]) -> tuple[list[torch.Tensor], dict]:
    """Sequences of these lengths, and what transformers' own collator makes of them."""
    ids = [torch.randint(5, 61, (length,)) for length in lengths]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collator([{"input_ids": row.tolist()} for row in ids])
    del batch["labels"]
    return ids, batch


@needs_unpad
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", ["ModernBert", "EuroBert"])
def test_packed_sequences_do_not_see_one_another(name, backend, packed_calls):
    """Windows and fewer heads of keys included: each sequence is as stock computes it alone."""
    stock, ours = windowed(name, "sdpa"), windowed(name, "bert_unpad")
    ids, batch = flattened((11, 6, 1, 9))
    want = torch.cat([stock(input_ids=row[None])[0] for row in ids], 1)
    call = ours if backend is None else torch.compile(ours, backend=backend)
    got = call(**batch)[0]
    assert_same_values(got, want)
    probe = torch.randn(got.shape)
    found = []
    for model, out in ((ours, got), (stock, want)):
        (out * probe).sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_same_gradients(*found)
    assert backend is not None or packed_calls == [27] * 3
    # One row without a mask may be packed, and its windows are ours.
    assert_same_values(ours(input_ids=ids[0][None])[0], stock(input_ids=ids[0][None])[0])


@needs_unpad
def test_packed_input_never_falls_back():
    _, batch = flattened((4, 3))
    decoder = make("BertModel", attention="bert_unpad", is_decoder=True)
    with pytest.raises(ValueError, match=r"packed input .* because it is causal"):
        decoder(**batch, use_cache=False)
    double = make("BertModel", attention="bert_unpad").double()
    with pytest.raises(ValueError, match=r"its tensors are torch.float64; pass a padded"):
        double(**batch)
    model = make("BertModel", attention="bert_unpad")
    with pytest.raises(ValueError, match="a batch of one row without a mask"):
        model(**batch, attention_mask=torch.ones(1, 7))
    query = torch.zeros(1, 2, 7, 32)
    with pytest.raises(ValueError, match="s_aux: expected None"):
        attention(model, query, query, query, None, s_aux=torch.zeros(2))


@needs_unpad
@pytest.mark.parametrize("how", ["attention", "unpad"])
@pytest.mark.parametrize("compiled", [False, True])
def test_positions_that_restart_need_lengths(how, compiled):
    """What DataCollatorWithFlattening makes by default may be one sequence or several."""
    model = make("BertModel", attention="bert_unpad" if how == "attention" else None)
    model = hf.unpad(model) if how == "unpad" else model
    call = torch.compile(model, backend="aot_eager") if compiled else model
    _, batch = flattened((4, 3))
    given = {key: batch[key] for key in ("input_ids", "position_ids")}
    with pytest.raises((ValueError, RuntimeError), match="position_ids: expected positions that"):
        call(**given)
    model(**given, attention_mask=torch.ones(1, 7))  # one sequence
    model(input_ids=given["input_ids"], position_ids=torch.arange(7)[None] * 2)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", ["BertModel", "DistilBertModel"])
def test_inference_mode(name, kind):
    stock = make(name).eval()
    ours = make(name, attention="bert_unpad").eval()
    mask = MASKS[kind]
    call = call_arguments(name, mask, labels=False)
    keep = torch.ones(BATCH, SEQLEN, dtype=torch.bool) if mask is None else mask.bool()
    with torch.inference_mode():
        assert_same_values(ours(**call)[0][keep], stock(**call)[0][keep])
        if mask is not None:  # an inference tensor, changed in place
            call["attention_mask"] = keep.clone()
            ours(**call)
            keep[0, 7:] = call["attention_mask"][0, 7:] = 0
            assert_same_values(ours(**call)[0][keep], stock(**call)[0][keep])


def test_a_mask_is_read_anew_when_it_changes():
    stock, ours = make("BertModel").eval(), make("BertModel", attention="bert_unpad").eval()
    call = call_arguments("BertModel", MASKS["right"].clone(), labels=False)
    ours(**call)
    call["attention_mask"][0, 7:] = 0
    keep = call["attention_mask"].bool()
    assert_same_values(ours(**call)[0][keep], stock(**call)[0][keep])


@needs_unpad
def test_a_model_can_change_to_it(packed_calls):
    ours = clone(make("BertModel"))
    ours.set_attn_implementation("bert_unpad")
    ours(**call_arguments("BertModel", MASKS["right"], labels=False))
    assert packed_calls


@pytest.mark.skipif(UNPADS, reason="of transformers before 5.0")
def test_before_5_only_attention_is_served():
    model = make("BertModel", attention="bert_unpad")
    assert type(model.encoder.layer[0].attention.self).__name__ == "PackedBertSelfAttention"
    with pytest.raises(ImportError, match=r"hf.unpad needs transformers >= 5.0, but 4.57"):
        hf.unpad(model)


class TableAttention(nn.Module):
    """The "eager" class of a 4.57 table as far as a subclass of it is concerned."""

    is_decoder = False
    position_embedding_type = "absolute"
    num_attention_heads, attention_head_size = 2, 32

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden_states, attention_mask=None, head_mask=None, *_others):
        heads = (self.num_attention_heads, self.attention_head_size)
        q, k, v = (
            layer(hidden_states).unflatten(-1, heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(2, 3) / self.attention_head_size**0.5
        weights = self.dropout(scores if attention_mask is None else scores + attention_mask)
        weights = weights.softmax(-1)
        if head_mask is not None:
            weights = weights * head_mask
        return (weights @ v).transpose(1, 2).flatten(2), weights


@pytest.mark.parametrize("kind", ["none", "right", "left", "holes"])
def test_a_class_made_for_a_table(kind, packed_calls):
    torch.manual_seed(derived(0))
    stock = TableAttention()
    ours = attention_v4.packed_bert_attention(TableAttention)()
    ours.load_state_dict(stock.state_dict())
    mask, keep, added = MASKS[kind], torch.ones(BATCH, SEQLEN, dtype=torch.bool), None
    if mask is not None:
        keep = mask.bool()
        added = (1.0 - mask.float())[:, None, None] * torch.finfo(torch.float32).min
    x = torch.randn(BATCH, SEQLEN, 64, requires_grad=True)
    probe = torch.randn(int(keep.sum()), 64)
    found = []
    for module in (ours, stock):
        out = module(x, added)[0][keep]
        found.append((out, *torch.autograd.grad((out * probe).sum(), [x, module.key.weight])))
    for got, want in zip(*found, strict=True):
        assert_same_values(got, want)
    assert packed_calls == [int(keep.sum())]
    heads = torch.tensor([1.0, 0.0])[:, None, None]
    torch.testing.assert_close(ours(x, added, heads)[0], stock(x, added, heads)[0])
    torch.testing.assert_close(ours(x, added, None, None, None, True), stock(x, added))
    assert len(packed_calls) == 1


def test_a_transformers_without_tables_is_refused(monkeypatch):
    monkeypatch.setattr(attention_v4.importlib, "import_module", lambda name: ModuleType(name))
    with pytest.raises(ImportError, match="use the attention interface or to have BERT_SELF"):
        attention_v4.register()
