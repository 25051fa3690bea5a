"""A fine-tuning by transformers' `Trainer`, and its measures by scikit-learn and SciPy.

The recipe is that of BERT's appendix A.3 (Devlin et al., 2019, arXiv:1810.04805).
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch.nn.functional import cross_entropy

from bert_unpad import hf
from bert_unpad.evaluate.answers import answer_features, answers_of, measures
from bert_unpad.evaluate.tasks import TASKS, Row, Task, read_rows


def _correlation(function: Callable[..., Any], labels: Any, found: Any) -> float:
    """A correlation of SciPy's; 0 with what is constant, as one row is."""
    return function(labels, found).statistic if min(np.ptp(labels), np.ptp(found)) else 0.0


METRICS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "matthews": matthews_corrcoef,
    "pearson": partial(_correlation, pearsonr),
    "spearman": partial(_correlation, spearmanr),
}
"""Functions of labels and predictions."""


class _AnswerTrainer(transformers.Trainer):
    """A Trainer for answers: scores of padding are left out of the softmax of the loss.

    Transformers' own loss takes them in, and packed models have others than padded ones.
    """

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        others = dict(inputs)
        ends = [others.pop(f"{side}_positions") for side in ("start", "end")]
        outputs = model(**others)
        padding = inputs["attention_mask"] == 0
        losses = [
            cross_entropy(scores.masked_fill(padding, -math.inf), end)
            for scores, end in zip((outputs.start_logits, outputs.end_logits), ends, strict=True)
        ]
        loss = (losses[0] + losses[1]) / 2
        return (loss, outputs) if return_outputs else loss


def measure(options: argparse.Namespace, name: str, seed: int) -> dict[str, float]:
    """Fine-tunes a model and returns what is measured on the held-out rows, each 1 at best.

    Args:
        options: of the command.
        name: of the task.
        seed: of the head, the order of the examples and dropout.
    """
    task = TASKS[name]
    tokenizer, model = load(options, name, seed)
    rows = {split: read_rows(name, split, options.data) for split in ("train", *task.validation)}
    features = {split: _features(options, task, found, tokenizer) for split, found in rows.items()}
    updates = options.epochs * math.ceil(len(features["train"]) / options.batch_size)
    settings = transformers.TrainingArguments(
        output_dir=str(options.output / name),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        learning_rate=options.lr,
        warmup_steps=round(options.warmup_share * updates),
        weight_decay=options.weight_decay,
        bf16=options.precision == "bf16",
        use_cpu=options.cpu or not torch.cuda.is_available(),
        seed=seed,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    settings._n_gpu = min(settings.n_gpu, 1)  # several would be torch.nn.DataParallel
    trainer = (transformers.Trainer if task.classes else _AnswerTrainer)(
        model=model,
        args=settings,
        train_dataset=features["train"],
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    metrics: dict[str, float] = {}
    for split in task.validation:
        scores: Any = trainer.predict(features[split]).predictions
        if isinstance(scores, tuple):  # starts and ends; models with a decoder return more
            scores = scores[0] if task.classes else scores[:2]
        if np.isnan(scores).any():  # the training diverged
            values = dict.fromkeys(task.metrics, math.nan)
        elif task.classes:
            found = scores[:, 0] if task.classes == 1 else scores.argmax(-1)
            labels = [row["label"] for row in rows[split]]
            values = {m: float(METRICS[m](labels, found)) for m in task.metrics}
        else:
            values = measures(answers_of(rows[split], features[split], *scores), rows[split])
        metrics |= {metric + split.removeprefix("validation"): x for metric, x in values.items()}
    return metrics


def _features(options: argparse.Namespace, task: Task, rows: Sequence[Row], tokenizer: Any) -> Any:
    length = options.max_length or task.max_length
    if not task.classes:
        return answer_features(rows, tokenizer, length, options.stride)
    least = tokenizer.num_special_tokens_to_add(pair=len(task.columns) > 1) + 1
    if length < least:
        raise ValueError(f"--max-length: expected at least {least}, got {length}")
    return [
        {
            **tokenizer(*(row[c] for c in task.columns), truncation=True, max_length=length),
            "labels": row["label"],
        }
        for row in rows
    ]


def load(options: argparse.Namespace, name: str, seed: int) -> tuple[Any, torch.nn.Module]:
    """The tokenizer, and the model with a fresh head by the seed."""
    if not (options.model / "config.json").is_file():
        raise FileNotFoundError(f"model: expected a folder with config.json, got {options.model}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, padding_side="right")
    torch.manual_seed(seed)
    classes = TASKS[name].classes
    kind: Any = transformers.AutoModelForSequenceClassification
    if not classes:
        kind = transformers.AutoModelForQuestionAnswering
    model = kind.from_pretrained(
        options.model,
        num_labels=classes or 2,  # scores of the first and of the last token
        dtype=torch.float32,  # weights train so; transformers would take what they were saved in
        problem_type=None,
        output_hidden_states=False,
        output_attentions=False,
    )
    return tokenizer, model if options.padded else hf.unpad(model)
