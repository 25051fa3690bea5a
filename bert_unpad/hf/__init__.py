"""Hugging Face encoders without padding: `unpad(model)` replaces layers by packed ones, in place.

Importing this package needs transformers 5.0 or newer, and registers the attention implementation
"bert_unpad_flash". `import bert_unpad` never imports transformers: `bert_unpad.hf` is loaded on
first use.
"""

from bert_unpad.hf._versions import require_transformers

require_transformers()

from bert_unpad._balancer import WorkModel  # noqa: E402
from bert_unpad.hf.collator import (  # noqa: E402
    DataCollatorForPackedClassification,
    DataCollatorForPackedMLM,
    DataCollatorForPackedTokenClassification,
)
from bert_unpad.hf.fallback import StockFallbackWarning  # noqa: E402
from bert_unpad.hf.flash import register as _register  # noqa: E402
from bert_unpad.hf.int8 import calibrate  # noqa: E402
from bert_unpad.hf.sampler import CostSampler  # noqa: E402
from bert_unpad.hf.swap import Support, repad, supports, unpad  # noqa: E402
from bert_unpad.hf.verify import VerificationError, verify  # noqa: E402

__all__ = [
    "CostSampler",
    "DataCollatorForPackedClassification",
    "DataCollatorForPackedMLM",
    "DataCollatorForPackedTokenClassification",
    "StockFallbackWarning",
    "Support",
    "VerificationError",
    "WorkModel",
    "calibrate",
    "repad",
    "supports",
    "unpad",
    "verify",
]

_register()
