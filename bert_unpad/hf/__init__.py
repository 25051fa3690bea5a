"""Hugging Face BERT without padding: `unpad(model)` replaces its layers by packed ones, in place.

Importing this package needs transformers, and registers the attention implementations "bert_unpad"
and "bert_unpad_flash". `unpad` and the latter need transformers 5.0, the other one also works with
4.57. `import bert_unpad` never imports transformers: `bert_unpad.hf` is loaded on first use.
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
else:
    from bert_unpad.hf import flash

    flash.register()
