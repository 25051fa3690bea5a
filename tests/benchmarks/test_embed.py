"""The embedding benchmark on tiny models, without its peers."""

import json
from functools import partial

import numpy as np
import pytest
import torch
import torch._inductor.config

pytest.importorskip("sentence_transformers", minversion="6.0")

from benchmarks import embed
from benchmarks.lib import (
    embed_contenders,
    embed_shapes,
    embed_tables,
    embed_texts,
    harness,
    report,
)
from benchmarks.lib.embed_contenders import (
    COMPILED,
    FROZEN,
    FROZEN_8BIT,
    NOT_EXACT,
    ONNX,
    OURS,
    OURS_8BIT,
    PACKAGES,
    STRING,
    TORCH,
)
from benchmarks.lib.embed_shapes import Shape
from tests.support.seeds import derived

TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96,
    "vocab_size": 99,
}  # fmt: skip
ESM = embed_shapes.SHAPES["esm2_t12_35M"].fields | TINY | {"vocab_size": 33}
SHAPES = {
    "encoder": Shape("Bert", "mean", TINY, 64, 40, ("queries", "mixed", "bulk"), token_types=True),
    "reranker": Shape("Bert", "rerank", TINY, 64, 40, token_types=True),
    "proteins": Shape("Esm", "logits", ESM, 64, 40, ("antibodies",)),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path) -> None:
    """Tiny models, no peers, results in a folder of their own; PyTorch's threads as before."""
    monkeypatch.setattr(embed, "SHAPES", SHAPES)
    for name in PACKAGES:
        monkeypatch.setitem(PACKAGES, name, "no_such_package")
    monkeypatch.delitem(embed_contenders.CONTENDERS, COMPILED)  # half a minute
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "cpu")
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(monkeypatch, tmp_path, *given: str) -> dict:
    monkeypatch.setattr("sys.argv", ["embed.py", "--rounds", "1", "--threads", "1", *given])
    embed.main()
    return json.loads((tmp_path / "cpu" / "embed.json").read_text())


