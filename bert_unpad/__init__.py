"""BERT training without padding: PyTorch operators, modules and a load-balanced trainer.

Importing the package registers `torch.ops.bert_unpad.*`.
"""

__version__ = "0.1.0"

from bert_unpad import _library as _library  # loads the compiled modules first
