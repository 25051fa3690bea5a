"""The packages of docs/architecture.md: all are drawn; imports and includes go downwards only."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import CSRC, ROOT

PYTHON = ("bert_unpad", "benchmarks", "examples", "gpu_model", "tests")
COMPILED = ("_C", "_C_cuda", "_balancer", "_text")
GROUND = (
    "common",
    "cpu",
    "cuda",
    "balancer",
    "host",
    "text",
    "encoder",
)  # folders of csrc; all others are families

Arrow = tuple[str, str]


def diagram() -> dict[str, list[str]]:
    """Every line of the list in docs/architecture.md, from the top down."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"^```text\n(.*?)^```", text, re.M | re.S).group(1)
    lines = (line.partition("->") for line in block.splitlines())
    return {name.strip(): re.findall(r"[^\s,]+", to) for name, _, to in lines}


def package_of(module: str) -> str | None:
    """The name in the diagram of a module; None for private modules and what is not ours."""
    top, _, rest = module.partition(".")
    if top != "bert_unpad":
        return top if top in PYTHON else None
    inner = rest.split(".")[0]
    return None if inner.startswith("_") and inner not in COMPILED else inner or None


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def python_arrows() -> dict[Arrow, str]:
    """Every import between packages, with a file that has it."""
    found = {}
    for folder in PYTHON:
        for path in sorted(ROOT.glob(f"{folder}/**/*.py")):
            name = str(path.relative_to(ROOT))
            source = package_of(name.removesuffix(".py").replace("/", "."))
            for module in imported_by(path):
                target = package_of(module)
                if source and target and source != target and not is_name(target):
                    found.setdefault((source, target), name)
    return found


def is_name(target: str) -> bool:
    """Whether `bert_unpad` itself has that name, e.g. __version__."""
    inner = ROOT / "bert_unpad" / target
    return not (
        target in (*COMPILED, *PYTHON) or inner.exists() or inner.with_suffix(".py").exists()
    )


def folder_of(path: str) -> str:
    folder = path.split("/")[0]
    return f"csrc/{folder if folder in GROUND else 'families'}"


def include_arrows() -> dict[Arrow, str]:
    """Every include between the layers of csrc, with a file that has it.

    The files right in csrc put the compiled modules together, so they may include anything.
    """
    found = {}
    for root, source_of in ((CSRC, folder_of), (ROOT / "gpu_model", lambda path: "gpu_model")):
        for path in sorted(root.rglob("*.*")):
            if path.suffix not in (".h", ".cpp", ".cu", ".cuh") or path.parent == CSRC:
                continue
            source = source_of(str(path.relative_to(root)))
            for name in re.findall(r'#include "([^"]+)"', path.read_text()):
                target = folder_of(name) if (CSRC / name).is_file() else source
                if target != source:
                    found.setdefault((source, target), str(path.relative_to(ROOT)))
    return found


def test_every_package_is_drawn():
    inner = (path for path in (ROOT / "bert_unpad").iterdir() if not path.name.startswith("_"))
    packages = {p.stem for p in inner if (p / "__init__.py").exists() or p.suffix == ".py"}
    folders = {f"csrc/{name}" for name in GROUND} | {"csrc/families"}
    assert set(diagram()) == packages | folders | (set(PYTHON) - {"bert_unpad"}) | set(COMPILED)


def test_imports_and_includes_go_downwards():
    order = {name: number for number, name in enumerate(diagram())}
    arrows = python_arrows() | include_arrows()
    upwards = {
        f"{source} -> {target}: {where}"
        for (source, target), where in arrows.items()
        if order[source] > order[target]
    }
    assert upwards == set()


def test_a_family_includes_no_other_family():
    others = set()
    for path in sorted(CSRC.glob("*/*.*")):
        family = path.parent.name
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            if family not in GROUND and name.split("/")[0] not in (family, *GROUND):
                others.add(f"{path.relative_to(CSRC)} includes {name}")
    assert others == set()


def test_every_arrow_drawn_exists():
    drawn = {(source, target) for source, targets in diagram().items() for target in targets}
    assert drawn - set(python_arrows() | include_arrows()) == set()


def test_a_method_that_no_recipe_uses_imports_no_other():
    root, others = ROOT / "bert_unpad" / "experimental", set()
    for path in sorted(root.rglob("*.py")):
        method = path.relative_to(root).parts[0].removesuffix(".py")
        for module in imported_by(path):
            _, found, target = module.partition("bert_unpad.experimental.")
            if found and target.partition(".")[0] != method:
                others.add(f"{path.relative_to(root)} imports {module}")
    assert others == set()


def test_no_fixed_time_limit_decides_a_test():
    """A busy or emulated machine needs many times longer: limits scale with its measured speed."""
    waits = r"\.(?:acquire|communicate|join|poll|result)\([\d.]+\)|(?:monotonic|time)\(\) \+ \d"
    fixed = re.compile(rf"\btimeout=[\d.]+[,)]|\btime\.sleep\(\d{{2,}}|{waits}")
    files = sorted(ROOT.glob("tests/**/*.py"))
    assert [path.name for path in files if fixed.search(path.read_text())] == []


# Of whose folders and modules none may need, itself or through others, one that needs it.
INNER = ("batch", "costs", "data", "distributed", "experimental", "flash", "ops", "optim", "plan")
INNER += ("pretrain",)


@pytest.mark.parametrize("package", INNER)
def test_nothing_in_a_package_imports_in_a_circle(package):
    root = ROOT / "bert_unpad" / package
    needs: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        source = path.relative_to(root).with_suffix("").parts[0]
        for module in imported_by(path):
            target = module.removeprefix(f"bert_unpad.{package}.").partition(".")[0]
            inner = (root / target).is_dir() or (root / f"{target}.py").is_file()
            if module.startswith(f"bert_unpad.{package}.") and inner and target != source:
                needs.setdefault(source, set()).add(target)
    while ends := {target for targets in needs.values() for target in targets} - needs.keys():
        needs = {source: targets - ends for source, targets in needs.items()}
        needs = {source: targets for source, targets in needs.items() if targets}
    assert not needs  # what is in circles, or needs what is
