"""The C++ program of examples/cpp: built by CMake against LibTorch, and what it computes."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import bert_unpad
from bert_unpad import hf

PROGRAM = Path(__file__).parents[2] / "examples" / "cpp"
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
BERT = {**SIZES, "intermediate_size": 128}


def bert() -> torch.nn.Module:
    return transformers.BertModel(transformers.BertConfig(**BERT), add_pooling_layer=False)


def roberta() -> torch.nn.Module:
    config = transformers.RobertaConfig(**BERT, max_position_embeddings=66, hidden_act="gelu_new")
    return transformers.RobertaForMaskedLM(config)  # a file whose names have a prefix


def modernbert() -> torch.nn.Module:
    config = transformers.ModernBertConfig(
        **SIZES, intermediate_size=96, local_attention=8, pad_token_id=0, max_position_embeddings=64
    )
    return transformers.ModernBertModel(config)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    build = tmp_path_factory.mktemp("cpp")
    done = subprocess.run(
        [
            *("cmake", "-S", PROGRAM, "-B", build, "-DCMAKE_BUILD_TYPE=Release"),
            f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
            f"-DBERT_UNPAD={bert_unpad.__path__[0]}",
        ],
        capture_output=True,
        text=True,
    )
    if "nlohmann_json" in done.stderr:
        pytest.skip("nlohmann_json is not installed")
    assert done.returncode == 0, done.stderr
    subprocess.run(["cmake", "--build", build], check=True, stdout=sys.stderr)
    return build / "encode"


def run(program: Path, folder: Path, texts: list[list[int]], *words: str) -> Tensor:
    given = "".join(" ".join(map(str, text)) + "\n" for text in texts)
    done = subprocess.run(
        [program, folder, *words], input=given, capture_output=True, text=True, check=True
    )
    rows = [list(map(float, line.split())) for line in done.stdout.splitlines()]
    return torch.tensor(rows)


@pytest.fixture
def texts() -> list[list[int]]:
    lengths = [7, 1, 30, 12]
    return [torch.randint(4, 90, (n,)).tolist() for n in lengths]


def hidden_states(model: torch.nn.Module, texts: list[list[int]], **options: str) -> list[Tensor]:
    """What `hf.unpad` computes in Python, text by text, from one batch."""
    base = hf.unpad(model, **options).base_model.eval()
    longest = max(map(len, texts))
    pad = base.config.pad_token_id
    ids = torch.tensor([text + [pad] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    with torch.inference_mode():
        x = base(input_ids=ids, attention_mask=mask).last_hidden_state
    return [rows[: len(text)] for rows, text in zip(x, texts, strict=True)]


@pytest.mark.parametrize("make", [bert, roberta, modernbert])
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_hidden_states_have_the_bits_of_python(
    make: Callable[[], torch.nn.Module],
    weights: str,
    program: Path,
    texts: list[list[int]],
    tmp_path: Path,
) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    got = run(program, tmp_path, texts, "none", weights)
    want = hidden_states(model, texts, **({"weights": "int8"} if weights == "int8" else {}))
    assert torch.equal(got, torch.cat(want))


@pytest.mark.parametrize("make", [bert, modernbert])
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_vectors(
    make: Callable[[], torch.nn.Module],
    pooling: str,
    program: Path,
    texts: list[list[int]],
    tmp_path: Path,
) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    got = run(program, tmp_path, texts, pooling)
    states = hidden_states(model, texts)
    pooled = torch.stack([x.mean(0) if pooling == "mean" else x[0] for x in states])
    want = torch.nn.functional.normalize(pooled)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("5 6\n\n", "texts: expected token ids in each, got none"),
        ("5 96\n", "texts: ids: expected 0 to 95, got 96"),
        ("5 x\n", "ids: expected integers, got 5 x"),
        (" ".join(["5"] * 513) + "\n", "texts: tokens: expected 0 to 512, got 513"),
    ],
)
def test_bad_texts_are_named(given: str, said: str, program: Path, tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    done = subprocess.run([program, tmp_path], input=given, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"encode: {said}\n"


def test_a_damaged_file_is_named(program: Path, tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    for kept, said in ((4, "complete"), (64, "complete"), (len(content) - 4, "within the file")):
        file.write_bytes(content[:kept])
        done = subprocess.run([program, tmp_path], input="5\n", capture_output=True, text=True)
        assert done.returncode == 1
        assert str(file) in done.stderr
        assert said in done.stderr


def test_an_unknown_model_is_named(program: Path, tmp_path: Path) -> None:
    model = transformers.DistilBertModel(
        transformers.DistilBertConfig(dim=64, n_layers=1, n_heads=4)
    )
    model.save_pretrained(tmp_path)
    done = subprocess.run([program, tmp_path], input="5\n", capture_output=True, text=True)
    assert done.returncode == 1
    assert "model_type: expected bert, roberta" in done.stderr
