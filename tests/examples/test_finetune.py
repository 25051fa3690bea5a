"""The example of fine-tuning runs, and does what it says, on a tiny model."""

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")
pytest.importorskip("tokenizers")

from examples import finetune

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


@pytest.mark.filterwarnings("error:.*pin_memory")  # a CPU has no use for it
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
