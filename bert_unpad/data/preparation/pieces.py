"""The third stage: the examples of a block, as a shard."""

import errno
import time
from collections.abc import Iterator
from typing import Any

from bert_unpad.data.preparation.build import Build
from bert_unpad.data.store.shard_writer import ShardWriter
from bert_unpad.data.text.corpus import TokenizedCorpus, tokenize
from bert_unpad.data.text.examples import make_examples
from bert_unpad.data.text.pairs import SPECIAL_PER_PAIR


def make_piece(build: Build, split: str, number: int) -> dict[str, Any]:
    """Makes the examples of a split of one or more blocks."""
    if build.piece(split, number).exists():  # by a worker that was lost before it could say so
        return {"bytes": 0, "tokens": 0, "seconds": {}}
    corpus, config, tokenizer = build.corpus(), build.config, build.tokenizer()
    assert corpus is not None  # what makes pieces has planned
    together = build.blocks_together(split)
    blocks = range(number * together, min((number + 1) * together, corpus.blocks))
    size = 0

    def documents() -> Iterator[list[str]]:
        nonlocal size
        for block in map(build.block, blocks):
            which = build.chosen(split, corpus, block)
            size += block.size_of(which)
            yield from block.read(which)

    started = time.perf_counter()
    tokenized = tokenize(documents(), tokenizer, longest=config.max_seq_length - SPECIAL_PER_PAIR)
    encoded = time.perf_counter()
    try:
        _write(build, split, number, tokenized)
    except OSError as error:
        another = isinstance(error, FileExistsError) or error.errno == errno.ENOTEMPTY
        if not another or not build.piece(split, number).exists():
            raise  # otherwise another worker has been quicker, with the same examples
    finished = time.perf_counter()
    return {
        "bytes": size,
        "tokens": len(tokenized.tokens),
        "seconds": {"tokenize": encoded - started, "examples": finished - encoded},
    }


def _write(build: Build, split: str, number: int, tokenized: TokenizedCorpus) -> None:
    config, tokenizer = build.config, build.tokenizer()
    with ShardWriter(
        build.piece(split, number),
        vocab_size=tokenizer.vocab_size,
        unmaskable_ids=tokenizer.unmaskable_ids,
        max_seq_length=config.max_seq_length,
    ) as writer:
        for columns in make_examples(
            tokenized,
            tokenizer,
            objective=config.objective,
            documents=config.documents,
            max_seq_length=config.max_seq_length,
            short_seq_prob=config.short_seq_prob,
            dupe_factor=config.dupe_factor if split == "train" else 1,
            seed=f"{config.seed}, {split}, {number}",
        ):
            writer.append(*columns)
        writer.statistics["documents"] = tokenized.documents
