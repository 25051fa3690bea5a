"""GLiNER on packed tokens: DeBERTa within a model that is not of transformers."""

import copy
from pathlib import Path

import pytest

from bert_unpad import hf
from tests.hf.test_sentence_transformers import TEXTS, folder

gliner = pytest.importorskip("gliner")  # in no extra: it pins an older transformers


def test_entities_are_those_of_the_stock_model(tmp_path: Path, packed_calls: list[int]) -> None:
    path = folder(tmp_path / "DebertaV2", "DebertaV2", "Model")
    config = {"model_name": path, "max_len": 60, "max_width": 3, "hidden_size": 64}
    stock = gliner.GLiNER.from_config({**config, "words_splitter_type": "whitespace"})
    ours = hf.unpad(copy.deepcopy(stock))
    want, got = (m.inference(TEXTS, ["w1", "w5 w7"], threshold=0.0) for m in (stock, ours))
    assert packed_calls
    assert any(want)
    for here, there in zip(got, want, strict=True):
        assert [(x["start"], x["end"], x["label"]) for x in here] == [
            (x["start"], x["end"], x["label"]) for x in there
        ]
        assert [x["score"] for x in here] == pytest.approx([x["score"] for x in there], abs=1e-5)
