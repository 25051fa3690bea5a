"""Held-out loss against time: this package's trainer beside Hugging Face's, on the same examples.

    python -m benchmarks.trainer --device cuda --seconds 60 --text corpus.txt

Both train the same BERT by masked tokens alone, from the same examples with masks drawn in the same
way, in batches of as many sequences, with AdamW and a constant learning rate after a warm-up, for
as many seconds, which count training and not evaluation. Held-out examples and masks are the same.
Hugging Face's pads each batch to its longest sequence and computes attention by sdpa;
`--torch-compile` compiles the model too.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.lib import harness
from benchmarks.lib.machine_text import gather
from benchmarks.lib.model_steps import SIZES
from bert_unpad._plots import new_figure, save_figure
from bert_unpad.batch import PackedInputs, pad
from bert_unpad.data import DataConfig, PackedCollator, PreparedData, prepare
from bert_unpad.pretrain.evaluate import choose_by_length

VOCABULARY = 30_522
LENGTH = 128
RECIPE = {"lr": 1e-4, "weight_decay": 0.01, "eps": 1e-6, "max_norm": 1.0}
IGNORE = -100
TEXT_BYTES = 200_000_000

Curve = list[dict[str, float]]


def data_config(text: Path, cache: Path) -> DataConfig:
    return DataConfig(
        source=str(text),
        cache_dir=str(cache),
        objective="mlm",
        max_seq_length=LENGTH,
        vocab_size=VOCABULARY,
        vocab_sample_mb=10.0,
    )


def ours(args: argparse.Namespace, text: Path, cache: Path, run_dir: Path) -> Curve:
    """Runs the trainer as a user would, and stops it when its time is over."""
    hidden, layers, heads = SIZES[args.size]
    options: dict[str, object] = {
        "run_dir": run_dir,
        "device": args.device,
        "precision": "bf16",
        "cuda_graphs": str(args.device == "cuda").lower(),
        "model.preset": "bert-base",
        "model.hidden_size": hidden,
        "model.num_hidden_layers": layers,
        "model.num_attention_heads": heads,
        "model.intermediate_size": 4 * hidden,
        "data.source": text,
        "data.cache_dir": cache,
        "data.objective": "mlm",
        "data.max_seq_length": LENGTH,
        "data.vocab_size": VOCABULARY,
        "data.vocab_sample_mb": 10,
        "batching.strategy": "stratified",
        "batching.global_batch_size": args.batch,
        "optimizer.name": "fused_adam",
        "optimizer.lr": RECIPE["lr"],
        "optimizer.eps": RECIPE["eps"],
        "optimizer.weight_decay": RECIPE["weight_decay"],
        "schedule.name": "constant",
        "schedule.warmup_steps": args.warmup,
        "schedule.total_steps": 10**6,
        "clip.max_norm": RECIPE["max_norm"],
        "evaluation.every": args.every,
        "evaluation.examples": args.examples,
        "checkpoint.every": 10**6,
        "logging.every": args.every,
        "logging.progress": "none",
    }
    command = [sys.executable, "-m", "bert_unpad.pretrain"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    log, said = run_dir / "metrics.jsonl", cache / "trainer.log"
    with (
        said.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        while process.poll() is None:
            time.sleep(0.2)
            rows = _rows(log)
            if rows and max(row.get("seconds", 0.0) for row in rows) >= args.seconds:
                process.send_signal(signal.SIGTERM)
                break
    rows = _rows(log)
    if not any(row["kind"] == "evaluation" for row in rows):
        raise RuntimeError(f"the trainer ended without an evaluation: {said.read_text()[-2000:]}")
    times = {row["step"]: row["seconds"] for row in rows if row["kind"] == "train"}
    return [
        {"seconds": times[row["step"]], "step": row["step"], "loss": row["mlm_loss"]}
        for row in rows
        if row["kind"] == "evaluation" and times.get(row["step"], args.seconds) < args.seconds
    ]


def _rows(log: Path) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    whole = log.read_text().rpartition("\n")[0]  # the last line may be half written
    return [json.loads(line) for line in whole.splitlines()]


def padded(inputs: PackedInputs) -> dict[str, Tensor]:
    """A packed batch as Hugging Face's models take it."""
    labels = torch.full_like(inputs.input_ids, IGNORE)
    labels[inputs.masked_positions] = inputs.masked_labels
    return {
        "input_ids": pad(inputs.input_ids, inputs.batch),
        "attention_mask": pad(torch.ones_like(labels), inputs.batch),
        "labels": pad(labels, inputs.batch, IGNORE),
    }


