"""Fine-tuning in the style of GLUE: which module of the standard library is a docstring from?

    python examples/finetune.py                       # a small BERT from scratch, 2 minutes
    python examples/finetune.py --model path/to/bert  # a pretrained one
    python examples/finetune.py --stock               # the same without bert_unpad, to compare

The data are on every machine with Python; texts of 5 to 128 tokens are what makes padding expensive
in such tasks. All there is to see of bert_unpad is one line: `hf.unpad(model)`.
"""

from __future__ import annotations

import argparse
import collections
import random
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bert_unpad._extras import packages_of
from bert_unpad.data import WordPieceTokenizer
from bert_unpad.data.formats.stdlib import StdlibSource

with packages_of("hf"):
    import accelerate  # noqa: F401  transformers' Trainer needs it
    import transformers

    from bert_unpad import hf

MIN_WORDS = 4  # shorter docstrings ("See help(type(self)).") tell nothing
EVALUATED = 0.2  # of the documents, drawn at random


def labelled_texts(root: Path | None, modules: int) -> tuple[list[str], list[tuple[str, int]]]:
    """The modules with the most docstrings, and (text, module's number) of each document.

    The module's own name is blanked out, which would give the answer away.
    """
    source = StdlibSource(cache_dir=Path(tempfile.gettempdir()), root=root)
    texts: dict[str, set[str]] = collections.defaultdict(set)
    for path, text in source.by_file():
        module = path.relative_to(source.root).with_suffix("").parts[0]
        text = re.sub(rf"\b{re.escape(module)}\b", "[UNK]", text)
        if len(text.split()) >= MIN_WORDS:
            texts[module].add(text)
    names = sorted(texts, key=lambda name: (-len(texts[name]), name))[:modules]
    pairs = [(text, number) for number, name in enumerate(names) for text in sorted(texts[name])]
    random.Random(0).shuffle(pairs)
    return names, pairs


def small_model(texts: list[str], labels: int, args: argparse.Namespace):
    """A tokenizer trained on the texts, and a BERT with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        WordPieceTokenizer.train(lambda: [texts], vocab_size=args.vocab_size).save(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        intermediate_size=4 * args.hidden,
        max_position_embeddings=args.max_length,
        num_labels=labels,
    )
    return tokenizer, transformers.BertForSequenceClassification(config)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains, evaluates, and returns the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="directory or name of a pretrained model")
    parser.add_argument("--stock", action="store_true", help="leave the model as it is")
    parser.add_argument("--modules", type=int, default=12, help="classes")
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="2e-5 if pretrained")
    parser.add_argument("--max-length", type=int, default=128, help="tokens")
    parser.add_argument("--hidden", type=int, default=128, help="width of the small BERT")
    parser.add_argument("--layers", type=int, default=2, help="of the small BERT")
    parser.add_argument("--vocab-size", type=int, default=4000, help="of the small BERT")
    parser.add_argument("--root", type=Path, help="folder of Python sources; default: the library")
    parser.add_argument("--output", default="runs/finetune")
    args = parser.parse_args(argv)

    transformers.set_seed(0)
    names, pairs = labelled_texts(args.root, args.modules)
    held = round(EVALUATED * len(pairs))
    if args.model:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            args.model, num_labels=len(names)
        )
    else:
        tokenizer, model = small_model([text for text, _ in pairs[held:]], len(names), args)
    if not args.stock:
        hf.unpad(model)  # the one line

    def encode(text: str, label: int) -> dict:
        return {**tokenizer(text, truncation=True, max_length=args.max_length), "labels": label}

    data = [encode(text, label) for text, label in pairs]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=args.output,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            learning_rate=2e-5 if args.model else args.learning_rate,
            warmup_steps=50,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=data[held:],
        eval_dataset=data[:held],
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {
            "accuracy": float((np.argmax(p.predictions, -1) == p.label_ids).mean())
        },
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    accuracy = trainer.evaluate()["eval_accuracy"]
    counts = collections.Counter(label for _, label in pairs[:held])
    majority = counts[collections.Counter(label for _, label in pairs[held:]).most_common(1)[0][0]]
    tokens = sum(len(example["input_ids"]) for example in data)
    print(
        f"{len(names)} modules ({', '.join(names)}), {len(data)} docstrings of "
        f"{tokens / len(data):.0f} tokens: accuracy {accuracy:.3f}, "
        f"always the commonest module {majority / held:.3f}; trained in {seconds:.0f} s"
    )
    return {"accuracy": accuracy, "majority": majority / held}


if __name__ == "__main__":
    main()
