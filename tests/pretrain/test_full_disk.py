"""A run whose disk is full says so in one line, on all ranks, and continues once there is room."""

from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import FileSystem

from bert_unpad.pretrain import main
from bert_unpad.pretrain.output.metrics import JsonLines
from tests.support.pretrain_runs import finish, make_folder, run
from tests.support.processes import start_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("full")
    make_folder(path)
    return path


def _main(what: str, command: list[str]) -> int:
    """A rank for which the disk is full from the checkpoint, or a line of the log, of step 8 on."""
    create, write = FileSystem.create_stream, JsonLines.write

    def create_full(self, path, mode):
        full = "step-000000008" in str(path) and mode == "wb"
        return create(self, "/dev/full" if full else path, mode)

    def write_full(self, values):
        if values["step"] == 8 and self._path.name == "metrics.jsonl":
            self._file = open("/dev/full", "a")  # noqa: SIM115
        write(self, values)

    if what == "checkpoint":
        FileSystem.create_stream = create_full
    else:
        JsonLines.write = write_full
    return main(command)


@pytest.mark.parametrize("what", ["checkpoint", "log"])
def test_a_full_disk_ends_all_ranks_with_what_to_do(folder, what):
    run_dir = folder / what
    command = ["--config", str(folder / "run.yaml"), "--run_dir", str(run_dir)]
    command += ["--checkpoint.background", str(what != "log").lower()]
    codes, output = finish(
        folder, what, start_ranks(_main, 2, what, command, log=folder / f"{what}.log")
    )
    other = (folder / f"{what}.log.1").read_text()
    assert codes == [1, 1], output
    assert "Traceback" not in output + other
    file = run_dir / ("metrics.jsonl" if what == "log" else "checkpoints/.saving-step-000000008")
    told = f"{file}: expected more room, got "
    assert f"pretrain: error: {told}" in output
    assert "bytes free (No space left on device). Make room. The same command then con" in output
    assert output.endswith("continues from step 4, whose checkpoint is whole\n")
    assert f"FullDiskError: {told}" in other or f"error: {told}" in other
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-000000004"]
    assert f"continuing from {run_dir}/checkpoints/step-000000004" in run(folder, what, 2)