class _Collate:
    """Examples by number, as the Trainer's workers want it. Masks are new in every batch."""

    def __init__(self, collator: PackedCollator) -> None:
        self._collator = collator

    def __call__(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        # In place of the epoch, which workers do not know: from PyTorch's stream, theirs and the
        # epoch's own.
        stream = int(torch.randint(2**31, ()))
        return padded(self._collator(np.array(numbers), stream))


def hugging_face(args: argparse.Namespace, data: PreparedData, output: Path) -> Curve:
    import transformers

    hidden, layers, heads = SIZES[args.size]
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=data.tokenizer.vocab_size,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            attn_implementation="sdpa",
        )
    )
    collator = data.collator("validation")
    chosen = choose_by_length(data.validation.lengths, data.train.lengths, args.examples)
    held_out = [padded(collator(chosen[i : i + 256], 0)) for i in range(0, len(chosen), 256)]
    curve: Curve = []

    class Watch(transformers.TrainerCallback):
        seconds = 0.0
        began = 0.0

        def on_step_begin(self, _args, state, control, **_more: Any) -> None:
            if not self.began:
                self.began = time.perf_counter()

        def on_step_end(self, _args, state, control, **_more: Any) -> None:
            if state.global_step % args.every:
                return
            if args.device == "cuda":
                torch.cuda.synchronize()
            self.seconds += time.perf_counter() - self.began
            if self.seconds > args.seconds:
                control.should_training_stop = True
                return
            loss = _held_out_loss(model, held_out)
            curve.append({"seconds": self.seconds, "step": state.global_step, "loss": loss})
            self.began = time.perf_counter()

    cuda = args.device == "cuda"
    settings = transformers.TrainingArguments(
        output_dir=str(output),
        bf16=True,
        use_cpu=not cuda,
        per_device_train_batch_size=args.batch,
        learning_rate=RECIPE["lr"],
        weight_decay=RECIPE["weight_decay"],
        adam_epsilon=RECIPE["eps"],
        max_grad_norm=RECIPE["max_norm"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=args.warmup,
        max_steps=10**6,
        optim="adamw_torch_fused",
        dataloader_num_workers=8 if cuda else 1,
        dataloader_persistent_workers=True,
        remove_unused_columns=False,
        torch_compile=args.torch_compile,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=10**6,
    )
    transformers.Trainer(
        model=model,
        args=settings,
        train_dataset=list(range(len(data.train))),
        data_collator=_Collate(data.collator("train")),
        callbacks=[Watch()],
    ).train()
    return curve


@torch.no_grad()
def _held_out_loss(model: torch.nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> float:
    device = next(model.parameters()).device
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        labels = int((batch["labels"] != IGNORE).sum())
        with torch.autocast(device.type, torch.bfloat16):
            out = model(**{name: t.to(device) for name, t in batch.items()})
        total, count = total + out.loss.item() * labels, count + labels
    model.train()
    return total / count


def draw(path: Path, curves: Mapping[str, Curve]) -> None:
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot(xlabel="seconds of training", ylabel="held-out masked-token loss")
    for name, curve in curves.items():
        axes.plot([p["seconds"] for p in curve], [p["loss"] for p in curve], label=name)
    axes.legend()
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--text", type=Path, help="file or folder; default: this machine's")
    parser.add_argument("--cache", type=Path, help="folder in which prepared text stays")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, each")
    parser.add_argument("--batch", type=int, default=256, help="sequences of an update")
    parser.add_argument("--warmup", type=int, default=200, help="updates")
    parser.add_argument("--every", type=int, default=100, help="updates between evaluations")
    parser.add_argument("--examples", type=int, default=2000, help="held out")
    parser.add_argument("--torch-compile", action="store_true")
    harness.add_name(parser, "trainer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        text = args.text
        if text is None:
            text = work / "text"
            gather(text, TEXT_BYTES)
        cache = args.cache or work / "cache"
        data = prepare(data_config(text, cache))
        curves = {
            "bert_unpad": ours(args, text, cache, work / "run"),
            "Hugging Face Trainer": hugging_face(args, data, work / "trainer"),
        }
        statistics = data.statistics
    for name, curve in curves.items():
        last = curve[-1]
        print(
            f"{name}: {last['step']:.0f} updates, loss {last['loss']:.3f}, {last['seconds']:.0f} s"
        )
    device = harness.gpu_folder() if args.device == "cuda" else "cpu"
    payload = {"size": args.size, "batch": args.batch, "data": statistics, "curves": curves}
    path = harness.save(args.name, device, harness.command(), payload)
    draw(path.with_suffix(".png"), curves)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
