"""The stages of a preparation, one after the other; each continues where it was killed.

`read` needs the corpus only. `plan` (duplicates and the vocabulary) needs all blocks. `examples`
needs the plan. Within `read` and `examples` any worker can do any block (or ordered source, of
files that are read in order), so both can be divided into parts for a scheduler. `join` puts the
parts together. Parts share a lock; a whole preparation and `join` hold it alone.
"""

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bert_unpad.data.config import DataConfig
from bert_unpad.data.formats.sources import Source
from bert_unpad.data.preparation.blocks import BLOCK_BYTES, Block, cut, identity
from bert_unpad.data.preparation.build import MEMORY, Build, Corpus, begin_work, example_settings
from bert_unpad.data.preparation.duplicates import duplicates_path, find_duplicates, num_ranges
from bert_unpad.data.preparation.engines import Engine
from bert_unpad.data.preparation.join import join_pieces, missing_pieces
from bert_unpad.data.preparation.locks import build_lock, one_at_a_time
from bert_unpad.data.preparation.ordered_sources import divide, spool_source
from bert_unpad.data.preparation.parts import ABSENT_SECONDS, OtherParts, Part, to_run
from bert_unpad.data.preparation.pieces import make_piece
from bert_unpad.data.preparation.spool import spool_block
from bert_unpad.data.prepared import SPLITS
from bert_unpad.data.text.train_tokenizer import train_tokenizer

logger = logging.getLogger(__name__)

_RESERVED = 5 * 10**8  # bytes of the memory that libraries and a block take
LEAST_MEMORY = 2 * _RESERVED


@dataclass
class StageReport:
    """What was done in a stage, now; what an earlier run had done is not counted."""

    bytes: int = 0
    """Size of the text, cleaned."""
    worker_seconds: float = 0.0


@dataclass
class Report:
    """How long the stages of a run took, by name in order."""

    stages: dict[str, StageReport] = field(default_factory=dict)

    def add(self, done: dict[str, Any]) -> None:
        """Adds what a job returned."""
        for name, seconds in done["seconds"].items():
            stage = self.stages.setdefault(name, StageReport())
            stage.bytes += done.get("bytes", 0)
            stage.worker_seconds += seconds


