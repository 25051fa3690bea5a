"""The contenders of the embedding benchmark: one call that encodes all texts, each on its backend.

sentence-transformers' own "onnx" and "openvino" backends need optimum-onnx and optimum-intel, which
want an older transformers. What they put into a `SentenceTransformer` is a module that runs an
exported graph, and `Graph` is such a module: sorting, batches, tokens and pooling stay those of
sentence-transformers. Graphs are exported from eager attention: ONNX Runtime and OpenVINO took a
tenth less time for a MiniLM than with that of sdpa, and for ModernBERT the same. A peer that is not
installed is left out, and the reason is kept.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from torch import Tensor, nn

from benchmarks.lib.embed_shapes import Shape
from benchmarks.lib.embed_texts import BATCH_SIZE
from bert_unpad import hf
from bert_unpad.hf.flash import NAME as FLASH

TORCH, COMPILED, OURS, STRING = "torch", "torch.compile", "hf.unpad", FLASH
FROZEN = "hf.freeze"
ONNX, OPENVINO, ESM_CPP = "ONNX Runtime", "OpenVINO", "esm-cpp"
ONNX_8BIT, OPENVINO_8BIT, ESM_CPP_8BIT, OURS_8BIT, FROZEN_8BIT = (
    f"{name}, 8 bits" for name in (ONNX, OPENVINO, ESM_CPP, OURS, FROZEN)
)
FROZEN_BF16 = f"{FROZEN}, bf16"
NOT_EXACT = (ONNX_8BIT, OPENVINO_8BIT, ESM_CPP_8BIT, OURS_8BIT, FROZEN_8BIT, FROZEN_BF16)
PACKAGES = {
    **{ONNX: "onnxruntime", ONNX_8BIT: "onnxruntime"},
    **{OPENVINO: "openvino", OPENVINO_8BIT: "nncf"},
    **{ESM_CPP: "esm_cpp", ESM_CPP_8BIT: "esm_cpp"},
}

# What a contender computes of all texts: [texts, hidden], [pairs], or logits [tokens, vocabulary]
# of each protein.
Encode = Callable[[Sequence[Any]], Any]


class LeftOut(Exception):
    """Why a contender is left out."""


class Build(NamedTuple):
    """What contenders are made from."""

    shape: Shape
    folder: Path
    """Of the saved model."""
    threads: int


def attention_of(shape: Shape, name: str) -> dict[str, str]:
    """The argument that chooses an attention, where the family lets it be chosen."""
    chosen = shape.model_class._supports_sdpa or name == FLASH
    return {"attn_implementation": name} if chosen else {}


def stock_model(build: Build, attention: str) -> nn.Module:
    kind, more = build.shape.model_class, attention_of(build.shape, attention)
    return kind.from_pretrained(build.folder, dtype=torch.float32, **more).eval()


def sentence_model(build: Build, attention: str) -> nn.Module:
    """A `SentenceTransformer` or `CrossEncoder` of the saved model, on PyTorch."""
    shape, folder = build.shape, str(build.folder)
    more = attention_of(shape, attention)
    if shape.task == "rerank":
        return CrossEncoder(folder, model_kwargs=more, activation_fn=nn.Identity(), device="cpu")
    body = Transformer(folder, model_kwargs=more, max_seq_length=shape.longest)
    pooling = Pooling(body.get_embedding_dimension(), shape.task)
    return SentenceTransformer(modules=[body, pooling, Normalize()], device="cpu")


def encode_of(model: nn.Module) -> Encode:
    """What a user calls."""
    name = "predict" if isinstance(model, CrossEncoder) else "encode"
    return lambda texts: getattr(model, name)(texts, show_progress_bar=False)


def logits_of(model: Callable[..., Any], pad: int) -> Encode:
    """Logits of proteins, as arrays of ids, in batches sorted by length."""

    @torch.inference_mode()
    def run(proteins: Sequence[np.ndarray]) -> list[np.ndarray]:
        order = np.argsort([-len(ids) for ids in proteins])
        found: list[Any] = [None] * len(proteins)
        for rows in np.split(order, range(BATCH_SIZE, len(order), BATCH_SIZE)):
            ids = [torch.from_numpy(proteins[row]) for row in rows]
            padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad)
            out = model(input_ids=padded, attention_mask=(padded != pad).long())["logits"]
            for row, values, own in zip(rows, out, ids, strict=True):
                found[row] = values[: len(own)].numpy()
        return found

    return run


def whole(build: Build, attention: str, change: Callable[[nn.Module], Any]) -> Encode:
    """The shape's encode with PyTorch's model, after a change in place."""
    if build.shape.task == "logits":
        model = stock_model(build, attention)
        change(model)
        return logits_of(model, model.config.pad_token_id)
    model = sentence_model(build, attention)
    change(model)
    return encode_of(model)


def stock(build: Build) -> Encode:
    return whole(build, "sdpa", lambda model: None)


def compiled(build: Build) -> Encode:
    """PyTorch's compiler, which may turn weights into constants of any layout."""
    import torch._inductor.config

    def change(model: nn.Module) -> None:
        torch._inductor.config.freezing = True
        inner = model if build.shape.task == "logits" else model[0].model
        # sentence-transformers calls the function, not the module.
        inner.forward = torch.compile(inner.forward, dynamic=True)

    return whole(build, "sdpa", change)


