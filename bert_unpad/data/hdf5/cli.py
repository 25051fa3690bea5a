"""`python -m bert_unpad.data.hdf5`: writes, converts and checks HDF5 files in MLPerf's layouts.

All folders hold `train`, perhaps `validation`, and `tokenizer`. A `data.source` of `hdf5:FOLDER` or
`shards:FOLDER` reads them. What was killed is continued by the same command: `work` in a folder
says until the end how it was begun.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bert_unpad._commands import run_command
from bert_unpad._files import read_json_object, write_text
from bert_unpad.data.building.build import ABOUT, check_settings
from bert_unpad.data.building.build_lock import LOCK, build_lock
from bert_unpad.data.building.join import remove_work
from bert_unpad.data.config import DataConfig
from bert_unpad.data.hdf5.write import write_hdf5
from bert_unpad.data.masking import TokenMasker
from bert_unpad.data.preparation import PreparedData, prepare
from bert_unpad.data.sampling.epoch_sampler import lengths_checksum
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.store.manifest import DamagedDataError
from bert_unpad.data.store.shard_writer import ShardWriter
from bert_unpad.data.streams.text_stream import is_streamed

_BLOCK = 4096  # examples handled at a time
_NOT_OF_RESULT = ("run", "output", "cache_dir")  # options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 2 for bad arguments, 1 for damaged data."""
    parser = _parser()
    return run_command(parser, parser.parse_args(arguments), (DamagedDataError,))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bert_unpad.data.hdf5",
        description="Pretraining examples as HDF5 files in the layouts of MLPerf's BERT.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(
        add_help=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_argument("--max-seq-length", type=int, default=512, help="longest example, tokens")
    common.add_argument("--vocab-file", help="BERT vocabulary (default: as the source has it)")
    common.add_argument("--cache-dir", help="see data.cache_dir of the trainer")
    writes = argparse.ArgumentParser(add_help=False)
    writes.add_argument("output", type=Path, help="folder to write")

    generate = commands.add_parser(
        "generate",
        parents=[common, writes],
        help="HDF5 files from any source of the trainer: text, a data set, shards",
    )
    generate.add_argument("--source", default="stdlib", help="as data.source of the trainer")
    generate.add_argument("--vocab-size", type=int, default=8192, help="of a new vocabulary")
    generate.add_argument("--layout", choices=("variable", "fixed"), default="variable")
    generate.add_argument("--examples-per-file", type=int, default=4096)
    generate.add_argument("--max-predictions", type=int, default=76, help="masked tokens, at most")
    generate.add_argument("--dupe-factor", type=int, default=1, help="passes over a text source")
    generate.add_argument("--validation-share", type=float, default=0.05, help="of documents")
    generate.add_argument("--seed", type=int, default=0, help="of pairs and masks")
    generate.set_defaults(run=_generate)

    shards = commands.add_parser(
        "to-shards", parents=[common, writes], help="memory-mapped shards from finished examples"
    )
    finished = "hdf5:PATH or tfrecord:PATH, as data.source of the trainer"
    shards.add_argument("--source", required=True, help=finished)
    shards.add_argument(
        "--unmask", action="store_true", help="store the true text: masks are then drawn per epoch"
    )
    shards.set_defaults(run=_to_shards)

    check = commands.add_parser("check", parents=[common], help="read every finished example")
    check.add_argument("--source", required=True, help=finished)
    check.set_defaults(run=_check)
    return parser


def _generate(options: argparse.Namespace) -> None:
    if is_streamed(options.source):
        raise ValueError(
            f"--source: {options.source} is read while it is trained on; give hf: for stream:"
        )
    data = prepare(
        DataConfig(
            source=options.source,
            cache_dir=options.cache_dir,
            max_seq_length=options.max_seq_length,
            vocab_size=options.vocab_size,
            vocab_file=options.vocab_file,
            dupe_factor=options.dupe_factor,
            validation_share=options.validation_share,
            seed=options.seed,
        )
    )
    masker = TokenMasker(
        data.tokenizer, max_predictions_per_seq=options.max_predictions, seed=options.seed
    )
    with _work(options, data):
        for split, dataset in _splits(data):
            paths = write_hdf5(
                dataset,
                options.output / split,
                layout=options.layout,
                examples_per_file=options.examples_per_file,
                masker=masker,
                max_predictions=options.max_predictions,
                resume=True,
            )
            print(f"{options.output / split}: {len(dataset):,} examples in {len(paths):,} files")


