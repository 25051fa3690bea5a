"""What all stages of a preparation know: its folder, its settings, and what was found so far."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad._files import read_json_object, write_text
from bert_unpad.data.config import DataConfig
from bert_unpad.data.objective import SECOND_SEGMENTS
from bert_unpad.data.preparation.duplicates import count_duplicates, distinct
from bert_unpad.data.preparation.locks import LOCK, one_at_a_time
from bert_unpad.data.preparation.ordered_sources import OrderedSources
from bert_unpad.data.preparation.spool import SpooledBlock
from bert_unpad.data.prepared import SPLITS
from bert_unpad.data.random_hash import splitmix64
from bert_unpad.data.text.json_tokenizer import load_tokenizer
from bert_unpad.data.text.sentences import held_out
from bert_unpad.data.text.tokenizer import TextTokenizer

MEMORY = 2 * 10**9
"""Bytes that a worker takes by default."""
ABOUT = "settings.json"
"""The file in `work` with what a preparation was begun with."""
_NOT_OF_EXAMPLES = (
    *("source", "mixture", "cache_dir", "vocab_file", "verify"),
    *("masked_lm_prob", "mask_unit", "max_predictions_per_seq"),
)
_MOST_HELD_OUT_TOGETHER = 16  # blocks whose held-out documents make examples together


@dataclass(frozen=True)
class Corpus:
    """What reading has found in all blocks.

    Attributes:
        blocks: number of blocks.
        documents: number of distinct documents that hold text.
        duplicates: documents left out because the same text came before.
        train_size: bytes of the documents to train on, cleaned.
        least, most: smallest and largest hash of a document.
        ranges: number of ranges in which duplicates were looked for.
        digest: hex SHA-256 of all documents' digests in order.
    """

    blocks: int
    documents: int
    duplicates: int
    train_size: int
    least: int
    most: int
    ranges: int
    digest: str


@dataclass(frozen=True)
class Build:
    """A preparation; every worker gets a copy.

    Attributes:
        folder: where the result appears, and intermediate files in `work`.
        config: the settings of the examples.
        block_bytes: size of the first blocks, see `blocks.block_bytes`.
        memory: bytes that a worker may take.
    """

    folder: Path
    config: DataConfig
    block_bytes: int
    memory: int

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def spool(self) -> Path:
        return self.work / "spool"

    @property
    def ordered_sources(self) -> OrderedSources:
        return OrderedSources(self.work)

    @property
    def duplicates(self) -> Path:
        return self.work / "duplicates"

    def piece(self, split: str, number: int) -> Path:
        """The shard of one block's examples."""
        return self.work / split / f"{number:06}"

    def pieces(self, split: str, blocks: int) -> int:
        """The number of shards of a split."""
        return -(-blocks // self.blocks_together(split))

    def blocks_together(self, split: str) -> int:
        """Blocks whose documents make examples together: few documents of each are held out."""
        share = self.config.validation_share
        if split == "train" or not share:
            return 1
        return max(1, min(_MOST_HELD_OUT_TOGETHER, int(1 / share)))

    def block(self, number: int) -> SpooledBlock:
        return SpooledBlock(self.spool, number)

    def not_read(self) -> Iterable[int]:
        """The blocks, or ordered sources, that are still to be read; block 0 if none has begun."""
        count = self.number_of_blocks()
        if count is None:
            missing = self.ordered_sources.missing()
            return [0] if missing is None else missing
        return (number for number in range(count) if not self.block(number).is_done)

    # What is found out once, for all workers.

    def save_number_of_blocks(self, blocks: int) -> None:
        write_text(self.work / "blocks.json", json.dumps({"blocks": blocks}))

    def number_of_blocks(self) -> int | None:
        """The number of blocks, once it is known."""
        path = self.work / "blocks.json"
        return read_json_object(path)["blocks"] if path.exists() else None

    def save_corpus(self, blocks: int, ranges: int) -> Corpus:
        """Adds up what is known of all blocks."""
        digest = hashlib.sha256()
        documents = most = 0
        least = 2**64 - 1
        for number in range(blocks):
            block = self.block(number)
            digest.update(np.ascontiguousarray(block.records["digest"]).tobytes())
            documents += len(block.records)
            if len(block.records):
                least = min(least, int(block.hashes.min()))
                most = max(most, int(block.hashes.max()))
        duplicates = count_duplicates(self.duplicates, ranges)
        distinct_documents = documents - duplicates
        found = Corpus(
            blocks, distinct_documents, duplicates, 0, least, most, ranges, digest.hexdigest()
        )
        some = (self.block(number) for number in range(blocks))
        size = sum(block.size_of(self.chosen(SPLITS[0], found, block)) for block in some)
        found = dataclasses.replace(found, train_size=size)
        write_text(self.work / "corpus.json", json.dumps(dataclasses.asdict(found)))
        return found

    def corpus(self) -> Corpus | None:
        """What was saved, once it is known."""
        path = self.work / "corpus.json"
        if not path.exists():
            return None
        found = read_json_object(path)
        return Corpus(**{field.name: found[field.name] for field in dataclasses.fields(Corpus)})

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of all examples."""
        folder = self.folder / "tokenizer"
        return _tokenizer(folder, folder.stat().st_mtime_ns)

    def chosen(self, split: str, corpus: Corpus, block: SpooledBlock) -> NDArray[np.bool_]:
        """Which documents of a block belong to a split, bool [documents]; none twice.

        With a share above 0 and at least two documents, both splits get at least one. A single
        document is not held out.
        """
        hashes = block.hashes
        share = self.config.validation_share
        out = held_out(hashes, share)
        if share > 0:
            out |= hashes == np.uint64(corpus.least)
        out &= hashes != np.uint64(corpus.most)
        kept = distinct(self.duplicates, corpus.ranges, block.number, len(hashes))
        return kept & (out if split == SPLITS[1] else ~out)

    def sample(self, corpus: Corpus, megabytes: float | None) -> Iterator[list[str]]:
        """Yields a random sample of training documents, the same every time, in their order.

        Args:
            corpus: what is known of all documents.
            megabytes: text of the sample in UTF-8, in 10^6 bytes: nearly as much, and never more
                than one document beyond it. None for all.
        """
        size = np.inf if megabytes is None else megabytes * 1e6
        whole = size >= corpus.train_size
        left = np.inf if whole else size
        for number in range(corpus.blocks):
            block = self.block(number)
            which = self.chosen(SPLITS[0], corpus, block)
            if not whole:
                # Another choice than that of held-out documents, which the hashes themselves make.
                limit = np.uint64(int(size / corpus.train_size * 2**64))
                most = block.hashes == np.uint64(corpus.most)  # never held out
                which &= (splitmix64(block.hashes) < limit) | most
            for sentences in block.read(which):
                yield sentences
                left -= sum(len(sentence.encode()) + 1 for sentence in sentences)
                if left <= 0:
                    return


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: Path, changed: int) -> TextTokenizer:
    """Kept from block to block; `changed` tells tokenizers of one place apart."""
    return load_tokenizer(folder)


def example_settings(config: DataConfig, tokenizer: TextTokenizer | None) -> dict[str, Any]:
    """Everything in a configuration that determines the examples of a corpus, as JSON values."""
    settings = dataclasses.asdict(config)
    for name in _NOT_OF_EXAMPLES:
        del settings[name]
    settings["lowercase"] = config.lowercases
    # Objectives with the same examples share them.
    settings["objective"] = SECOND_SEGMENTS[config.objective]
    if tokenizer is not None:
        settings |= {"vocab_size": None, "vocab_sample_mb": None, "tokenizer": tokenizer.identity()}
    return settings


def begin_work(folder: Path, about: dict[str, Any], inside: Iterable[str] = ()) -> None:
    """Makes the folders of unfinished work, or takes those of work that was begun with the same.

    Args:
        folder: where the result appears.
        about: what the result depends on, as JSON values; `content` tells what the files of
            `source` hold, whatever their names.
        inside: folders to make in `work`, besides one for each split.

    Raises:
        ValueError: the work was begun with something else, or the folder has other files.
    """
    work = folder / "work"
    path = work / ABOUT
    if not path.exists():
        others = sorted(x.name for x in folder.iterdir() if x != work) if folder.exists() else ()
        if others:
            raise ValueError(
                f"output: expected a new folder, or one that was begun, got {folder} with "
                f"{', '.join(others[:3])}"
            )
        for name in (*inside, *SPLITS):
            (work / name).mkdir(parents=True, exist_ok=True)
        (work / LOCK).touch()
        with one_at_a_time(work / "begin.lock"):  # others may begin with other settings
            if not path.exists():
                write_text(path, json.dumps(about))
    found = read_json_object(path)
    if about["content"] is not None:  # the same files, perhaps by another name
        about = {**about, "source": found.get("source")}
    check_settings(folder, found, about)


def check_settings(folder: Path, found: dict[str, Any], about: dict[str, Any]) -> None:
    """Raises a ValueError that names the differences if a preparation had other settings."""
    about = json.loads(json.dumps(about))
    if found != about:
        names = [name for name in sorted(about | found) if about.get(name) != found.get(name)]
        changes = (
            f"the files of {found.get('source')} as they were then, got others or changed ones"
            if name == "content"
            else f"{name} {found.get(name)!r}, got {about.get(name)!r}"
            for name in names
        )
        raise ValueError(
            f"output: {folder} was begun with other settings (remove it to begin again): "
            f"expected {'; '.join(changes)}"
        )


def open_build(folder: Path) -> tuple[Build, dict[str, Any]]:
    """Opens a preparation that was begun; also returns what `begin_work` was told about it."""
    path = folder / "work" / ABOUT
    if not path.exists():
        raise ValueError(f"output: expected a preparation that was begun in {folder}, got none")
    about = read_json_object(path)
    config = DataConfig(validation_share=about["validation_share"])  # all that joining asks for
    return Build(folder, config, about["block_bytes"], MEMORY), about
