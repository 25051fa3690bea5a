"""An exported folder gives the trainer's ids and loss through transformers' Auto classes alone."""

import json
import warnings

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.data import JsonTokenizer, train_tokenizer
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.output.report import export

transformers = pytest.importorskip("transformers")

from tests.support.encoder_families import CASES, Case, stock_model

TEXTS = ["the cat sat on the mat", "a dog", "rain fell, and the mat was red."]
LONG = "the cat " * 30
LONGEST = 24


def bare(post_processor: processors.PostProcessor | None) -> JsonTokenizer:
    """Somebody's byte pairs, which add no token around a text and no space before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<unk>", "<s>", "</s>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return JsonTokenizer(tokenizer)


def trained(kind: str):
    return train_tokenizer(kind, lambda: [TEXTS * 5], 300, lowercase=True, alphabet_size=100)


TOKENIZERS = {
    "wordpiece": lambda: trained("wordpiece"),
    "bpe": lambda: trained("bpe"),
    "unigram": lambda: trained("unigram"),
    "bare": lambda: bare(None),
    "trimming": lambda: bare(processors.ByteLevel()),
    "roberta": lambda: bare(processors.RobertaProcessing(("</s>", 3), ("<s>", 2))),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.mark.parametrize("case", [case for case in CASES if "mlm" in case.heads], ids=str)
def test_ids_and_loss_are_the_trainers(case: Case, tokenizer, tmp_path):
    sizes = {"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.pad_id}
    sizes |= {"max_position_embeddings": 40}
    stock_model(case, 0, **sizes).save_pretrained(tmp_path / "fresh")
    ours = EncoderForPreTraining.from_pretrained(tmp_path / "fresh").eval()
    folder = tmp_path / "model"
    with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        export(ours, tokenizer, folder, LONGEST)
        words = transformers.AutoTokenizer.from_pretrained(folder)
        theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
        ids = [[tokenizer.cls_id, *x, tokenizer.sep_id] for x in tokenizer.encode_batch(TEXTS)]
        assert words(TEXTS)["input_ids"] == ids
        given = words(TEXTS, padding=True, return_tensors="pt")
        labels = torch.full_like(given["input_ids"], -100)
        labels[:, 1:3] = given["input_ids"][:, 1:3]
        given["input_ids"][:, 1:3] = words.mask_token_id
        loss = theirs(**given, labels=labels).loss

        batch = VarlenBatch.from_lengths([len(x) for x in ids])
        flat = torch.tensor([token for text in ids for token in text])
        places = torch.tensor([int(b) + i for b in batch.cu_seqlens[:-1] for i in (1, 2)])
        masked = flat.clone()
        masked[places] = tokenizer.mask_id
        out = ours(
            PackedInputs.build(
                batch=batch,
                input_ids=masked,
                token_type_ids=torch.zeros_like(flat),
                masked_positions=places,
                masked_labels=flat[places],
                next_sentence_labels=torch.zeros(len(ids), dtype=torch.int64),
            )
        )
        torch.testing.assert_close(loss, out.mlm_loss_sum / len(places), rtol=1e-4, atol=1e-5)

        cut = words(LONG, truncation=True, return_tensors="pt")
        assert cut["input_ids"].shape == (1, words.model_max_length) == (1, LONGEST)
        theirs(**cut)
    config = json.loads((folder / "config.json").read_text())
    first, last = tokenizer.cls_id, tokenizer.sep_id
    names = ("cls", "bos", "sep", "eos", "mask", "pad")
    expected = [first, first, last, last, tokenizer.mask_id, tokenizer.pad_id]
    assert [config[f"{name}_token_id"] for name in names] == expected
    assert not [str(x.message) for x in warned if "token_id" in str(x.message)]
