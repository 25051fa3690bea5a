"""`attn_implementation="bert_unpad_flash"` against sdpa, padded and packed, with gradients."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from bert_unpad import hf
from bert_unpad.hf.flash import NAME, attention
from tests.support.hf_models import transformers
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_gradients, assert_same_values

assert hf.unpad  # importing hf registers the implementation

FIELDS = {
    "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 64, "initializer_range": 0.2,
    "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
    "mask_token_id": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
# A row for each family: what else its configuration takes, and where its positions begin.
FAMILIES: dict[str, tuple[dict, int]] = {
    "Bert": ({}, 0),
    "Roberta": ({}, 2),
    "XLMRoberta": ({}, 2),
    "Camembert": ({}, 2),
    "Electra": ({}, 0),
    "DistilBert": ({"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "dropout": 0.0}, 0),
    "Albert": ({"embedding_size": 32}, 0),
    "ModernBert": ({"local_attention": 4, "num_hidden_layers": 3}, 0),
    "EuroBert": ({"num_key_value_heads": 2}, 0),
    "Esm": ({"position_embedding_type": "rotary"}, 0),
    "NomicBert": ({}, 0),
    "Ernie": ({}, 0),
    "XLMRobertaXL": ({}, 2),
    "RobertaPreLayerNorm": ({}, 2),
    "RoCBert": ({}, 0),
    "JinaEmbeddingsV3": ({}, 0),
    "BertGeneration": ({}, 0),
    "ModernBertDecoder": ({"local_attention": 4, "num_hidden_layers": 3}, 0),
    "Llama": ({}, 0),
}
LENGTHS = (9, 5, 1, 7)
# transformers before 5.23 lacks some.
KNOWN = [name for name in FAMILIES if hasattr(transformers, f"{name}Config")]


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """One model with sdpa, and the same with ours."""
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}Model", None)
    model_class = model_class or getattr(transformers, f"{name}Encoder")
    models = []
    for implementation in ("sdpa", NAME):
        more = FAMILIES[name][0] if name in FAMILIES else {}
        config = config_class(**copy.deepcopy(FIELDS | more))
        torch.manual_seed(derived(0))
        models.append(model_class._from_config(config, attn_implementation=implementation))
    return models[0], models[1]


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(derived(2))
    return [torch.randint(5, 61, (length,), generator=generator) for length in LENGTHS]


def packed(ids: list[Tensor], first: int) -> dict[str, Tensor | int]:
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    positions = [torch.arange(first, first + length) for length in LENGTHS]
    return {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat(positions)[None],
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }


def padded(ids: list[Tensor]) -> dict[str, Tensor]:
    columns = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=1)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": columns, "attention_mask": mask.long()}


def same_step(ours: nn.Module, stock: nn.Module, double: nn.Module, run: Callable) -> None:
    """Outputs and gradients are equal to rounding."""
    outs, found = [], []
    for model in (ours, stock, double):
        model.zero_grad()
        out = run(model)
        probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(derived(5)))
        (out * probe).sum().backward()
        outs.append(out.detach())
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_same_values(outs[0], outs[1], truth=outs[2])
    assert_same_gradients(found[0], found[1], truth=found[2])


@pytest.mark.parametrize("name", KNOWN)
def test_a_family(name: str) -> None:
    stock, ours = (model.eval() for model in pair(name))
    assert stock.config._attn_implementation == "sdpa"
    assert ours.config._attn_implementation == NAME
    double = copy.deepcopy(stock).double()
    ids = rows()
    batch = padded(ids)
    keep = batch["attention_mask"].bool()
    same_step(ours, stock, double, lambda m: m(**batch)[0][keep])
    # Packed: each sequence as it is alone.
    together = packed(ids, FAMILIES[name][1])

    def run(model: nn.Module) -> Tensor:
        if model is ours:
            return model(**together)[0]
        return torch.cat([model(input_ids=row[None])[0] for row in ids], 1)

    same_step(ours, stock, double, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_good_as_sdpa(dtype: torch.dtype) -> None:
    stock, ours = (model.eval() for model in pair("ModernBert"))
    batch = padded(rows())
    keep = batch["attention_mask"].bool()
    with torch.no_grad():
        truth = stock(**batch)[0][keep]
        errors = [
            (model.to(dtype)(**batch)[0][keep].float() - truth).norm() for model in (ours, stock)
        ]
    assert errors[0] <= 1.5 * errors[1]


def test_dropout_follows_the_seed() -> None:
    _, model = pair("Bert")
    model.config.attention_probs_dropout_prob = 0.3
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), nn.Dropout):
            module.dropout.p = 0.3
    batch, outs = padded(rows()), []
    for seed in (1, 1, 2):
        torch.manual_seed(derived(seed))
        outs.append(model.train()(**batch)[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])


def test_the_earlier_name_raises_and_names_this_one() -> None:
    config = transformers.BertConfig(**FIELDS)
    model = transformers.BertModel._from_config(config, attn_implementation="bert_unpad")
    with pytest.raises(ValueError, match="attn_implementation: expected 'bert_unpad_flash'"):
        model(**padded(rows()))


def test_inference_mode_and_a_change_of_implementation() -> None:
    stock, _ = pair("Bert")
    ours = copy.deepcopy(stock)
    ours.set_attn_implementation(NAME)
    batch = padded(rows())
    keep = batch["attention_mask"].bool()
    with torch.inference_mode():
        assert_same_values(ours.eval()(**batch)[0][keep], stock.eval()(**batch)[0][keep])


@pytest.mark.parametrize("argument", ["s_aux", "softcap", "position_bias", "block_table"])
def test_what_is_not_computed_raises(argument: str) -> None:
    query = torch.zeros(1, 2, 7, 32)
    with pytest.raises(ValueError, match=f"Module: {argument}: expected None"):
        attention(nn.Module(), query, query, query, None, **{argument: torch.zeros(2)})


def test_a_mask_of_pairs_of_tokens_raises() -> None:
    _, model = pair("Bert")
    batch = padded(rows())
    pairs = batch["attention_mask"].bool()[:, None, None].expand(-1, 1, max(LENGTHS), -1)
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \[batch, tokens\]"):
        model(input_ids=batch["input_ids"], attention_mask=pairs)


def test_a_model_that_mixes_tokens_elsewhere_is_refused_packed_input() -> None:
    more = {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32}
    config = transformers.MobileBertConfig(**FIELDS | more)
    model = transformers.MobileBertModel._from_config(config, attn_implementation=NAME).eval()
    ids = rows()
    model(**padded(ids))
    batch = packed(ids, 0)
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected a padded batch"):
        model(**batch)


@pytest.mark.parametrize("name", ["Llama4TextAttention", "NllbMoeAttention", "PegasusXAttention"])
def test_a_decoder_that_is_causal_by_its_mask_alone_raises(name: str) -> None:
    query = torch.zeros(1, 2, 7, 32)
    with pytest.raises(ValueError, match=f"{name}: is_causal: expected True of a decoder"):
        attention(type(name, (nn.Module,), {})(), query, query, query, None, is_causal=False)


def test_queries_that_are_other_tokens_than_the_keys() -> None:
    generator = torch.Generator().manual_seed(derived(4))
    module = type("CrossAttention", (nn.Module,), {"is_causal": False})()
    module.linear, module.config = nn.Linear(1, 1), SimpleNamespace(_attn_implementation=NAME)
    mask = torch.arange(7) < torch.tensor([7, 4])[:, None]
    for queries in (5, 7):
        sizes = ((2, 4, queries, 16), (2, 2, 7, 16), (2, 2, 7, 16))
        q, k, v = (torch.randn(size, generator=generator, requires_grad=True) for size in sizes)
        got, _ = attention(module, q, k, v, mask)
        want = nn.functional.scaled_dot_product_attention(
            q, k, v, mask[:, None, None], enable_gqa=True
        ).transpose(1, 2)
        assert_same_values(got, want)
        probe = torch.randn(want.shape, generator=generator)
        assert_same_values(
            torch.autograd.grad(got, (q, k, v), probe), torch.autograd.grad(want, (q, k, v), probe)
        )
    with pytest.raises(ValueError, match="CrossAttention: sliding_window: expected None"):
        attention(module, q[:, :, :5], k, v, mask, sliding_window=3)


def test_a_mask_of_other_parts_raises() -> None:
    from transformers import masking_utils

    _, model = pair("Bert")
    states = torch.zeros(2, 7, 64)
    blocks = masking_utils.packed_sequence_mask_function(torch.zeros(2, 7))
    masks = masking_utils.create_bidirectional_mask
    assert masks(model.config, states, None, and_mask_function=blocks) is None
    with pytest.raises(ValueError, match=r"mask: expected one of .*, got test_a_mask_of_other"):
        masks(model.config, states, None, or_mask_function=lambda *_indices: True)
