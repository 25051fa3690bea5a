"""The C++ program of examples/cpp: built by CMake against LibTorch, and what it computes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import bert_unpad
from bert_unpad import _C, hf
from tests.support.seeds import derived

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
    if "uses CUDA but I cannot find the CUDA" in done.stderr:
        pytest.skip("this PyTorch is built for CUDA, and CMake finds no CUDA toolkit")
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
    """What `hf.freeze` computes in Python, text by text, from one batch."""
    base = hf.freeze(hf.unpad(model.eval(), **options)).base_model
    longest = max(map(len, texts))
    pad = base.config.pad_token_id
    ids = torch.tensor([text + [pad] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    with torch.inference_mode():
        x = base(input_ids=ids, attention_mask=mask).last_hidden_state
    return [rows[: len(text)] for rows, text in zip(x, texts, strict=True)]


@pytest.mark.parametrize("make", [bert, roberta, modernbert])
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_hidden_states_have_the_bits_of_python(
    make: Callable[[], torch.nn.Module],
    weights: str,
    program: Path,
    texts: list[list[int]],
    tmp_path: Path,
) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    if weights == "bfloat16" and not _C.cpu_isa().endswith(("bf16", "amx")):
        assert "multiplies no bf16" in refused(program, tmp_path, "none", weights)
        return
    got = run(program, tmp_path, texts, "none", weights)
    assert torch.equal(got, torch.cat(hidden_states(model, texts, weights=weights)))


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
        ("5 x\n", "ids: expected integers, got x"),
        ("5 99999999999999999999\n", "ids: expected integers, got 99999999999999999999"),
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


def refused(program: Path, folder: Path, *words: str) -> str:
    """What is said of a folder that cannot be loaded."""
    done = subprocess.run([program, folder, *words], input="5\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


@pytest.mark.parametrize(
    ("make", "name", "shape"),
    [
        (bert, "encoder.layer.1.attention.self.query.bias", None),
        (bert, "embeddings.LayerNorm.bias", None),
        (modernbert, "layers.1.attn_norm.weight", None),
        (modernbert, "layers.0.attn.Wqkv.weight", (2, 64)),
        (bert, "encoder.layer.0.output.dense.weight", (128, 64)),
        (bert, "embeddings.word_embeddings.weight", (95, 64)),
    ],
)
def test_tensors_that_are_missing_or_of_another_shape_are_named(
    make: Callable[[], torch.nn.Module],
    name: str,
    shape: tuple[int, ...] | None,
    program: Path,
    tmp_path: Path,
) -> None:
    make().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    said = refused(program, tmp_path)
    assert name in said
    assert ("expected a tensor" if shape is None else f"got [{shape[0]},{shape[1]}]") in said


@pytest.mark.parametrize(
    ("make", "change", "said"),
    [
        (modernbert, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope_scaling"),
        (
            modernbert,
            {"rope_parameters": {"full_attention": {"type": "linear", "rope_theta": 1e4}}},
            "rope_parameters: expected the rope_type default",
        ),
        (modernbert, {"rope_parameters": {"full_attention": None}}, "rope_parameters: expected"),
        (bert, {"is_decoder": True}, "is_decoder: expected false"),
        (bert, {"num_hidden_layers": -3}, "num_hidden_layers: expected 0 to"),
        (bert, {"hidden_act": "quick_gelu"}, "hidden_act: expected"),
        (bert, {"num_attention_heads": 3}, "num_attention_heads: expected"),
        (bert, {"layer_norm_eps": -1.0}, "layer_norm_eps: expected"),
        (bert, {"position_embedding_type": "relative_key"}, "position_embedding_type: expected"),
    ],
)
def test_settings_that_it_cannot_compute_are_named(
    make: Callable[[], torch.nn.Module],
    change: dict,
    said: str,
    program: Path,
    tmp_path: Path,
) -> None:
    make().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert said in refused(program, tmp_path)


def test_files_of_older_libraries(program: Path, texts: list[list[int]], tmp_path: Path) -> None:
    """Norms are gamma and beta; ModernBERT's layers and angles follow from numbers."""
    model = bert()
    for folder in ("new", "old", "modern", "modern_old"):
        made = model if "modern" not in folder else modernbert()
        torch.manual_seed(derived(0))
        for p in made.parameters():
            p.data.normal_(0, 0.1)
        made.save_pretrained(tmp_path / folder)
    tensors = load_file(tmp_path / "old" / "model.safetensors")
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    older = {
        name.replace(end, names[end])
        if (end := ".".join(name.split(".")[-2:])) in names
        else name: t
        for name, t in tensors.items()
    }
    assert older.keys() != tensors.keys()
    save_file(older, tmp_path / "old" / "model.safetensors")
    config = tmp_path / "modern_old" / "config.json"
    fields = json.loads(config.read_text())
    for name in ("layer_types", "rope_parameters", "sliding_window"):
        fields[name] = None
    config.write_text(json.dumps(fields | {"global_attn_every_n_layers": 3, "local_attention": 8}))
    for new, old in (("new", "old"), ("modern", "modern_old")):
        want = run(program, tmp_path / new, texts, "none")
        assert torch.equal(run(program, tmp_path / old, texts, "none"), want)


def test_an_unknown_model_is_named(program: Path, tmp_path: Path) -> None:
    model = transformers.DistilBertModel(
        transformers.DistilBertConfig(dim=64, n_layers=1, n_heads=4)
    )
    model.save_pretrained(tmp_path)
    assert "model_type: expected bert, roberta" in refused(program, tmp_path)
