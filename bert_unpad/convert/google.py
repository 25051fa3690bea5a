"""The layout of Google's BERT (github.com/google-research/bert): a TensorFlow 1 checkpoint.

It consists of bert_model.ckpt.index, .data-00000-of-00001 and bert_config.json. Names are those of
TensorFlow's scopes. Weights of dense layers are transposed, except in the next-sentence head.
"""

import re
from pathlib import Path

from bert_unpad.convert.conversion import Conversion, expected_shapes
from bert_unpad.convert.tensor_bundle import TensorBundle, index_path, write_bundle
from bert_unpad.nn.config import BertConfig

CONFIG_FILE = "bert_config.json"

_RENAMED = (
    (r"cls\.predictions\.bias", "cls.predictions.output_bias"),
    (r"(cls\.seq_relationship)\.weight", r"\1.output_weights"),
    (r"(cls\.seq_relationship)\.bias", r"\1.output_bias"),
    (r"(.*_embeddings)\.weight", r"\1"),
    (r"(.*\.LayerNorm)\.weight", r"\1.gamma"),
    (r"(.*\.LayerNorm)\.bias", r"\1.beta"),
    (r"(.*)\.weight", r"\1.kernel"),
)
# Parts of the names of optimizer state (BERT's own Adam, NVIDIA's LAMB, TensorFlow's Adam), and of
# the counters and the loss scale of a training run.
_OPTIMIZER = {
    *("adam_m", "adam_v", "AdamWeightDecayOptimizer", "AdamWeightDecayOptimizer_1"),
    *("LAMB", "LAMB_1", "Adam", "Adam_1", "beta1_power", "beta2_power"),
    *("global_step", "good_steps", "loss_scale"),
}


def google_name(name: str) -> str:
    """Returns Google's name of a tensor for Hugging Face's name."""
    for pattern, replacement in _RENAMED:
        if match := re.fullmatch(pattern, name):
            name = match.expand(replacement)
            break
    return re.sub(r"\blayer\.(\d+)", r"layer_\1", name).replace(".", "/")


def read(path: Path, config_path: Path | None = None) -> Conversion:
    """Reads a checkpoint without the optimizer's state, whose tensors the notes count.

    Args:
        path: <prefix>, <prefix>.index, or a directory with one checkpoint.
        config_path: the configuration; by default bert_config.json in the checkpoint's folder.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged or cut off, there are several checkpoints, or it is an
            object-based checkpoint of TensorFlow 2.
    """
    prefix = _prefix(path)
    if not index_path(prefix).is_file():
        raise FileNotFoundError(
            f"{index_path(prefix)} does not exist; expected a checkpoint's prefix or index, or a "
            "folder with one checkpoint"
        )
    config = BertConfig.from_json(config_path or prefix.with_name(CONFIG_FILE))
    bundle = TensorBundle(prefix)
    if "_CHECKPOINTABLE_OBJECT_GRAPH" in bundle.keys():  # noqa: SIM118
        raise ValueError(
            f"{prefix} is an object-based checkpoint of TensorFlow 2; Google's BERT, by names, "
            "is what can be read"
        )
    names = {google_name(name): name for name in expected_shapes(config)}
    found, left_out = {}, []
    for name in bundle.keys():  # noqa: SIM118
        if name not in names and not _OPTIMIZER.isdisjoint(name.split("/")):
            left_out.append(name)
            continue
        tensor = bundle[name]
        if name.endswith("/kernel") and tensor.dim() == 2:
            tensor = tensor.t().contiguous()
        found[names.get(name, name)] = tensor
    notes: tuple[str, ...] = ()
    if left_out:
        notes = (f"left out {len(left_out)} tensors of an optimizer, from {left_out[0]} on",)
    return Conversion(found, config, notes)


def write(conversion: Conversion, path: Path) -> None:
    """Writes the checkpoint with prefix `path`, and bert_config.json into the same folder."""
    tensors = {}
    for name, tensor in conversion.items():
        target = google_name(name)
        tensors[target] = tensor.t() if target.endswith("/kernel") else tensor
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bundle(path, tensors)
    conversion.config.to_json(path.with_name(CONFIG_FILE))


def _prefix(path: Path) -> Path:
    if path.suffix == ".index":
        return path.with_suffix("")
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.index"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ValueError(f"{path}: expected one checkpoint (*.index), got {names}")
    return found[0].with_suffix("")
