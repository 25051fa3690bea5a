"""Documented commands run where only the quickstart has been, or say what to install."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import TIMEOUT

for package in ("jsonargparse", "tokenizers", "matplotlib"):  # of the quickstart
    pytest.importorskip(package)


# Runs each command in a fork, without what the quickstart does not install. What takes long to
# import and many of them need is imported once.
RUN = """
import importlib.abc, json, os, runpy, sys, tempfile, traceback

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

HIDDEN, COMMANDS = json.loads(sys.argv[1])
sys.meta_path.insert(0, Hide())
import numpy, torch, torch._dynamo
import bert_unpad.ops

def run(arguments):
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")

results = []
for arguments in COMMANDS:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = 0
            try:
                run(arguments)
            except SystemExit as end:
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        results.append((code, output.read().decode()))
print(json.dumps(results))
"""

# What needs more than the quickstart installs; and the extra that has it.
NEEDS = {
    "benchmarks.model": "hf",
    "benchmarks.hf": "hf",
    "benchmarks.memory": "hf",
    "benchmarks.host": "hf",
    "benchmarks.tune": "tune",
    "examples/embed.py": "hf",
    "examples/entities.py": "hf",
    "examples/finetune.py": "hf",
    "examples/embedding_server.py": "serve",
}


def run_hidden(
    commands: list[list[str]], hidden: tuple[str, ...], folder: Path
) -> list[tuple[int, str]]:
    """Exit code and output of each command, without these packages."""
    command = [sys.executable, "-c", RUN, json.dumps([hidden, commands])]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        timeout=TIMEOUT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0
    return json.loads(done.stdout)


def documented_commands() -> list[list[str]]:
    """The arguments of Python in every command of README and the benchmarks, and the examples."""
    pages = ("README.md", "docs/benchmarks.md")
    text = "\n".join((ROOT / page).read_text() for page in pages).replace("\\\n", " ")
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, re.S))
    found = re.findall(r"^(?:python|torchrun .*?(?=scripts/)) *([^#\n]+)", blocks, re.M)
    found += sorted(set(re.findall(r"\((examples/\w+\.py)\)", text)))
    found += sorted(set(re.findall(r"`python (-m [\w.]+)", text)))
    return [command.split() for command in found]


def test_every_command_runs_or_says_what_to_install(tmp_path):
    commands = documented_commands()
    commands = [["-m", *c[1:]] if c[0] == "-m" else [str(ROOT / c[0]), *c[1:]] for c in commands]
    names = [c[1] if c[0] == "-m" else str(Path(c[0]).relative_to(ROOT)) for c in commands]
    assert set(names) > set(NEEDS)
    expected = {}
    for name, command in zip(names, commands, strict=True):
        extra = NEEDS.get(name) if "cuda" not in command else None
        if extra is None:
            # All imports are those of the whole command; of a module keep its name.
            command = [*command[: 2 if command[0] == "-m" else 1], "--help"]
        expected[tuple(command)] = extra
    hidden = ("transformers", "accelerate", "peft", "h5py", "optuna", "starlette", "uvicorn")
    results = run_hidden([list(command) for command in expected], hidden, tmp_path)
    for (command, extra), (code, output) in zip(expected.items(), results, strict=True):
        if extra is None:
            assert code == 0, (command, output)
            assert "usage: " in output, command
        else:
            line = r"this needs \w+: pip install 'bert_unpad\[" + extra + r"\]'"
            assert code == 2, (command, output)
            assert re.fullmatch(line, output.strip()), (command, output)


def test_other_errors_keep_their_traceback(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from bert_unpad._extras import packages_of\n"
        "with packages_of('hf'):\n    import bert_unpad.no_such_module\n"
    )
    ((code, output),) = run_hidden([[str(script)]], (), tmp_path)
    assert code == 1
    assert "Traceback" in output
    assert "bert_unpad.no_such_module" in output