def unpadded(build: Build, weights: str = "float32", frozen: bool = False) -> Encode:
    def change(model: nn.Module) -> None:
        if not (found := hf.supports(model)):
            raise LeftOut(str(found).splitlines()[0])
        try:
            hf.unpad(model, weights=weights)
            if frozen:
                hf.freeze(model)
        except ValueError as error:
            raise LeftOut(str(error)) from None

    return whole(build, "sdpa", change)


def unpadded_8bit(build: Build) -> Encode:
    """Weights in 8 bits, activations rounded as they come."""
    return unpadded(build, "int8")


def frozen(build: Build) -> Encode:
    """The layers' weights are constants, as in an exported graph."""
    return unpadded(build, frozen=True)


def frozen_bf16(build: Build) -> Encode:
    return unpadded(build, "bfloat16", frozen=True)


def frozen_8bit(build: Build) -> Encode:
    return unpadded(build, "int8", frozen=True)


def by_string(build: Build) -> Encode:
    def change(model: nn.Module) -> None:
        inner = model if build.shape.task == "logits" else model[0].model
        if not inner.is_backend_compatible():
            raise LeftOut("the family's attention cannot be chosen")

    return whole(build, FLASH, change)


class Graph(nn.Module):
    """An exported graph in the place of transformers' model."""

    def __init__(self, model: nn.Module, names: Sequence[str], run: Callable[..., np.ndarray]):
        super().__init__()
        self.config, self.device = model.config, torch.device("cpu")
        self.names, self.run = names, run
        has_head = "For" in type(model).__name__
        self.output = "logits" if has_head else "last_hidden_state"

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        found = self.run({name: inputs[name].numpy() for name in self.names})
        return {self.output: torch.from_numpy(found)}


def on_graph(build: Build, run: Callable[[dict[str, np.ndarray]], np.ndarray]) -> Encode:
    """The shape's encode with an exported graph, which `run` computes."""
    names = input_names(build.shape)
    if build.shape.task == "logits":
        model = stock_model(build, "sdpa")
        return logits_of(Graph(model, names, run), model.config.pad_token_id)
    model = sentence_model(build, "sdpa")
    model[0].model = Graph(model[0].model, names, run)
    return encode_of(model)


def input_names(shape: Shape) -> list[str]:
    return ["input_ids", "attention_mask", *(["token_type_ids"] if shape.token_types else [])]


def export(build: Build) -> Path:
    """Writes the stock model as ONNX, once."""
    path = build.folder / "model.onnx"
    if path.exists():
        return path
    for package in ("onnx", "onnxscript"):
        if not importlib.util.find_spec(package):
            raise LeftOut(f"export needs {package}, which is not installed")
    names = input_names(build.shape)

    class FirstOutput(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Tensor) -> Tensor:
            return self.model(**dict(zip(names, inputs, strict=True)), return_dict=True)[0]

    example = torch.randint(6, 24, (3, 16))
    inputs = (example, torch.ones_like(example), torch.zeros_like(example))[: len(names)]
    any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with _quiet():
        torch.onnx.export(
            FirstOutput(stock_model(build, "eager")).eval(),
            inputs,
            path,
            dynamo=True,
            input_names=names,
            dynamic_shapes=((any_size,) * len(names),),  # of the one argument *inputs
            external_data=False,
            verbose=False,
        )
    return path


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's warnings, which are many, and about operators that are not there."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _onnx_session(path: Path, build: Build) -> Encode:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = build.threads, 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return on_graph(build, lambda inputs: session.run(None, inputs)[0])


def onnx_runtime(build: Build) -> Encode:
    return _onnx_session(export(build), build)


