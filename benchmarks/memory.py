"""Activations that one encoder layer keeps for its backward pass, ours and its peers', in bytes;
and what a process keeps after many batches of ever new sizes.

    python -m benchmarks.memory

Counts, not measurements of a process: the same on every machine with this PyTorch (but for copies
of weights: ours are cast only where the hardware multiplies bf16). Lengths are drawn from the
Wikipedia histogram; figures are bytes of a layer per REAL token, so what is kept for padding counts
against the padded peer. PyTorch's attention on a CPU keeps its probabilities where there is
dropout; "fused attention" is the same peer with attention's dropout off, where it runs its fused
attention, which keeps what FlashAttention does on a GPU.

The second part is measured, in processes of their own (benchmarks/lib/ragged_memory.py);
--batches 0 leaves it out. Writes benchmarks/results/cpu/memory.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.lib import harness, ragged_memory
from benchmarks.lib.peers import by_sequence, unpadded_layer
from benchmarks.lib.saved_activations import Saved, saved_by
from bert_unpad._extras import packages_of
from bert_unpad.batch import VarlenBatch, pad
from bert_unpad.data.sampling.histogram import sample_lengths
from bert_unpad.nn import BertConfig, BertEncoder
from bert_unpad.nn.rng import draw_rng_keys

with packages_of("hf"):
    import transformers
    from transformers.models.bert.modeling_bert import BertLayer as StockLayer

SIZES = {"base": (768, 12), "large": (1024, 16)}
MAX_LENGTH = 512
DROPOUT = 0.1


def contenders(
    fields: dict[str, int], batch: VarlenBatch, x: Tensor
) -> Iterator[tuple[str, Callable[[], Saved]]]:
    """Name, and how to count it, of each on the packed layer input x [T, hidden]."""
    encoder = BertEncoder(BertConfig(**fields, **rates(DROPOUT))).train()
    for recompute in ("none", "gelu", "layer"):

        def ours(recompute: str = recompute) -> Saved:
            encoder.recompute = recompute
            keys = draw_rng_keys(3, x.device).unbind()
            shared = [*keys, batch.cu_seqlens, batch.order_table]
            return saved_by(lambda: encoder(x, batch, rng=keys), encoder, shared)

        yield f"bert_unpad, recompute {recompute}", ours
    mask = pad(torch.ones(batch.total, dtype=torch.bool), batch)[:, None, None]
    for name, attention_dropout in (("", DROPOUT), (", fused attention", 0.0)):
        config = transformers.BertConfig(
            **fields,
            **rates(DROPOUT) | {"attention_probs_dropout_prob": attention_dropout},
            attn_implementation="sdpa",
        )
        layer = StockLayer(config).train()

        def unpadded(layer: StockLayer = layer) -> Saved:
            return saved_by(lambda: unpadded_layer(layer, x, batch, by_sequence), layer)

        def padded(layer: StockLayer = layer) -> Saved:
            hidden = pad(x.detach(), batch).requires_grad_()

            def forward() -> Tensor:
                out = layer(hidden, attention_mask=mask)
                return out[0] if isinstance(out, tuple) else out

            return saved_by(forward, layer, [mask])

        yield f"plain unpadded{name}", unpadded
        yield f"hf padded{name}", padded


def rates(dropout: float) -> dict[str, float]:
    return {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", choices=[*SIZES, "both"], default="both")
    parser.add_argument("--batches", type=int, default=2000)
    harness.add_name(parser, "memory")
    args = parser.parse_args()
    lengths = sorted((int(n) for n in sample_lengths(args.sequences, args.seed)), reverse=True)
    # The padded peer gets MAX_LENGTH columns, as fixed-length pretraining data does.
    batch = VarlenBatch.from_mask(torch.arange(MAX_LENGTH) < torch.tensor(lengths)[:, None])
    print(
        f"{batch.total} tokens in {args.sequences} sequences, {batch.fill:.0%} of the padded ones"
    )
    rows = []
    for size, (hidden, heads) in SIZES.items():
        if args.size not in (size, "both"):
            continue
        fields = {
            "hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": heads,
            "intermediate_size": 4 * hidden,
        }  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            x = torch.randn(batch.total, hidden).to(dtype).requires_grad_()
            for name, count in contenders(fields, batch, x):
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                    saved = count()
                row = {
                    "contender": name,
                    "size": size,
                    "dtype": str(dtype).removeprefix("torch."),
                    "bytes_per_token": saved.activations / batch.total,
                    "activation_bytes": saved.activations,
                    "weight_copy_bytes": saved.weight_copies,
                    "tensors": [
                        {"dtype": kind, "shape": shape, "bytes": size_} for kind, shape, size_
                        in saved.tensors if size_ * 1000 >= saved.activations
                    ],
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{size:6s}{row['dtype']:9s} {name:34s} {row['bytes_per_token']:10.0f} bytes "
                    f"a token, {saved.weight_copies / 1e6:6.1f} MB of cast weights",
                    flush=True,
                )
    ragged = []
    for use in ragged_memory.USES if args.batches else ():
        for contender in ragged_memory.CONTENDERS:
            row = ragged_memory.measure(contender, use, args.batches)
            ragged.append(row)
            first, *_, last = (size / 1e6 for size in row["resident_bytes"])
            print(
                f"{use:7s} {contender:8s} {first:6.0f} MB after a tenth of {args.batches} batches, "
                f"{last:6.0f} after all; {sum(row['cpu_seconds']):6.1f} s of CPU time",
                flush=True,
            )
    path = harness.save(
        args.name, "cpu", harness.command(),
        {"lengths": lengths, "max_length": MAX_LENGTH, "tokens": batch.total, "fill": batch.fill,
         "dropout": DROPOUT, "results": rows, "ragged": ragged},
    )  # fmt: skip
    print(f"written to {path}")


if __name__ == "__main__":
    main()
