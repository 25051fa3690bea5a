"""The memory of a process whose batches have ever new numbers of tokens.

    python -m benchmarks.lib.ragged_memory swapped encode 2000

Libraries keep code for each shape that they have multiplied. A model of MiniLM's shape gets random
texts of 5 to 60 tokens, 8 a batch; `stock` is transformers' own model, `swapped` the same after
`hf.unpad`, and `encode` or `train` what it does. One thread, fp32. Prints resident bytes after each
tenth of the batches, and the seconds that they took, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONTENDERS, USES = ("stock", "swapped"), ("encode", "train")
SHAPE = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
}
SEQUENCES, SHORTEST, LONGEST = 8, 5, 60


def measure(contender: str, use: str, batches: int) -> dict[str, Any]:
    """Runs this module as a process of its own."""
    command = [sys.executable, "-m", "benchmarks.lib.ragged_memory", contender, use, str(batches)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {"contender": contender, "use": use, **json.loads(done.stdout.splitlines()[-1])}


def _resident() -> int:
    """Bytes of memory in use, without what the allocator only holds on to."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    import torch
    from transformers import BertConfig, BertModel

    contender, use, batches = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SHAPE), add_pooling_layer=False).train(use == "train")
    if contender == "swapped":
        from bert_unpad import hf

        hf.unpad(model)
    bytes_, seconds = [], []
    begun = time.process_time()
    for step in range(batches):
        lengths = torch.randint(SHORTEST, LONGEST + 1, (SEQUENCES,))
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.randint(1000, 30000, tuple(mask.shape))
        with torch.set_grad_enabled(use == "train"):
            out = model(input_ids=ids, attention_mask=mask).last_hidden_state
        if use == "train":
            out.mean().backward()
            model.zero_grad(set_to_none=False)
        if (step + 1) % max(batches // 10, 1) == 0:
            bytes_.append(_resident())
            seconds.append(time.process_time() - begun)
            begun = time.process_time()
    print(json.dumps({"batches": batches, "resident_bytes": bytes_, "cpu_seconds": seconds}))


if __name__ == "__main__":
    main()