def _to_shards(options: argparse.Namespace) -> None:
    data = _open(options)
    with _work(options, data):
        for split, dataset in _splits(data):
            if not (options.output / split).exists():
                for old in options.output.glob(f".{split}.*"):  # of a process that was killed
                    shutil.rmtree(old)
                write_shard(dataset, options.output / split, unmask=options.unmask)
            print(f"{options.output / split}: {len(dataset):,} examples")


def _check(options: argparse.Namespace) -> None:
    data = _open(options)
    for split, dataset in _splits(data):
        masked = int(dataset.target_counts().sum())
        print(
            f"{split}: {len(dataset):,} examples, {data.statistics[f'{split}_tokens']:,} tokens, "
            f"{masked:,} of them masked"
        )


def _open(options: argparse.Namespace) -> PreparedData:
    if not options.source.startswith(("hdf5:", "tfrecord:")):
        raise ValueError(f"--source: expected hdf5:PATH or tfrecord:PATH, got {options.source!r}")
    return prepare(
        DataConfig(
            source=options.source,
            cache_dir=options.cache_dir,
            max_seq_length=options.max_seq_length,
            vocab_file=options.vocab_file,
        )
    )


def _splits(data: PreparedData) -> list[tuple[str, ExampleDataset]]:
    splits = (("train", data.train), ("validation", data.validation))
    return [(name, dataset) for name, dataset in splits if len(dataset)]


@contextmanager
def _work(options: argparse.Namespace, data: PreparedData) -> Iterator[None]:
    """Begins a folder, or goes on with it; completes it when the block has written all examples.

    Raises:
        BlockingIOError: another process is at work there.
        FileExistsError: the folder has examples and is complete.
        ValueError: it was begun with something else.
    """
    work = options.output / "work"
    splits = _splits(data)
    about = {
        **{name: value for name, value in vars(options).items() if name not in _NOT_OF_RESULT},
        "tokenizer": data.tokenizer.identity(),
        "lengths_crc32": {split: lengths_checksum(dataset.lengths) for split, dataset in splits},
    }
    if (work / ABOUT).exists():
        check_settings(options.output, read_json_object(work / ABOUT), about)
    else:
        for split, _ in splits:
            if (options.output / split).exists():
                raise FileExistsError(
                    f"output: expected a new folder, or one that was begun, got {options.output} "
                    f"with {split}"
                )
        work.mkdir(parents=True, exist_ok=True)
        (work / LOCK).touch()
        write_text(work / ABOUT, json.dumps(about))
    with build_lock(work, alone=True):
        yield
        (options.output / "tokenizer").mkdir(exist_ok=True)
        data.tokenizer.save(options.output / "tokenizer")
        remove_work(options.output)


def write_shard(dataset: ExampleDataset, path: str | Path, unmask: bool = False) -> None:
    """Writes all examples of a data set as one memory-mapped shard.

    Args:
        dataset: the examples.
        path: the folder to create.
        unmask: store the true tokens without masks of examples that come with masks.

    Raises:
        FileExistsError: the folder exists.
    """
    with ShardWriter(
        path,
        vocab_size=dataset.vocab_size,
        unmaskable_ids=dataset.unmaskable_ids,
        max_seq_length=dataset.max_seq_length,
        has_masks=dataset.has_masks and not unmask,
    ) as writer:
        for begin in tqdm(range(0, len(dataset), _BLOCK), desc=str(path), disable=None):
            batch = dataset.batch(np.arange(begin, min(begin + _BLOCK, len(dataset))))
            writer.append(
                batch.true_tokens() if unmask else batch.tokens,
                batch.lengths,
                batch.second_starts,
                batch.next_sentence_labels,
                None if unmask else batch.masks,
            )
