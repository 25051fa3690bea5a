"""The documents: links, paths and commands exist, and tables are those of the results."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.lib import report, speed_tables
from tests.support.paths import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("gpu_model/*.md")])
RESULTS = report.RESULTS
# Paths that a page names in backticks are looked for in the checkout.
FOLDERS = (
    "benchmarks|bert_unpad|build_backend|configs|csrc|docs|examples|gpu_model|launch|scripts|tests"
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def broken_link(page: Path, link: str) -> str | None:
    """What is wrong with a relative link of a page."""
    target, _, anchor = link.partition("#")
    path = (page.parent / target).resolve() if target else page
    if not path.exists():
        return f"{link}: there is no {target}"
    if anchor and anchor not in anchors(path):
        return f"{link}: {name_of(path)} has no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    relative = [link for link in links if not re.match(r"[a-z]+:", link)]
    problems = [broken_link(page, link) for link in relative]
    assert [problem for problem in problems if problem] == []


def test_pages_that_code_names_exist():
    files = [
        *ROOT.glob("bert_unpad/**/*.py"),
        *ROOT.glob("configs/*.yaml"),
        *ROOT.glob("csrc/**/*.[hc]*"),
    ]
    named = {(name_of(f), p) for f in files for p in re.findall(r"docs/[\w/-]+\.md", f.read_text())}
    assert [pair for pair in sorted(named) if not (ROOT / pair[1]).exists()] == []


def test_docstrings_read_alone():
    """An editor shows them without the line before, so they do not continue a sentence."""
    dangling = re.compile(r"(And|As|At|Between|By|From|In|Its|Of|On|Or|Than|That|Within)\b")
    found = []
    for file in ROOT.glob("bert_unpad/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            lines = node.body if isinstance(getattr(node, "body", None), list) else []
            for before, line in pairwise([None if isinstance(node, ast.Module) else node, *lines]):
                match line:
                    case ast.Expr(ast.Constant(str(text))) if before and dangling.match(text):
                        found.append(f"{name_of(file)}:{line.lineno}: {text.splitlines()[0]}")
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_in_backticks_exist(page):
    if page.name == "CHANGELOG.md":
        return  # it may name what was there once
    paths = re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", prose(page))
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_benchmarks_that_are_named_exist(page):
    names = re.findall(r"python -m benchmarks\.(\w+)", page.read_text())
    missing = [name for name in names if not (ROOT / "benchmarks" / f"{name}.py").exists()]
    assert missing == []


def test_tables_are_those_of_the_results():
    command = [sys.executable, "-m", "benchmarks.tables", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", ["date", "commit", "machine"])
def test_results_without_a_date_a_commit_or_a_machine_are_refused(missing, monkeypatch, tmp_path):
    result = {"date": "2026-01-01", "commit": "0123abc", "machine": {"cpu": "some"}}
    monkeypatch.setattr(report, "RESULTS", tmp_path / "cpu")
    monkeypatch.setattr(sys, "argv", ["benchmarks/tables.py", "--check"])
    path = tmp_path / "some-gpu" / "ops.json"
    path.parent.mkdir()
    path.write_text(json.dumps(result))
    assert report.undated_files() == []
    path.write_text(json.dumps(result | {missing: None}))
    with pytest.raises(SystemExit, match=f"some-gpu/ops.json: {missing}$"):
        tables.main()


def test_a_log_of_steps_has_a_date_and_a_commit_in_each():
    steps = {"build": {"date": "2026-01-01", "commit": "0123abc"}, "tests": {"date": "2026-01-01"}}
    assert report.undated({"info": None, "steps": steps}) == ["commit of tests"]


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 125
    assert "GPU" in lines[2]  # the status comes first


@pytest.fixture
def written(monkeypatch, tmp_path):
    """Writes results, the only ones that the tables find."""

    def write(**results: report.Result) -> None:
        for name, result in results.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(result))

    monkeypatch.setattr(report, "RESULTS", tmp_path)
    return write


def results_of(*names: str) -> Iterator[report.Result]:
    return (json.loads((RESULTS / f"{name}.json").read_text()) for name in names)


def test_shares_of_a_peak_need_a_sound_peak(written):
    """A step's shares are shown only where its peak is about that of the operators."""
    step, ops = results_of("model", "ops")
    cpu = ops["machine"]["cpu"]
    for rate, shown in ((0.9, False), (1.0, True)):
        step["matmul_peak"]["float32"] = rate * ops["matmul_peak"]["float32"]
        step["machine"]["cpu"] = cpu
        written(model=step, ops=ops)
        assert ("of matmul peak" in speed_tables.pretraining_step()) == shown
    step["machine"]["cpu"] = "another CPU"
    written(model=step)
    assert "of matmul peak" not in speed_tables.pretraining_step()
    # The operators of that CPU are in a file of their own.
    ops["machine"]["cpu"] = "another CPU"
    written(ops_other=ops)
    assert "of matmul peak" in speed_tables.pretraining_step()


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("ops", speed_tables.operators),
        ("model", speed_tables.pretraining_step),
        ("versions", speed_tables.versions),
        ("hf", speed_tables.hugging_face),
    ],
)
def test_results_of_a_second_cpu_stand_beside(name, section, written):
    """Each with its own table and source, that without a suffix first."""
    first, second = results_of(name, name)
    written(**{name: first})
    alone = section()
    second["machine"]["cpu"] = "CPU of a second machine"
    # Results of something else.
    others = {f"{name}2": second, f"more_{name}": second}
    written(**{f"{name}_amd": second}, **others)
    both = section()
    assert both.startswith(alone)
    assert both.count("Measured on") == both.count("| --- |") == 2
    assert f"CPU of a second machine, {second['machine']['cores']} cores" in both[len(alone) :]
    assert f"[{name}_amd.json]" in both[len(alone) :]


def test_a_second_cpu_s_setup_is_told_where_it_differs(written):
    step, versions = results_of("model", "versions")
    written(model=step, versions=versions)
    sections = (speed_tables.pretraining_step, speed_tables.versions)
    before = [section() for section in sections]
    step["dropout"], versions["earlier"] = 0.25, "0123abc"
    written(model_amd=step, versions_amd=versions)
    for section, alone, said in zip(sections, before, ("dropout 0.25", "0123abc"), strict=True):
        text = section()
        assert said not in text[: len(alone)]
        assert said in text[len(alone) :]


def test_the_quickstart_says_what_its_record_says():
    record = json.loads((ROOT / "benchmarks/results/cpu/quickstart.json").read_text())
    learned = f"{record['held_out']['mlm_accuracy']:.0%}".replace("%", " %")
    least = f"{record['most_frequent_token_rate']:.0%}".replace("%", " %")
    readme = (ROOT / "README.md").read_text()
    assert f"gets {learned} of the masked tokens" in readme
    assert f"(always the most frequent token: {least};" in readme
    recipe = (ROOT / "configs" / "quickstart.yaml").read_text()
    assert f"It ends with {learned} of the masked tokens" in recipe
    shortest, longest = re.search(r"(\d+) to (\d+) seconds of training", recipe).groups()
    assert int(shortest) <= record["seconds"] <= int(longest)


def test_a_single_operator_is_not_in_the_table(written):
    (ops,) = results_of("ops")
    written(ops=ops)
    alone = speed_tables.operators()
    written(ops_gelu=ops | {"op": "gelu"})
    assert speed_tables.operators() == alone


def test_results_that_are_missing_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert tables.page().count("\n## ") == 1  # what has no table
    assert "compared with" in tables.summary()
