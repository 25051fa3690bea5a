"""The options of a run: their number, and the pages of help."""

import operator
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from bert_unpad.pretrain.config import PretrainConfig, read_config
from bert_unpad.pretrain.config.options import find_options
from tests.support.paths import CONFIGS, ROOT
from tests.support.processes import TIMEOUT

NEEDED = ["--batching.global_batch_size", "8", "--schedule.total_steps", "10"]
OPTIONS = {x.name: x for x in find_options(PretrainConfig) if x.tier != "code_only"}


def _help(arguments: list[str], capsys) -> tuple[str, list[str]]:
    with pytest.raises(SystemExit) as ended:
        read_config(arguments)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    names = re.findall(r"^  --([a-z_.]+)", text, re.MULTILINE)
    return text, [name for name in names if name not in ("config", "print_config")]


def test_the_first_page_of_help_is_short(capsys):
    text, names = _help(["--help"], capsys)
    assert len(names) <= 40
    assert names == [name for name, option in OPTIONS.items() if option.tier == "common"]
    hidden = len(OPTIONS) - len(names)
    assert text.splitlines()[-1] == f"{hidden} more options: --help=advanced"


@pytest.mark.parametrize("asked", [["--help=advanced"], ["--help", "advanced"], ["-h", "advanced"]])
def test_the_second_page_of_help_has_all_options(asked, capsys):
    text, names = _help([*NEEDED, *asked], capsys)
    assert names == list(OPTIONS)
    assert len(names) <= 100
    assert "more options" not in text


def test_the_guide_names_the_options_without_a_section():
    table = (ROOT / "docs" / "training" / "running.md").read_text()
    row = next(line for line in table.splitlines() if line.startswith("| top level |"))
    assert sorted(re.findall(r"`(\w+)`", row)) == sorted(
        name for name in OPTIONS if "." not in name
    )


def test_every_option_has_a_text(capsys):
    text, names = _help(["--help=advanced"], capsys)
    described = re.findall(r"^  --([a-z_.]+)[^\n]*\n? +[A-Za-z]", text, re.MULTILINE)
    assert [name for name in described if name in OPTIONS] == names


def _flat(values: dict, prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_the_saved_configuration_has_only_options():
    config, text = read_config(["--config", str(CONFIGS / "quickstart.yaml")])
    names = list(_flat(yaml.safe_load(text)))
    values = {name: operator.attrgetter(name)(config) for name in OPTIONS}
    assert names == [name for name, value in values.items() if value is not None]


def test_only_reading_a_command_line_needs_its_parser():
    code = """
import sys
sys.modules["jsonargparse"] = None
from bert_unpad.pretrain.config import PretrainConfig, read_config
try:
    read_config([])
except ImportError as error:
    assert error.name == "jsonargparse"
else:
    raise AssertionError("read without its parser")
"""
    subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT, check=True)
