"""Converts BERT pretraining checkpoints between the layouts in use: `python -m bert_unpad.convert`.

    python -m bert_unpad.convert pytorch_model.bin out --from nvidia --config bert_config.json
    python -m bert_unpad.convert uncased_L-12_H-768_A-12/bert_model.ckpt out --from google
    python -m bert_unpad.convert out model.pt --to nvidia

| layout | what it is |
|---|---|
| hf | a directory: config.json and model.safetensors, as transformers and this package write it |
| google | a TensorFlow 1 checkpoint <prefix>.index, .data-...; bert_config.json beside it |
| nvidia | a PyTorch file with the names of NVIDIA's DeepLearningExamples and MLPerf's reference |

All conversions go through Hugging Face's names. A tensor is never dropped silently: what a layout
does not know, or lacks, ends the conversion with its name, or is listed with `--allow-partial`.
"""

from bert_unpad.convert.cli import LAYOUTS, main
from bert_unpad.convert.conversion import Conversion

__all__ = ["LAYOUTS", "Conversion", "main"]
