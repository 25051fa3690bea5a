"""The load test of the embedding server, without its processes."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sentence_transformers", minversion="6.0")
pytest.importorskip("uvicorn")

from benchmarks import serve
from benchmarks.lib import embed_shapes, embed_tables, harness, report
from benchmarks.lib.embed_shapes import Shape
from examples import embedding_server
from tests.support.seeds import derived

TINY = Shape(
    "Bert",
    "mean",
    {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 96, "vocab_size": 99,
    },
    64,
    8,
    ("mixed",),
    token_types=True,
)  # fmt: skip


@pytest.fixture
def seen() -> list[int]:
    return []


@pytest.fixture
def port(seen: list[int]) -> Iterator[int]:
    """Of a server whose vector of a text is its length."""

    def encode(texts: list[list[int]]) -> list[list[float]]:
        seen.extend(ids[0] for ids in texts)
        return [[float(ids[0])] for ids in texts]

    batcher = embedding_server.Batcher(lambda texts: [[len(text)] for text in texts], encode)
    batcher.start()
    number = serve.free_port()
    server = embedding_server.server(batcher, embedding_server.Limits(), number)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield number
    server.should_exit = True
    thread.join()
    batcher.stop()


def test_every_text_is_asked_for_once_a_round(
    port: int, seen: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = ["x" * number for number in range(1, 12)]
    cell = serve.measure({"a": port, "b": port}, texts, clients=3, rounds=2)
    assert sorted(seen) == sorted(list(range(1, 12)) * 2 * 3)  # a round that does not count too
    for row in cell["results"]:
        assert 0 < row["p50"] <= row["p99"]
        assert row["texts_per_second"] > 0
    payload = {"shape": "tiny", "lengths": "mixed", "rounds": 2, "cells": [cell]}
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "cpu")
    path = harness.save("serve", "cpu", "python -m benchmarks.serve", payload)
    assert json.loads(path.read_text())["cells"] == [cell]
    assert "| 3 | b |" in "\n".join(embed_tables._serving())


def test_a_refused_request_ends_the_run(port: int) -> None:
    with pytest.raises(RuntimeError, match="the server answered 400"):
        serve.load(port, ["fine", "\ud800"], clients=1)


def test_all_contenders_give_the_same_vectors(tmp_path: Path) -> None:
    embed_shapes.save_model(TINY, tmp_path)
    rng = np.random.default_rng(derived(0))
    texts = [[2, *rng.integers(5, 99, number).tolist(), 3] for number in (3, 40, 1, 17)]
    found = {}
    for name in serve.CONTENDERS:
        vectors = np.array(serve.encoder(name, TINY, tmp_path).encode(texts))
        found[name] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(found[serve.OURS], found[serve.PEER], atol=1e-5)
    cosines = (found[serve.OURS_8BIT] * found[serve.PEER]).sum(1)
    assert cosines.min() > 0.99
    assert not np.array_equal(found[serve.OURS_8BIT], found[serve.OURS])
