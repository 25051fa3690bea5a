"""What `bert_unpad.data` exports, with and without the trainer's packages."""

import subprocess
import sys

import pytest

import bert_unpad.data
from tests.support.processes import TIMEOUT


def test_without_the_pretrain_extra_lengths_work_and_the_rest_says_what_to_install():
    script = (
        "import sys\nsys.modules['tokenizers'] = sys.modules['tqdm'] = None\n"
        "import bert_unpad.data\nassert bert_unpad.data.wikipedia_lengths().sum() > 0\n"
        "try:\n    from bert_unpad.data import prepare\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert "pip install 'bert_unpad[pretrain]'" in done.stdout


def test_every_exported_name_exists():
    for name in bert_unpad.data.__all__:
        assert getattr(bert_unpad.data, name).__name__ == name
    assert set(bert_unpad.data._HOME) == set(bert_unpad.data.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        bert_unpad.data.nothing  # noqa: B018
