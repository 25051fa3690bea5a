"""The sum of a BERT-large step: the page is today's, and the sum that of its parts."""

import json
import re

import pytest

from benchmarks import cuda_step
from benchmarks.lib import encoder_steps
from benchmarks.lib.step_products import layers
from gpu_model.sm.architectures import H100
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "development" / "cuda-step.md"
ENCODERS = ROOT / "docs" / "development" / "encoder-steps.md"


def test_the_page_is_that_of_the_recorded_predictions():
    assert PAGE.read_text() == cuda_step.render()


def test_the_sum_is_that_of_its_parts():
    parts = list(cuda_step.parts())
    assert {"attention, forward", "attention, backward", "Adam"} <= {part.name for part in parts}
    seconds = sum(part.seconds + part.launches * H100.kernel_seconds for part in parts)
    (last,) = (line for line in PAGE.read_text().splitlines() if "**sum**" in line)
    rate, total = map(float, re.findall(r"\*\*([\d.]+)", last))
    assert total == pytest.approx(1e3 * seconds, abs=0.05)
    assert rate == pytest.approx(cuda_step.SEQUENCES / seconds, abs=0.5)


def test_what_a_gpu_measured_stands_beside_the_model(tmp_path, monkeypatch):
    """A GPU that measures just what the model takes makes the model's step."""
    tokens = sum(cuda_step.wikipedia_mix(cuda_step.SEQUENCES))
    products = [
        {
            **{"layer": layer.name, "pass": which, "dtype": dtype, "epilogue": epilogue},
            **{"flops": layer.flops, "seconds": layer.flops / cuda_step.PRODUCT_RATE / rate},
        }
        for layer in layers(tokens)
        for dtype, rate in (("bfloat16", 1), ("float8", 2))
        for which, epilogue in layer.epilogues().items()
    ]
    report = {
        **{"command": "python -m benchmarks.calibrate", "date": "2030-01-02"},
        **{"machine": {"gpu": "NVIDIA X"}, "copy": H100.dram, "sm_clock": None},
        "gaps": {"graph": H100.kernel_seconds, "launches": 1e-5},
        "products": products,
    }
    monkeypatch.setattr(cuda_step, "calibrations", lambda: [report])
    page, (modelled, _, _) = cuda_step.render(), PAGE.read_text().partition("\n## Beside what was")
    assert page.startswith(modelled)
    lines = page.removeprefix(modelled).splitlines()
    cells = {line.split(" | ")[0][2:]: line[:-2].split(" | ")[1:] for line in lines if "|" in line}
    assert "## Beside what was measured: NVIDIA X" in lines
    for name in ("matrix products, ms", "matrix products, encoder in 8 bits, ms"):
        modelled, measured = map(float, cells[name])
        assert measured == pytest.approx(modelled, rel=1e-3)
    assert cells["between kernels launched singly, us"] == ["4", "10"]
    assert cells["clock under load, GHz"] == ["1.755", "-"]
    modelled, measured = map(float, cells["a step of these, sequences/s"])
    assert measured == pytest.approx(modelled, rel=1e-3)
    assert sum("| forward | float8 | " in line for line in lines) == 14
    report["copy"] = 2 * H100.dram
    faster = re.search(r"a step of these[^\n]* ([\d.]+) \|", cuda_step.render())
    assert float(faster[1]) > 1.1 * modelled


def test_calibrations_are_found_beside_other_results(tmp_path, monkeypatch):
    for name in ("nvidia-b", "nvidia-a", "cpu"):
        (tmp_path / name).mkdir()
        file = "ops.json" if name == "cpu" else "calibrate.json"
        (tmp_path / name / file).write_text(json.dumps({"name": name}))
    monkeypatch.setattr(cuda_step, "RESULTS", tmp_path)
    assert [x["name"] for x in cuda_step.calibrations()] == ["nvidia-a", "nvidia-b"]


def test_the_page_of_other_encoders_is_that_of_the_records():
    assert ENCODERS.read_text() == encoder_steps.render(*cuda_step.encoder_records())


def test_what_was_measured_of_a_modernbert_lies_within_its_range():
    found = [
        [float(x.replace(",", "")) for x in re.findall(r"[\d,.]+", f"{span} {measured}")]
        for name, span, measured in re.findall(
            r"\| (ModernBERT-base) \|.*?\*\*(.*?)\*\* \| \S+ \| ([\d,.]+) \|", ENCODERS.read_text()
        )
    ]
    assert len(found) == 4
    assert all(low < measured < high for low, high, measured in found)


def test_layers_with_windows_take_windows():
    base = encoder_steps.ENCODERS[0]
    kinds = encoder_steps.attention_of(base, 1024)
    assert kinds == {(12, 1024, -1): 8, (12, 1024, 64): 14}
    esm = encoder_steps.attention_of(encoder_steps.ENCODERS[2], 1024)
    assert esm == {(20, 1024, -1): 33}
