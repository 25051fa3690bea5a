"""Hugging Face encoders without padding: `unpad(model)` replaces layers by packed ones, in place.

Importing this package needs transformers 5.0 or newer, and registers the attention implementation
"bert_unpad_flash". `import bert_unpad` never imports transformers: `bert_unpad.hf` is loaded on
first use.
"""

import re

SINCE = (5, 0)


def require_transformers() -> None:
    """Checks the installed transformers.

    Raises:
        ImportError: it is too old, or there is none.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError(
            "bert_unpad.hf needs transformers: pip install 'transformers>=5.0'"
        ) from error
    major, minor = map(int, re.findall(r"\d+", transformers.__version__)[:2])
    if (major, minor) < SINCE:
        raise ImportError(
            f"bert_unpad.hf needs transformers >= {SINCE[0]}.{SINCE[1]}, "
            f"but {major}.{minor} is installed"
        )


require_transformers()

from bert_unpad._balancer import WorkModel  # noqa: E402
from bert_unpad.hf.collator import (  # noqa: E402
    DataCollatorForPackedClassification,
    DataCollatorForPackedMLM,
    DataCollatorForPackedTokenClassification,
)
from bert_unpad.hf.fallback import StockFallbackWarning  # noqa: E402
from bert_unpad.hf.flash import register as _register  # noqa: E402
from bert_unpad.hf.freeze import freeze  # noqa: E402
from bert_unpad.hf.rounded import calibrate  # noqa: E402
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
    "freeze",
    "repad",
    "supports",
    "unpad",
    "verify",
]

_register()
