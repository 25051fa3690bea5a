"""`python -m bert_unpad.data`: prepares a corpus, or imports other formats, for training.

A `data.source` of `shards:FOLDER` trains on the result.
"""

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from bert_unpad._arguments import above_zero, positive
from bert_unpad._commands import run_command
from bert_unpad._full_disk import named_if_full
from bert_unpad.data.config import DataConfig
from bert_unpad.data.formats import FORMATS
from bert_unpad.data.formats.sources import open_source
from bert_unpad.data.objective import Documents, Objective
from bert_unpad.data.preparation.blocks import BLOCK_BYTES, check_outside
from bert_unpad.data.preparation.build import MEMORY, check_settings, example_settings
from bert_unpad.data.preparation.engines import Engine, InProcess, Processes, available_cores
from bert_unpad.data.preparation.import_data import import_data
from bert_unpad.data.preparation.join import join_parts
from bert_unpad.data.preparation.parts import ABSENT_SECONDS, Part
from bert_unpad.data.preparation.pipeline import Pipeline, Report
from bert_unpad.data.preparation.ray_engine import Ray
from bert_unpad.data.prepared import (
    SPLITS,
    holds_examples,
    is_prepared,
    is_streamed,
    open_prepared,
    read_prepared,
)
from bert_unpad.data.store.cache import chosen_cache_dir
from bert_unpad.data.store.shards import AT_ONCE, MAX_LENGTH, ShardDataset

