"""Hugging Face BERT without padding: `unpad(model)` replaces its layers by packed ones, in place.

Importing this package needs transformers, and registers the attention implementation "bert_unpad".
`unpad` needs transformers 5.0; the attention implementation also works with 4.57. `import
bert_unpad` never imports transformers: `bert_unpad.hf` is loaded on first use.
"""

from bert_unpad.hf._versions import has_attention_tables, require_transformers

require_transformers()

from bert_unpad.hf.attention import register as _register  # noqa: E402
from bert_unpad.hf.collator import DataCollatorForPackedMLM  # noqa: E402
from bert_unpad.hf.fallback import StockFallbackWarning  # noqa: E402
from bert_unpad.hf.swap import Support, repad, supports, unpad  # noqa: E402

__all__ = [
    "DataCollatorForPackedMLM",
    "StockFallbackWarning",
    "Support",
    "repad",
    "supports",
    "unpad",
]

_register()
if has_attention_tables():
    from bert_unpad.hf import attention_v4

    attention_v4.register()
