"""Steps of datatrove's pipelines (https://github.com/huggingface/datatrove) that prepare documents.

Three pipelines, each of which needs the one before to be complete:

    [reader, filters, ..., SpoolDocuments(OUT, config)]    as many tasks as you like
    [MakeExamples(OUT, config)]                            as many tasks as you like
    [JoinParts(OUT)]                                       one task

The documents of one task follow those of the task before, so the result depends on the number of
tasks of the first pipeline, but not on that of the second. A task that was killed goes on where it
was.
"""

from collections.abc import Iterator
from pathlib import Path

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from bert_unpad.data.config import DataConfig
from bert_unpad.data.preparation.blocks import BLOCK_BYTES
from bert_unpad.data.preparation.engines import InProcess
from bert_unpad.data.preparation.join import join_parts
from bert_unpad.data.preparation.ordered_sources import spool_source
from bert_unpad.data.preparation.parts import Part
from bert_unpad.data.preparation.pipeline import Pipeline


class _Documents:
    """What datatrove's earlier steps yield, as a source."""

    name = "datatrove"

    def __init__(self, data: DocumentsPipeline = ()) -> None:
        self._data = data

    def documents(self) -> Iterator[str]:
        return (document.text for document in self._data)

    def fingerprint(self) -> str:
        raise NotImplementedError


class _Step(PipelineStep):
    type = "bert_unpad"

    def __init__(self, output: str, config: DataConfig, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__()
        self.output, self.config, self.block_bytes = output, config, block_bytes

    def _pipeline(self, part: Part | None = None) -> Pipeline:
        return Pipeline(
            *(Path(self.output), self.config, _Documents(), InProcess()),
            part=part,
            block_bytes=self.block_bytes,
            progress=False,
        )


class SpoolDocuments(_Step):
    """Cleans the documents of a task, splits them into sentences and writes them to blocks.

    Args:
        output: folder of the result, which all tasks see.
        config: how examples are made; its source is not read.
        block_bytes: size of the first blocks of each task.
    """

    name = "spool documents"

    def run(
        self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        """Writes the documents of a task; yields none."""
        sources = self._pipeline().build.ordered_sources
        sources.begin(world_size)
        done = spool_source(sources.of(rank), _Documents(data), self.block_bytes)
        self.stat_update("documents", value=done["documents"])
        yield from ()


class MakeExamples(_Step):
    """Makes a task's share of the examples; the first to come finds duplicates and the vocabulary.

    Args:
        output, config, block_bytes: as given to `SpoolDocuments`.
    """

    name = "make examples"

    def run(
        self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        """Makes examples; yields no documents."""
        work = self._pipeline(Part(rank + 1, world_size))
        work.plan_with_others(wait=False)
        work.make_examples()
        yield from ()


class JoinParts(PipelineStep):
    """Joins what the tasks of `MakeExamples` have made."""

    name = "join parts"
    type = "bert_unpad"

    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = output

    def run(
        self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        """Joins the parts; yields no documents."""
        if rank == 0:
            for name, count in join_parts(Path(self.output)).items():
                self.stat_update(name, value=count)
        yield from ()
