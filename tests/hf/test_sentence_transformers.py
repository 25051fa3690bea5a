"""sentence-transformers on packed tokens: by the string, which makes it flatten its batches, and by
`unpad`, where it pads."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from bert_unpad import hf
from bert_unpad.hf.flash import NAME
from tests.support.hf_models import transformers
from tests.support.seeds import derived

sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6.0")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("error::bert_unpad.hf.StockFallbackWarning")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{i}" for i in range(60)]
TEXTS = [" ".join(WORDS[first : first + count]) for first, count in enumerate((3, 1, 12, 2, 7))]
FIELDS = {
    "vocab_size": 80, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 96, "initializer_range": 0.2, "pad_token_id": 0, "cls_token_id": 2,
    "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3, "num_labels": 1,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
DEBERTA = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
    "max_relative_positions": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm",
    "position_biased_input": False, "pooler_dropout": 0.0,
}  # fmt: skip
FAMILIES = {
    "Bert": {},
    "ModernBert": {"local_attention": 4},
    "MPNet": {"pad_token_id": 1},
    "DebertaV2": DEBERTA,
}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(SPECIAL + WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad", "unk", "cls", "sep", "mask")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=64,
        **{f"{name}_token": token for name, token in zip(names, SPECIAL, strict=True)},
    )


def folder(path: Path, family: str, kind: str) -> str:
    torch.manual_seed(derived(0))
    config = getattr(transformers, f"{family}Config")(**FIELDS | FAMILIES[family])
    getattr(transformers, f"{family}{kind}")(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def three(kind: type[nn.Module], path: str, **more: object) -> dict[str, nn.Module]:
    """The stock model, the string where the family knows strings, and `unpad`."""
    served = not path.endswith(("MPNet", "DebertaV2"))
    found = {
        how: kind(path, model_kwargs={"attn_implementation": name}, device="cpu", **more)
        for how, name in (("stock", "sdpa" if served else "eager"), ("string", NAME))
        if served or how == "stock"
    }
    return found | {"unpad": hf.unpad(copy.deepcopy(found["stock"]))}


def assert_same_training(
    found: dict[str, nn.Module],
    kind: str,
    rows: dict[str, list],
    loss: Callable[[nn.Module], nn.Module],
    path: Path,
) -> None:
    """Three updates of each model, by the trainer and arguments whose names begin with `kind`, have
    the losses of the stock one."""
    losses = {}
    for name, model in found.items():
        trainer = getattr(sentence_transformers, f"{kind}er")(
            model=model,
            args=getattr(sentence_transformers, f"{kind}ingArguments")(
                output_dir=str(path / name), per_device_train_batch_size=5, max_steps=3,
                learning_rate=1e-3, report_to=[], disable_tqdm=True, use_cpu=True,
                logging_steps=1, save_strategy="no",
            ),
            train_dataset=datasets.Dataset.from_dict(rows),
            loss=loss(model),
        )  # fmt: skip
        trainer.train()
        losses[name] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses["stock"]) == 3
    for name in found:
        assert losses[name] == pytest.approx(losses["stock"], rel=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_encode_and_train(tmp_path: Path, family: str) -> None:
    path = folder(tmp_path / family, family, "Model")
    found = three(sentence_transformers.SentenceTransformer, path)
    assert "string" not in found or found["string"][0].can_flatten_inputs
    encoded = {name: m.encode(TEXTS, convert_to_tensor=True) for name, m in found.items()}
    for name in found:
        torch.testing.assert_close(encoded[name], encoded["stock"], rtol=1e-4, atol=1e-5)
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
    )

    assert_same_training(
        found,
        "SentenceTransformerTrain",
        {"anchor": TEXTS, "positive": TEXTS[::-1]},
        lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
        tmp_path,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_rerankers_predict(tmp_path: Path, family: str) -> None:
    path = folder(tmp_path / family, family, "ForSequenceClassification")
    found = three(sentence_transformers.CrossEncoder, path)
    pairs = [(query, text) for query in TEXTS[:2] for text in TEXTS]
    scores = {name: model.predict(pairs) for name, model in found.items()}
    for name in found:
        assert scores[name] == pytest.approx(scores["stock"], rel=1e-4, abs=1e-5)


@pytest.mark.skipif(
    not hasattr(sentence_transformers, "MultiVectorEncoder"), reason="needs a newer version"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_vector_for_each_token(tmp_path: Path, family: str) -> None:
    path = folder(tmp_path / family, family, "Model")
    torch.manual_seed(derived(1))
    stock = sentence_transformers.MultiVectorEncoder(path, device="cpu")
    ours = hf.unpad(copy.deepcopy(stock))
    for how in ("encode_query", "encode_document"):
        want, got = (getattr(m, how)(TEXTS) for m in (stock, ours))
        assert [len(x) for x in got] == [len(x) for x in want]
        torch.testing.assert_close(
            torch.cat(list(got)), torch.cat(list(want)), rtol=1e-4, atol=1e-5
        )


def test_rerankers_train(tmp_path: Path) -> None:
    path = folder(tmp_path / "DebertaV2", "DebertaV2", "ForSequenceClassification")
    rows = {"query": TEXTS, "text": TEXTS[::-1], "label": [0.0, 1.0, 0.0, 1.0, 0.0]}
    loss = sentence_transformers.cross_encoder.losses.BinaryCrossEntropyLoss
    found = three(sentence_transformers.CrossEncoder, path)
    assert_same_training(found, "CrossEncoderTrain", rows, loss, tmp_path)
