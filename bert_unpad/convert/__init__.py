"""Converts BERT pretraining checkpoints between three layouts: `python -m bert_unpad.convert`.

    python -m bert_unpad.convert pytorch_model.bin out --from nvidia --config bert_config.json
    python -m bert_unpad.convert uncased_L-12_H-768_A-12/bert_model.ckpt out --from google
    python -m bert_unpad.convert out model.pt --to nvidia

| layout | what it is |
|---|---|
| hf | a directory: config.json and model.safetensors, as transformers and this package write it |
| google | a TensorFlow 1 checkpoint <prefix>.index, .data-... with a bert_config.json |
| nvidia | a PyTorch file with the names of NVIDIA's DeepLearningExamples and MLPerf's reference |

All conversions go through Hugging Face's names. No tensor is dropped silently: an unknown or
missing tensor is named and ends the conversion, or is only named with `--allow-partial`.
"""

from bert_unpad.convert.cli import LAYOUTS, main
from bert_unpad.convert.conversion import Conversion

__all__ = ["LAYOUTS", "Conversion", "main"]
