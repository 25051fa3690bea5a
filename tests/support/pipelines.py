"""Preparations of a small corpus, here and in processes of their own."""

import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bert_unpad.data import DataConfig
from bert_unpad.data.formats.sources import open_files
from bert_unpad.data.preparation.engines import Engine, InProcess
from bert_unpad.data.preparation.parts import Part
from bert_unpad.data.preparation.pipeline import Pipeline
from tests.support.processes import TIMEOUT

BLOCK = 6000
"""Bytes of a block, of which the corpus has some."""

Corpus = tuple[DataConfig, list[str]]
"""How it is prepared, and its documents."""


def pipeline(
    corpus: Corpus, output: Path, engine: Engine | None = None, **options: Any
) -> Pipeline:
    """Begins to prepare the corpus, or goes on."""
    config, _ = corpus
    source = open_files(Path(config.source))
    options = {"block_bytes": BLOCK, "progress": False, **options}
    return Pipeline(output, config, source, engine or InProcess(), **options)


def _prepare(corpus: Corpus, output: Path, part: Part | None, connection: Any) -> None:
    work = pipeline(corpus, output, part=part)
    connection.send("begins")
    if part is None:
        work.run()
        return
    work.read()
    work.plan_with_others(wait=True)
    work.make_examples()


def child(corpus: Corpus, output: Path, part: Part | None = None) -> BaseProcess:
    """Starts a process that prepares the corpus, or does a part of it; returns once it works."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_prepare, args=(corpus, output, part, theirs))
    process.start()
    assert ours.poll(TIMEOUT)
    ours.recv()
    return process
