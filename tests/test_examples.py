"""The examples run, and do what they say, on tiny models."""

import json
import queue
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")
pytest.importorskip("tokenizers")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import embedding_server  # noqa: E402
import finetune  # noqa: E402

from bert_unpad.data import WordPieceTokenizer  # noqa: E402

WORDS = {"fish": "salmon trout carp pike", "birds": "raven eagle heron swan"}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """A library of two modules whose docstrings a model can tell apart."""
    root = tmp_path_factory.mktemp("library")
    for module, words in WORDS.items():
        names = words.split()
        functions = []
        for i in range(60 if module == "fish" else 40):
            text = f"{names[i % 4]} and {names[i // 4 % 4]} or number {i} of {module}"
            functions.append(f'def f{i}():\n    """{text}"""')
        (root / f"{module}.py").write_text("\n".join(functions))
    return root


def test_finetune(library, tmp_path, packed_calls):
    names, pairs = finetune.labelled_texts(library, 5)
    assert names == ["fish", "birds"]
    assert len(pairs) == 100
    assert not any("fish" in text or "birds" in text for text, _ in pairs)
    arguments = ["--root", str(library), "--layers", "1", "--hidden", "32", "--vocab-size", "90",
                 "--epochs", "12", "--batch-size", "8", "--output", str(tmp_path)]  # fmt: skip
    result = finetune.main(arguments)
    assert packed_calls
    assert 0.4 < result["majority"] < 0.8
    assert result["accuracy"] > 0.9


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    WordPieceTokenizer.train(lambda: [list(WORDS.values()) * 5], vocab_size=90).save(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=64, max_position_embeddings=16,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return embedding_server.Encoder(str(folder))


def test_embedding_server(encoder):
    batches = []

    def encode(texts):
        batches.append([len(text) for text in texts])
        return encoder.encode(texts)

    batcher = embedding_server.Batcher(encode, max_tokens=20)
    batcher.start()
    server = embedding_server.make_server(encoder, batcher, port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def post(body: bytes):
        address = f"http://127.0.0.1:{server.server_port}"
        return json.load(urllib.request.urlopen(address, data=body, timeout=30))

    texts = ["salmon", "raven eagle heron swan", "carp pike", "trout " * 40, "eagle"]
    found = post(json.dumps({"texts": texts}).encode())["embeddings"]
    for text, vector in zip(texts, found, strict=True):
        ids = encoder.tokenize(text)
        assert len(ids) <= 16
        (alone,) = encoder.encode([ids])
        torch.testing.assert_close(torch.tensor(vector), torch.tensor(alone))
    assert sum(map(len, batches)) == 5
    assert all(sum(batch) <= 20 for batch in batches)
    assert post(b'{"texts": []}') == {"embeddings": []}
    for body in (b"nothing", b"[]", b'{"texts": "a"}', b'{"texts": [1]}'):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(body)
    batcher.stop()
    server.shutdown()
    server.server_close()


def test_the_queue_is_bounded_and_errors_reach_who_asked():
    def fail(texts):
        raise ValueError("no model")

    batcher = embedding_server.Batcher(fail, max_waiting=2)
    answers = [batcher.submit([1]), batcher.submit([2])]
    with pytest.raises(queue.Full):
        batcher.submit([3])
    batcher.start()
    for answer in answers:
        with pytest.raises(ValueError, match="no model"):
            answer.result(timeout=30)
    batcher.stop()
    assert not batcher.is_alive()
