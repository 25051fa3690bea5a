"""Methods that no recipe uses: only tables name them, and a run imports the one it chooses."""

import json
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.support.paths import CONFIGS, ROOT
from tests.support.processes import TIMEOUT

PACKAGE = ROOT / "bert_unpad"
METHODS = {path.stem for path in (PACKAGE / "experimental").iterdir() if path.stem[0] != "_"}
CHOICES = {
    "dream_ddp": ["--comm.hook", "dream_ddp"],
    "gradient_flow": ["--comm.hook", "gradient_flow"],
    "layer_drop": ["--growth.name", "layer_drop"],
    "merit": ["--optimizer.name", "bert_unpad.experimental.MERIT"],
    "mt_dao": ["--optimizer.name", "mt_dao"],
    "zero_one_adam": ["--optimizer.name", "zero_one_adam"],
    "": [],
    "none by its path": ["--optimizer.name", "torch.optim.SGD"],
}
# Names of options and what they go with, their texts, and the tables.
TABLES = {
    "_choices.py",
    "costs/optimizers.py",
    "pretrain/config/communication.py",
    "pretrain/config/growth.py",
    "pretrain/config/limits.py",
    "pretrain/config/update.py",
    "pretrain/gradients/comm_hooks.py",
    "pretrain/growth/__init__.py",
    "pretrain/update/kinds.py",
}


def _build(arguments: list[str]) -> None:
    """Makes the parts of a run with two ranks that depend on its methods."""
    from bert_unpad.pretrain.config import read_config
    from bert_unpad.pretrain.gradients.comm_hooks import build_comm_hook
    from bert_unpad.pretrain.growth import Setting, make_growth
    from bert_unpad.pretrain.ranks import Ranks
    from bert_unpad.pretrain.update.check import check_optimizer
    from bert_unpad.pretrain.update.optimizer import build_optimizer

    needed = ["--batching.global_batch_size", "8", "--schedule.total_steps", "10"]
    config, _ = read_config([*needed, *arguments])
    device = torch.device("cpu")
    check_optimizer(config, device)
    optimizer = build_optimizer(nn.Linear(2, 2), config.optimizer)
    build_comm_hook(config.comm, Ranks(0, 2, device, None), optimizer)
    make_growth(config.growth, Setting(seed=0, total_steps=10, layers=2, max_seq_length=8))


def show_imports() -> None:
    """Prints which methods each choice imports."""
    import bert_unpad.pretrain.pretrain  # noqa: F401  # the whole trainer

    found = {}
    for name in ("", *CHOICES):
        _build(CHOICES[name])
        modules = {x for x in sys.modules if x.startswith("bert_unpad.experimental")}
        found.setdefault(name, sorted({x.partition("experimental")[2][1:] for x in modules}))
        for module in modules:
            del sys.modules[module]
    print(json.dumps(found))


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """The modules of `bert_unpad.experimental` that a run imports, by what it chooses."""
    code = "from tests.experimental.test_fence import show_imports; show_imports()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("choice", ["", "none by its path"])
def test_other_runs_import_nothing_of_them(imported, choice):
    assert imported[choice] == []


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_run_imports_the_method_that_it_chooses(imported, method):
    assert {module.partition(".")[0] for module in imported[method]} - {""} == {method}


def test_only_tables_name_them():
    names = re.compile("|".join(METHODS))
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if names.search(path.read_text()) and PACKAGE / "experimental" not in path.parents
    }
    assert found == TABLES


def test_no_recipe_uses_them():
    for path in CONFIGS.glob("*.yaml"):
        assert not any(method in path.read_text() for method in METHODS), path.name


def test_importing_the_package_imports_no_method():
    code = "import sys, bert_unpad.experimental as x; print(len(x.__all__), *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    count, *modules = done.stdout.split()
    assert int(count) > 0
    assert [x for x in modules if x.startswith("bert_unpad.experimental.")] == []


def test_every_public_name_leads_somewhere():
    import bert_unpad.experimental

    for name in bert_unpad.experimental.__all__:
        assert getattr(bert_unpad.experimental, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = bert_unpad.experimental.Nothing
