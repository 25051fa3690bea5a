"""One contender of benchmarks/versions.py, in a process of its own: runs once for each line read.

    python benchmarks/lib/version_worker.py WORKLOAD DTYPE CONTENDER

It imports nothing of `benchmarks`, so that PYTHONPATH alone decides which build of bert_unpad runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from bert_unpad._malloc import keep_freed_memory
from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.data.sampling.histogram import sample_lengths
from bert_unpad.nn import BertConfig, BertForPreTraining

VOCAB = 30522


def training(dtype: torch.dtype, contender: str) -> Callable[[], None]:
    """A training step of BERT-base with AdamW: 8 sequences of Wikipedia lengths, dropout 0.1."""
    lengths = sorted((min(int(n), 512) for n in sample_lengths(8, 1)), reverse=True)
    batch = VarlenBatch.from_lengths(lengths)
    ids = torch.randint(1000, VOCAB, (batch.total,))
    positions = (torch.rand(batch.total) < 0.15).nonzero().flatten()
    inputs = PackedInputs.build(
        batch=batch,
        input_ids=ids.index_fill(0, positions, 103),
        masked_positions=positions,
        masked_labels=ids[positions],
        next_sentence_labels=torch.randint(0, 2, (len(lengths),)),
    )
    model = BertForPreTraining(BertConfig(vocab_size=VOCAB)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = model(inputs)
            loss = out.mlm_loss_sum / len(positions) + out.nsp_loss_sum / len(lengths)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def inference(dtype: torch.dtype, contender: str) -> Callable[[], None]:
    """Hidden states of 64 texts of 10 to 300 tokens, by a model of MiniLM-L6's shape.

    Ours takes them in one batch; stock takes batches of 16 of similar length.
    """
    import transformers

    from bert_unpad import hf

    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, intermediate_size=1536, attn_implementation="sdpa"
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    if contender != "stock":
        hf.unpad(model)
    lengths = np.random.default_rng(0).integers(10, 301, 64)
    if contender == "stock":
        lengths = np.sort(lengths)[::-1].copy()
    batches = []
    for part in torch.from_numpy(lengths).split(16 if contender == "stock" else 64):
        mask = (torch.arange(int(part.max())) < part[:, None]).long()
        ids = torch.randint(1000, VOCAB, mask.shape) * mask
        batches.append({"input_ids": ids, "attention_mask": mask})

    def run() -> None:
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)
        with torch.no_grad(), autocast:
            for batch in batches:
                model(**batch)

    return run


def main() -> None:
    workload, dtype, contender = sys.argv[1:]
    keep_freed_memory()
    torch.manual_seed(0)
    run = {"training": training, "inference": inference}[workload](getattr(torch, dtype), contender)
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
