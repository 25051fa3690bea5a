"""datatrove's documents prepared: by its local executor, on other numbers of tasks."""

import pytest

pytest.importorskip("datatrove")

import random

from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from bert_unpad.data import DataConfig
from bert_unpad.data.formats.sources import open_files
from bert_unpad.data.preparation.datatrove_steps import JoinParts, MakeExamples, SpoolDocuments
from bert_unpad.data.preparation.engines import InProcess
from bert_unpad.data.preparation.pipeline import Pipeline
from bert_unpad.data.prepared import open_prepared
from tests.support.prepared_text import contents, write_corpus
from tests.support.seeds import derived

TASKS = 3


class Read(PipelineStep):
    """Yields a task's share of the documents of a list."""

    name = "read"
    type = "test"

    def __init__(self, texts):
        super().__init__()
        self.texts = texts

    def run(self, data=None, rank=0, world_size=1):
        first, last = (len(self.texts) * n // world_size for n in (rank, rank + 1))
        for number in range(first, last):
            yield Document(text=self.texts[number], id=str(number))


def run(steps, tasks, logs):
    LocalPipelineExecutor(
        pipeline=steps, tasks=tasks, workers=1, logging_dir=str(logs), skip_completed=False
    ).run()


def test_the_same_on_any_number_of_tasks_that_make_examples(tmp_path):
    texts = write_corpus(tmp_path / "text", random.Random(derived(0)))
    config = DataConfig(max_seq_length=48, vocab_size=200, validation_share=0.1)
    about = (config, 5000)
    for name, tasks in (("one", 1), ("four", 4)):
        output = str(tmp_path / name)
        with pytest.raises(ValueError, match="stage: expected all parts to have read datatrove"):
            run([MakeExamples(output, *about)], 1, tmp_path / "logs" / name / "early")
        run([Read(texts), SpoolDocuments(output, *about)], TASKS, tmp_path / "logs" / name / "0")
        run([MakeExamples(output, *about)], tasks, tmp_path / "logs" / name / "1")
        run([JoinParts(output)], 1, tmp_path / "logs" / name / "2")
    assert contents(tmp_path / "one") == contents(tmp_path / "four")

    # The documents are those that are read from files.
    from_files = tmp_path / "files"
    Pipeline(from_files, config, open_files(tmp_path / "text"), InProcess(), progress=False).run()
    found, expected = (open_prepared(folder)[2] for folder in (tmp_path / "one", from_files))
    assert found["settings"]["corpus"] == expected["settings"]["corpus"]
    assert found["statistics"]["documents"] == expected["statistics"]["documents"]
