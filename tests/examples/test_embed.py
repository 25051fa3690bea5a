"""The example of sentence-transformers gives the same results stock and unpadded."""

from pathlib import Path

import pytest

pytest.importorskip("sentence_transformers", minversion="6.0")
pytest.importorskip("datasets")

from examples import embed
from tests.hf.test_sentence_transformers import TEXTS, folder


@pytest.mark.parametrize("kind", embed.KINDS)
def test_embed(tmp_path: Path, kind: str) -> None:
    head = "ForSequenceClassification" if kind == "scores" else "Model"
    path = folder(tmp_path / "MPNet", "MPNet", head)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    found = embed.main([path, "--kind", kind, "--texts", str(texts), "--rounds", "1"])
    assert found["difference"] < 1e-4
    assert len(embed.builtin_texts()) > 50