def test_a_whole_run(monkeypatch, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    found = run(monkeypatch, tmp_path)
    assert (tmp_path / "cpu" / "embed.png").stat().st_size > 1000
    cells = {(cell["shape"], cell["lengths"]): cell for cell in found["cells"]}
    assert list(cells) == [(name, x) for name, shape in SHAPES.items() for x in shape.lengths]
    for cell in cells.values():
        rows = {x["contender"]: x for x in cell["results"]}
        rounded = [rows.pop(name) for name in NOT_EXACT if name in rows]
        assert {OURS_8BIT, FROZEN_8BIT} <= {x["contender"] for x in rounded}
        assert all(x["cosine"] > 0.999 for x in rounded)
        assert list(rows) == [TORCH, STRING, OURS, FROZEN]
        assert cell["missing"][ONNX] == "no_such_package is not installed"
        assert all(x["error"] < 1e-4 and x["cosine"] > 0.9999 for x in rows.values())
        assert all(len(x["rounds"]) == len(x["cpu_rounds"]) == 1 for x in rows.values())
    assert cells["encoder", "bulk"]["fill"] > cells["encoder", "mixed"]["fill"]
    text = embed_tables.embedding()
    for line in ("| encoder | mixed | 40 |", "| reranker | mixed | torch | 2.0 |"):
        assert line in text
    assert "the fastest, " in text
    assert ", ours |" in text
    assert f"{ONNX}: no_such_package" in text


def test_a_stopped_run_goes_on(monkeypatch, tmp_path) -> None:
    first = run(monkeypatch, tmp_path, "--shapes", "proteins")
    both = run(monkeypatch, tmp_path, "--shapes", "proteins", "reranker", "--resume")
    assert [cell["shape"] for cell in both["cells"]] == ["reranker", "proteins"]
    assert both["cells"][1] == first["cells"][0]
    assert "--resume" not in both["command"]
    with pytest.raises(SystemExit, match=r"seed was 1, is 2"):
        run(monkeypatch, tmp_path, "--resume", "--seed", "2")


def test_a_quick_run_writes_nothing(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(
        "sys.argv", ["embed.py", "--quick", "--shapes", "encoder", "--threads", "1"]
    )
    embed.main()
    assert "encoder, mixed: 32 texts" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_wrong_result_is_left_out() -> None:
    right = np.random.default_rng(derived(0)).normal(size=(5, 8))
    missing: dict[str, str] = {}
    encoders = {TORCH: lambda texts: right, OURS: lambda texts: right + 0.1 * np.abs(right).max()}
    calls, nearness = embed.check(encoders, ["a"] * 5, missing)
    assert list(calls) == list(nearness) == [TORCH]
    assert missing[OURS].startswith("wrong result: 1.0e-01")


@pytest.mark.parametrize("name", SHAPES)
def test_a_graph_takes_the_model_s_place(name: str, tmp_path) -> None:
    """All that an exported graph gets is what the stock model gets."""
    shape = SHAPES[name]
    embed_shapes.save_model(shape, tmp_path)
    build = embed_contenders.Build(shape, tmp_path, 1)
    model = embed_contenders.stock_model(build, "sdpa")

    @torch.no_grad()
    def graph(inputs: dict[str, np.ndarray]) -> np.ndarray:
        assert list(inputs) == embed_contenders.input_names(shape)
        tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
        return model(**tensors)[0].numpy()

    tokens = embed_texts.sample_tokens("mixed", 40, 40, seed=1) + embed_texts.QUESTION
    texts = embed.texts_of(shape, tokens, seed=1)
    stock = embed_contenders.stock(build)(texts)
    found = embed_contenders.on_graph(build, graph)(texts)
    assert embed.compare(found, stock)["error"] < 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_called_is_compiled(name: str, tmp_path, monkeypatch) -> None:
    calls = []

    def compile(function, *, dynamic):
        assert dynamic
        return lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", compile)
    shape = SHAPES[name]
    embed_shapes.save_model(shape, tmp_path)
    with torch._inductor.config.patch(freezing=False):
        encode = embed_contenders.compiled(embed_contenders.Build(shape, tmp_path, 1))
        assert torch._inductor.config.freezing
    encode(embed.texts_of(shape, np.array([30, 40]), seed=1))
    assert calls


def test_texts_have_the_tokens_asked_for() -> None:
    tokens = np.array([4, 30, 17])
    tokenizer = embed_texts.make_tokenizer(200, 64, token_types=True)
    texts = embed_texts.make_texts(tokens, 200, seed=1)
    assert [len(ids) for ids in tokenizer(texts)["input_ids"]] == tokens.tolist()
    assert len({len(text) / (n - 2) for text, n in zip(texts, tokens, strict=True)}) <= 3
    pairs = embed_texts.make_pairs(tokens + embed_texts.QUESTION, 200, seed=1)
    found = tokenizer(*map(list, zip(*pairs, strict=True)))
    lengths = [len(ids) for ids in found["input_ids"]]
    assert lengths == (tokens + embed_texts.QUESTION).tolist()
    assert [sum(kinds) for kinds in found["token_type_ids"]] == (tokens - 1).tolist()
    assert tokenizer.unk_token_id not in {one for ids in found["input_ids"] for one in ids}


def test_lengths_are_those_of_their_model() -> None:
    sample = partial(embed_texts.sample_tokens, longest=1 << 20, seed=1)
    for name, lengths in embed_texts.LENGTHS.items():
        assert sample(name, 20_000).mean() == pytest.approx(lengths.mean + 2, rel=0.03)
    # Whole batches of a sorted call: half of its texts are below the median.
    drawn = np.sort(sample("bulk", 128))
    assert len(drawn) == 128
    assert embed_texts.fill_of_sorted_batches(drawn) > 0.95
    whole = sample("mixed", 2048)
    assert np.median(drawn) == pytest.approx(np.median(whole), rel=0.05)


def test_without_results_there_is_the_command() -> None:
    assert "python -m benchmarks.embed" in embed_tables.embedding()
