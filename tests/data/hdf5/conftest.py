"""One folder of examples in each of MLPerf's layouts, and its vocabulary."""

import pytest

from bert_unpad.data.text.tokenizer import WordPieceTokenizer
from tests.support.hdf5_files import VOCAB, open_folder, raw_examples, write_folder


@pytest.fixture(scope="module")
def tokenizer():
    return WordPieceTokenizer(VOCAB)


@pytest.fixture(scope="module", params=["variable", "fixed"])
def layout(request):
    """What the package writes."""
    return request.param


@pytest.fixture(scope="module", params=["variable", "fixed", "packed"])
def dataset(request, tokenizer, tmp_path_factory):
    layout = request.param
    folder = tmp_path_factory.mktemp(layout)
    write_folder(folder / "data", raw_examples(), layout)
    return open_folder(folder / "data", tokenizer, folder / "cache", max_open=2)