class Pipeline:
    """Prepares a corpus in a folder.

    Args:
        folder: where the result appears; `work` in it has what is not finished.
        config: settings of the examples.
        source: the corpus.
        engine: runs the jobs.
        part: this run's share of the blocks.
        block_bytes: size of the first blocks; another size gives other examples.
        memory: bytes that a worker may take, at least `LEAST_MEMORY`. The training of a vocabulary
            takes memory in proportion to its sample instead (`vocab_sample_mb`).
        progress: whether to show bars; None shows them if stderr is a terminal.
        content: tells the content of the corpus apart; by default names, sizes and times of its
            files do.

    Raises:
        FileNotFoundError, ValueError: the tokenizer of the configuration cannot be read, a number
            is out of range, or the folder has the unfinished work of other settings.
    """

    def __init__(
        self,
        folder: Path,
        config: DataConfig,
        source: Source,
        engine: Engine,
        *,
        part: Part | None = None,
        block_bytes: int = BLOCK_BYTES,
        memory: int = MEMORY,
        progress: bool | None = None,
        content: str | None = None,
    ) -> None:
        if memory < LEAST_MEMORY:
            raise ValueError(f"memory: expected {LEAST_MEMORY:,} bytes or more, got {memory:,}")
        if block_bytes < 1:
            raise ValueError(f"block_bytes: expected 1 or more, got {block_bytes}")
        self.build = Build(folder, config, block_bytes, memory)
        self.report = Report()
        self._source, self._engine, self._part = source, engine, part or Part()
        self._progress = progress
        self._tokenizer = config.given_tokenizer()
        self._identity = identity(source)
        about = {
            **example_settings(config, self._tokenizer),
            "source": source.name,
            "content": self._identity if content is None else content,
            "block_bytes": block_bytes,
        }
        begin_work(folder, about, (self.build.spool.name, self.build.duplicates.name))
        self._others = OtherParts(self.build.work, self._part)

    def run(self) -> dict[str, int]:
        """Does all that is left, alone, and joins the parts; see `join_parts`."""
        with self._at_work(alone=True):
            self._read()
            self._plan()
            self._make_examples()
            return join_pieces(self.build.folder)

    def read(self) -> None:
        """Spools this part's share of the corpus."""
        with self._at_work():
            self._read()

    def _read(self) -> None:
        blocks = cut(self._source, self.build.block_bytes)
        if blocks is None:
            self._read_in_order()
        else:
            self._read_blocks(blocks)
        if identity(self._source) != self._identity:
            raise ValueError(
                f"source: expected files of {self._source.name} that stay as they are while they "
                f"are read, but some have changed; remove {self.build.folder} and begin again"
            )

    def _read_blocks(self, blocks: Sequence[Block]) -> None:
        build = self.build
        if build.number_of_blocks() is None:
            build.save_number_of_blocks(len(blocks))
        left = [
            (build.spool, number, block)
            for number, block in enumerate(blocks)
            if self._part.mine(number) and not build.block(number).is_done
        ]
        self._run("reading", spool_block, left)

    def _read_in_order(self) -> None:
        ordered, first = self.build.ordered_sources, self.build.block_bytes
        sources = divide(self._source, first)
        ordered.begin(len(sources))
        left = [
            (ordered.of(number), source, first)
            for number, source in enumerate(sources)
            if self._part.mine(number) and not ordered.is_done(number)
        ]
        if len(sources) > 1:
            self._run("reading", spool_source, left, " sources")
            return
        for one in left:  # here: a source that is no file may not be pickled
            with self._bar("reading", "B") as bar:
                self.report.add(spool_source(*one, lambda done: bar.update(done["bytes"])))

    def _not_read(self) -> Part | None:
        """The part that has to read what is missing first; None if nothing is."""
        return next(map(self._part.doing, self.build.not_read()), None)

    def _is_planned(self) -> bool:
        return self.build.corpus() is not None and (self.build.folder / "tokenizer").exists()

    def plan_with_others(self, wait: bool, absent_seconds: float = ABSENT_SECONDS) -> None:
        """Plans once for all parts.

        Args:
            wait: wait until the other parts, which run at the same time, have done their share;
                the first part plans. Otherwise all of them must have read before.
            absent_seconds: how long to wait for a part that has not begun.
        """
        if not wait:
            missing = [] if self._is_planned() else list(self.build.not_read())
            if missing:
                raise ValueError(
                    f"stage: expected all parts to have read {self._source.name}; run "
                    f"{to_run(self.build.work, missing)} with --stage read to the end"
                )
            self.plan()
        elif self._part.is_first:
            self._others.wait_for(self._not_read, "reading", absent_seconds)
            self.plan()
        else:
            first = self._part.doing(0)
            self._others.wait_for(
                lambda: None if self._is_planned() else first,
                *("reading and the vocabulary", absent_seconds),
            )

    def plan(self) -> None:
        """Finds duplicates, and trains the vocabulary; needs all blocks.

        Raises:
            ValueError: there is no text, or the vocabulary cannot be trained.
        """
        with self._at_work(), one_at_a_time(self.build.work / "plan.lock"):
            self._plan()

    def _plan(self) -> None:
        build, source = self.build, self._source
        blocks = build.number_of_blocks()
        if blocks is None:
            blocks = build.ordered_sources.number_blocks(build.spool)
            build.save_number_of_blocks(blocks)
        corpus = build.corpus() or self._find_duplicates(blocks)
        if not corpus.documents:
            raise ValueError(f"source: {source.name} holds no text; expected at least one document")
        if build.config.validation_share > 0 and corpus.documents == 1:
            logger.warning("%s is a single document: the validation part is empty", source.name)
        if not (build.folder / "tokenizer").exists():
            started = time.perf_counter()
            size = self._make_tokenizer(corpus)
            seconds = time.perf_counter() - started
            self.report.stages["vocabulary"] = StageReport(size, seconds)

    def _find_duplicates(self, blocks: int) -> Corpus:
        build = self.build
        documents = size = 0
        for block in map(build.block, range(blocks)):
            documents, size = documents + len(block.records), size + block.size
        ranges = num_ranges(documents, build.memory - _RESERVED)
        left = [
            (build.spool, build.duplicates, blocks, number, ranges)
            for number in range(ranges)
            if not duplicates_path(build.duplicates, number, ranges).exists()
        ]
        for done in self._engine.run(find_duplicates, left):
            self.report.add({**done, "bytes": size // ranges})
        return build.save_corpus(blocks, ranges)

    def _make_tokenizer(self, corpus: Corpus) -> int:
        """Returns about how many bytes of text it was trained on."""
        build, config, tokenizer = self.build, self.build.config, self._tokenizer
        size = 0
        if tokenizer is None:
            size = corpus.train_size
            if config.vocab_sample_mb is not None:
                size = min(size, int(config.vocab_sample_mb * 1e6))
            logger.info("training a vocabulary of up to %d tokens", config.vocab_size)
            tokenizer = train_tokenizer(
                config.tokenizer,
                lambda: build.sample(corpus, config.vocab_sample_mb),
                *(config.vocab_size, config.lowercases, config.alphabet_size),
            )
        temporary = build.work / f"tokenizer.{uuid.uuid4().hex}"
        tokenizer.save(temporary)
        try:
            os.rename(temporary, build.folder / "tokenizer")
        except OSError:
            if not (build.folder / "tokenizer").exists():  # another one may have been quicker
                raise
        return size

    def make_examples(self) -> None:
        """Makes the examples of this part's blocks."""
        with self._at_work():
            self._make_examples()

    def _make_examples(self) -> None:
        build = self.build
        corpus = build.corpus()
        assert corpus is not None  # the part has planned, or waited for it
        left = [
            (build, split, number)
            for split in SPLITS
            for number in missing_pieces(build, split, build.pieces(split, corpus.blocks))
            if self._part.mine(number)
        ]
        self._run("making examples", make_piece, left)

    def _run(
        self, title: str, job: Callable[..., Any], jobs: list[tuple], unit: str = " blocks"
    ) -> None:
        with self._bar(title, unit, len(jobs)) as bar:
            for done in self._engine.run(job, jobs):
                bar.update()
                self.report.add(done)

    def _bar(self, title: str, unit: str, total: int | None = None) -> tqdm:
        disable = None if self._progress is None else not self._progress  # None: on a terminal
        options = {"unit_scale": total is None, "disable": disable, "leave": False}
        return tqdm(desc=title, unit=unit, total=total, **options)

    @contextlib.contextmanager
    def _at_work(self, alone: bool = False) -> Iterator[None]:
        """Holds the folder's lock; lets other parts know that this one is at work or has failed."""
        with (
            build_lock(self.build.work, alone=alone),
            self._others.told_of_life(),
            self._others.told_of_failures(),
        ):
            yield
