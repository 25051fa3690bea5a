"""Data that are damaged while a run reads them end it in one line, and the cache is made again."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.pretrain_runs import finish, go_on, make_folder, run, start_pausing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("damaged")
    make_folder(path)
    return path


def _shorten(file: Path) -> str:
    size = file.stat().st_size
    os.truncate(file, 0)
    return f"{file} has become shorter: expected {size:,} bytes, got 0"


def _alter(file: Path) -> str:
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    return f"{file} is damaged: expected "


@pytest.mark.parametrize(
    ("damage", "name", "strategy"),
    [
        (_shorten, "tokens-000000", "stratified"),
        (_shorten, "offsets", "stratified"),
        (_alter, "tokens-000000", "stratified"),
        (_alter, "offsets", "stratified"),
        (_alter, "tokens-000000", "exchange"),
    ],
)
def test_one_line_names_the_file_and_the_next_start_goes_on(folder, damage, name, strategy):
    run_name = f"{damage.__name__}-{name}-{strategy}"
    cache = folder / f"{run_name}-cache"
    shutil.copytree(folder / "cache", cache)
    (file,) = cache.glob(f"prepared/*/train/{name}.bin")
    arguments = ["--data.cache_dir", str(cache), "--batching.strategy", strategy]
    arguments += ["--checkpoint.background", "false"]
    processes = start_pausing(folder, run_name, 2, 6, *arguments)
    told = damage(file)
    go_on(folder / run_name)
    codes, output = finish(folder, run_name, processes)
    output += (folder / f"{run_name}.log.1").read_text()
    assert codes == [1, 1], output
    assert "Traceback" not in output
    assert told in output
    again = r"\. The cache is made again at the next start\. The same command then continues from "
    assert re.search(again + r"step [48], whose checkpoint is whole$", output, re.MULTILINE), output
    output = run(folder, run_name, 2, *arguments)
    assert "rebuilding damaged data: " in output
    assert "continuing from " in output