def onnx_runtime_8bit(build: Build) -> Encode:
    """Weights in 8 bits, activations rounded as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = build.folder / "model_8bit.onnx"
    with _quiet():
        quantize_dynamic(export(build), path, weight_type=QuantType.QInt8)
    return _onnx_session(path, build)


def openvino(build: Build) -> Encode:
    """In fp32, which OpenVINO does not choose itself on a CPU that multiplies bf16."""
    import openvino

    return _openvino_graph(openvino.convert_model(export(build)), build)


def openvino_8bit(build: Build) -> Encode:
    """Weights and activations in 8 bits, by ranges that NNCF measures on random texts."""
    import nncf
    import openvino

    rng, names = np.random.default_rng(0), input_names(build.shape)

    def call(length: int) -> dict[str, np.ndarray]:
        ids = rng.integers(6, build.shape.config().vocab_size, (8, length))
        return dict(zip(names, (ids, np.ones_like(ids), np.zeros_like(ids)), strict=False))

    batches = nncf.Dataset([call(length) for length in (8, 16, 32, 64, 128) * 4])
    with _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rounded = nncf.quantize(
            openvino.convert_model(export(build)), batches, model_type=nncf.ModelType.TRANSFORMER
        )
    return _openvino_graph(rounded, build)


def _openvino_graph(model: Any, build: Build) -> Encode:
    import openvino

    options = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": build.threads,
        "ENABLE_HYPER_THREADING": True,  # all the threads that the others have
    }
    graph = openvino.compile_model(model, "CPU", options)
    return on_graph(build, lambda inputs: graph(inputs, share_inputs=True)[0])


def esm_cpp(build: Build, in_8_bits: bool = False) -> Encode:
    """It reads ESM-2's files, with a rotary table for each layer as earlier checkpoints have it."""
    os.environ["ESM_NUM_THREADS"] = str(build.threads)  # read when the first model is loaded
    import esm_cpp
    from safetensors.torch import save_file

    model = stock_model(build, "sdpa")
    width = model.config.hidden_size // model.config.num_attention_heads
    frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in range(model.config.num_hidden_layers):
        name = f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"
        tensors[name] = frequencies.clone()
    path = build.folder / "esm_cpp.safetensors"
    save_file(tensors, path)
    engine = esm_cpp.Model.load_from_safetensors(str(path))
    if in_8_bits:
        engine.quantize_weights()
    return lambda proteins: engine.forward_scheduled([ids.astype(np.int32) for ids in proteins])


CONTENDERS: dict[str, Callable[[Build], Encode]] = {
    TORCH: stock,
    COMPILED: compiled,
    ONNX: onnx_runtime,
    ONNX_8BIT: onnx_runtime_8bit,
    OPENVINO: openvino,
    OPENVINO_8BIT: openvino_8bit,
    ESM_CPP: esm_cpp,
    ESM_CPP_8BIT: partial(esm_cpp, in_8_bits=True),
    STRING: by_string,
    OURS: unpadded,
    OURS_8BIT: unpadded_8bit,
    FROZEN: frozen,
    FROZEN_BF16: frozen_bf16,
    FROZEN_8BIT: frozen_8bit,
}


def versions() -> dict[str, str]:
    """Versions of the libraries that take part, where they are installed."""
    names = ("torch", "transformers", "sentence_transformers", "onnxruntime", "openvino", "nncf")
    found = (name for name in (*names, "esm_cpp") if importlib.util.find_spec(name))
    said = {name: str(importlib.import_module(name).__version__) for name in found}
    return {name: version.partition("-")[0] for name, version in said.items()}


@contextlib.contextmanager
def contenders(
    shape: Shape, threads: int, save: Callable[[Path], None]
) -> Iterator[tuple[dict[str, Encode], dict[str, str]]]:
    """All contenders that can run a shape, and why the others cannot.

    Args:
        shape: the model.
        threads: of each contender.
        save: writes the model's folder.
    """
    found, missing = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        build = Build(shape, Path(folder), threads)
        save(build.folder)
        for name, make in CONTENDERS.items():
            if name in (ESM_CPP, ESM_CPP_8BIT) and shape.family != "Esm":
                continue
            package = PACKAGES.get(name)
            if package and not importlib.util.find_spec(package):
                missing[name] = f"{package} is not installed"
                continue
            try:
                found[name] = make(build)
            except LeftOut as reason:
                missing[name] = str(reason)
        yield found, missing
