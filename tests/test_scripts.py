"""What scripts/common.sh finds out about a machine."""

import subprocess
from pathlib import Path

import pytest

COMMON = Path(__file__).resolve().parent.parent / "scripts" / "common.sh"


def shell(code: str, **variables: str) -> str:
    """What bash prints for `code` with the functions of common.sh."""
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source {COMMON}; {code}"],
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def stub(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)
    return path


def test_tests_build_cuda_where_nvcc_is(tmp_path):
    nvcc = stub(tmp_path / "cuda" / "bin" / "nvcc")
    said = "want_cuda; echo ${BERT_UNPAD_CUDA:-unset}"
    assert shell("find_nvcc", CUDA_HOME=str(tmp_path / "cuda")) == str(nvcc)
    assert shell(said, CUDA_HOME=str(tmp_path / "cuda")) == "1"
    assert shell(said, PATH=f"{nvcc.parent}:/usr/bin:/bin") == "1"
    assert shell(said, CUDA_HOME=str(tmp_path / "cuda"), BERT_UNPAD_CUDA="0") == "0"
    nowhere = "find_nvcc() { return 1; }; "
    assert shell(nowhere + said) == "unset"
    assert shell(nowhere + said, BERT_UNPAD_CUDA="1") == "1"  # and the build says what is missing


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["echo all is well"], ""),
        (
            ["echo check failed: cuda:0: mlp: wrong", "echo check failed: more", "exit 1"],
            "check failed: cuda:0: mlp: wrong",
        ),
        (["echo Segmentation fault", "exit 139"], "Segmentation fault"),
        (["exit 124"], "the check of its operators took longer than 300 s"),
    ],
)
def test_why_a_gpu_cannot_be_used(tmp_path, lines, problem):
    stub(tmp_path / "python", f'echo "$@" >{tmp_path}/arguments', *lines)
    out = shell(f"PY={tmp_path}/python; problem=$(gpu_problem); echo $problem")
    assert out == problem
    assert (tmp_path / "arguments").read_text() == "-m bert_unpad.info --check cuda\n"