_SAMPLE_MB = 200.0
_CHECKED = 4096  # examples looked at together
_QUANTILES = (0.25, 0.5, 0.75, 0.95)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 1 for damaged data or a worker that was killed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return run_command(parser, options, (RuntimeError,))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bert_unpad.data",
        description="Pretraining data: prepares a corpus, imports examples and token ids of other "
        "formats, and checks the result.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    prepare = commands.add_parser(
        "prepare",
        help="make a folder of examples from a corpus; continues what was killed",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    prepare.add_argument("output", type=Path, help="folder for the result")
    prepare.set_defaults(run=_prepare)
    _add_data_options(prepare.add_argument_group("examples, as in the section data of the trainer"))
    _add_work_options(prepare.add_argument_group("work; none of these changes the result"))

    imports = commands.add_parser(
        "import",
        help="make a folder of examples from files of another format; continues what was killed",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    imports.add_argument("source", help=f"{', '.join(FORMATS)}: each as FORMAT:PATH?option=value")
    imports.add_argument("output", type=Path, help="folder for the result")
    imports.add_argument("--max-seq-length", type=int, default=512, help="longest example, tokens")
    _add_vocabulary(imports)
    imports.add_argument(
        "--unmask", action="store_true", help="store the true text: masks are then drawn per epoch"
    )
    _add_workers(imports)
    imports.set_defaults(run=_import)

    merge = commands.add_parser("merge", help="join the parts that prepare --part has made")
    merge.add_argument("output", type=Path, help="folder of the parts")
    merge.set_defaults(run=_merge)

    check = commands.add_parser("check", help="read all that was prepared, compare its digests")
    check.add_argument("folder", type=Path, help="what prepare or import has written")
    check.set_defaults(run=_check)
    return parser


def _add_data_options(group: argparse._ArgumentGroup) -> None:
    default = DataConfig()
    group.add_argument(
        "--source", default=default.source, help="text file, folder, hf:NAME, stdlib"
    )
    group.add_argument("--objective", choices=get_args(Objective), default=default.objective)
    group.add_argument("--documents", choices=get_args(Documents), default=default.documents)
    group.add_argument("--max-seq-length", type=int, default=default.max_seq_length)
    _add_vocabulary(group)
    group.add_argument("--vocab-size", type=int, default=default.vocab_size)
    group.add_argument(
        "--vocab-sample-mb",
        type=above_zero,
        default=_SAMPLE_MB,
        help="text to train a vocabulary on",
    )
    group.add_argument("--alphabet-size", type=int, default=default.alphabet_size)
    group.add_argument("--short-seq-prob", type=float, default=default.short_seq_prob)
    group.add_argument("--dupe-factor", type=int, default=default.dupe_factor)
    group.add_argument("--validation-share", type=float, default=default.validation_share)
    group.add_argument("--seed", type=int, default=default.seed)
    group.add_argument(
        "--block-mb",
        type=above_zero,
        default=BLOCK_BYTES / 2**20,
        help="text of the first blocks, MiB",
    )
    group.add_argument("--cache-dir", help="where slow sources keep documents")


def _add_work_options(group: argparse._ArgumentGroup) -> None:
    _add_workers(group)
    group.add_argument("--engine", choices=("processes", "ray"), default="processes")
    group.add_argument(
        "--address", help="with ray: of a running cluster, or auto (default: starts one here)"
    )
    group.add_argument("--memory", type=above_zero, default=MEMORY / 1e9, help="GB of a worker")
    group.add_argument("--part", type=_part, metavar="I/N", help="do one of N shares of the work")
    group.add_argument(
        "--stage",
        choices=("read", "examples"),
        help="of a part: read must end in all parts before examples begins (default: both, waiting "
        "for the other parts, which have to run at the same time)",
    )
    group.add_argument(
        "--wait",
        type=above_zero,
        default=ABSENT_SECONDS / 60,
        help="of a part without --stage: minutes to wait for other parts that have not begun",
    )


def _add_vocabulary(group: argparse._ActionsContainer) -> None:
    default = DataConfig.tokenizer
    group.add_argument(
        "--tokenizer", default=default, help="path of a tokenizer.json; of text, or kind to train"
    )
    group.add_argument("--vocab-file", help="BERT vocabulary to use")
    group.add_argument("--cased", action="store_true", help="keep upper case and accents")


def _add_workers(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--workers", type=positive, help="processes, each on one core (default: all)"
    )


def _part(text: str) -> Part:
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected I/N, such as 1/16, got {text!r}")
    try:
        return Part(int(number), int(count))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _config(options: argparse.Namespace) -> DataConfig:
    given = DataConfig(tokenizer=options.tokenizer, vocab_file=options.vocab_file)
    trained = given.trains_tokenizer and given.vocab_file is None
    return DataConfig(
        source=options.source,
        objective=options.objective,
        documents=options.documents,
        max_seq_length=options.max_seq_length,
        tokenizer=options.tokenizer,
        vocab_file=options.vocab_file,
        vocab_size=options.vocab_size,
        vocab_sample_mb=options.vocab_sample_mb if trained else None,
        alphabet_size=options.alphabet_size,
        lowercase=False if options.cased else None,
        short_seq_prob=options.short_seq_prob,
        dupe_factor=options.dupe_factor,
        validation_share=options.validation_share,
        seed=options.seed,
    )


def _prepare(options: argparse.Namespace) -> None:
    if options.stage and not options.part:
        raise ValueError(f"--stage: expected --part beside it, got --stage {options.stage} alone")
    if is_streamed(options.source) or holds_examples(options.source):
        raise ValueError(
            f"--source: expected text (a path, hf:NAME or stdlib), got {options.source}"
        )
    config = _config(options)
    cache = chosen_cache_dir(options.cache_dir)
    if is_prepared(options.output):
        _check_finished(options, config, cache)
        join_parts(options.output)
        print(f"{options.output} is complete; remove it to prepare it again")
        return
    source = open_source(options.source, cache_dir=cache)
    check_outside("output", options.output, source)
    with named_if_full(options.output), _engine(options) as engine:
        pipeline = Pipeline(
            options.output,
            config,
            source,
            engine,
            part=options.part,
            block_bytes=int(options.block_mb * 2**20),
            memory=int(options.memory * 1e9),
        )
        if not options.part:
            statistics = pipeline.run()
            print(_summary(options.output, statistics, pipeline.report))
            return
        if options.stage != "examples":
            pipeline.read()
        if options.stage != "read":
            pipeline.plan_with_others(options.stage is None, 60 * options.wait)
            pipeline.make_examples()
    print(f"part {options.part.number} of {options.part.count} is done; after all: merge")


def _check_finished(options: argparse.Namespace, config: DataConfig, cache: Path) -> None:
    """Raises a ValueError if a finished folder was made with other settings."""
    manifest = read_prepared(options.output)
    try:
        source = open_source(options.source, cache_dir=cache).name
    except FileNotFoundError:  # the text may be gone
        source = manifest["source"]
    settings = example_settings(config, config.given_tokenizer())
    settings |= {"source": source, "block_bytes": int(options.block_mb * 2**20)}
    found = {**manifest["settings"], "source": manifest["source"]}
    found.pop("corpus", None)
    check_settings(options.output, found, settings)


def _engine(options: argparse.Namespace) -> Engine:
    if options.engine == "ray":
        return Ray(options.workers, options.address)
    if options.address is not None:
        raise ValueError(f"--address: expected --engine ray beside it, got {options.address}")
    return _processes(options.workers)


def _processes(workers: int | None) -> Engine:
    workers = available_cores() if workers is None else workers
    if workers == 1:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a worker has one core
        return InProcess()
    return Processes(workers)


def _import(options: argparse.Namespace) -> None:
    config = DataConfig(
        tokenizer=options.tokenizer,
        vocab_file=options.vocab_file,
        lowercase=False if options.cased else None,
    )
    with _processes(options.workers) as engine:
        statistics = import_data(
            options.source,
            options.output,
            engine,
            max_seq_length=options.max_seq_length,
            tokenizer=config.given_tokenizer(),
            unmask=options.unmask,
        )
    for split in SPLITS:
        examples, tokens = (statistics[f"{split}_{what}"] for what in ("examples", "tokens"))
        print(f"{options.output / split}: {examples:,} examples, {tokens:,} tokens")


def _merge(options: argparse.Namespace) -> None:
    statistics = join_parts(options.output)
    print(_summary(options.output, statistics))


def _check(options: argparse.Namespace) -> None:
    if not options.folder.is_dir():
        raise FileNotFoundError(f"folder: {options.folder} does not exist; expected prepared data")
    train, held_out, _ = open_prepared(options.folder, verify=True)
    for split, dataset in zip(SPLITS, (train, held_out), strict=True):
        for begin in range(0, len(dataset), _CHECKED):
            dataset.batch(np.arange(begin, min(begin + _CHECKED, len(dataset))))
        print(f"{split}: {len(dataset):,} examples, {dataset.num_tokens:,} tokens, as written")


def _summary(folder: Path, statistics: dict[str, int], report: Report | None = None) -> str:
    """Describes finished data, and the time that each stage took."""
    lines = [
        f"{folder}: {statistics['documents']:,} documents, "
        f"{statistics['duplicates']:,} duplicates left out"
    ]
    for split in SPLITS:
        counts = (
            f"{statistics[f'{split}_{what}']:,} {what}"
            for what in ("documents", "examples", "tokens")
        )
        lines.append(f"{split}: {', '.join(counts)}{_lengths(folder / split)}")
    for name, stage in (report.stages if report else {}).items():
        rate = f"{stage.bytes / 1e6 / stage.worker_seconds:.1f} MB/s a worker"
        text = f", {stage.bytes / 1e6:,.1f} MB of text, {rate}" if stage.bytes else ""
        lines.append(f"{name}: {stage.worker_seconds:,.1f} s of one worker{text}")
    return "\n".join(lines)


def _lengths(path: Path) -> str:
    lengths = ShardDataset(path, verify=False).lengths
    if not len(lengths):
        return ""
    counts = np.zeros(MAX_LENGTH + 1, np.int64)
    for begin in range(0, len(lengths), AT_ONCE):  # of all at once, a large corpus has billions
        counts += np.bincount(lengths[begin : begin + AT_ONCE], minlength=len(counts))
    up_to = np.cumsum(counts)
    places = np.multiply(_QUANTILES, len(lengths))
    quarter, middle, three_quarters, most = np.searchsorted(up_to, places)
    return (
        f"; lengths: mean {lengths.mean():.1f}, quartiles {quarter}, {middle}, {three_quarters}, "
        f"95 % up to {most}, longest {lengths.max()}"
    )
