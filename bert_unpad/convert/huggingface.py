"""Hugging Face's layout: a directory with config.json and model.safetensors.

Transformers and this package's `BertForPreTraining` write it.
"""

from pathlib import Path

from safetensors.torch import save_file

from bert_unpad._files import replacing
from bert_unpad.convert.conversion import Conversion, expected_shapes
from bert_unpad.nn import weights
from bert_unpad.nn.config import BertConfig
from bert_unpad.nn.weight_files import WEIGHTS_FILE, read_tensors


def read(path: Path, config_path: Path | None = None) -> Conversion:
    """Reads a directory; `config_path` replaces its config.json.

    Raises:
        FileNotFoundError: the directory or a file is missing.
        ValueError: the configuration is not supported, a file is damaged, or the index names a file
            outside the directory.
    """
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} does not exist; expected a folder with {weights.CONFIG_FILE} and "
            f"{WEIGHTS_FILE}"
        )
    config = BertConfig.from_json(config_path or path / weights.CONFIG_FILE)
    known = expected_shapes(config)
    return Conversion(weights.modern_tensors(read_tensors(path), config, known), config)


def write(conversion: Conversion, path: Path) -> None:
    """Writes a directory; creates it if it is missing. Each file appears whole or not at all."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.contiguous() for name, t in conversion.items()}
    with replacing(path / WEIGHTS_FILE) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    values = conversion.config.to_dict() | {"architectures": ["BertForPreTraining"]}
    dtypes = {str(t.dtype).removeprefix("torch.") for t in tensors.values()}
    if len(dtypes) == 1:
        values["dtype"] = dtypes.pop()
    BertConfig.from_dict(values).to_json(path / weights.CONFIG_FILE)
