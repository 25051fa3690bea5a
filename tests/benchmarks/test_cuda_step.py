"""The sum of a BERT-large step: the page is today's, and the sum that of its parts."""

import re

import pytest

from benchmarks import cuda_step
from gpu_model.sm.architectures import H100
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "development" / "cuda-step.md"


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
