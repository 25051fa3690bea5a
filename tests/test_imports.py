"""What importing the package costs: nothing that takes seconds is imported before it is used."""

import json
import subprocess
import sys

import pytest

from tests.support.processes import TIMEOUT

SLOW = {
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "matplotlib",
    "sympy",
    "transformers",
}
"""Each takes from half a second to five."""


@pytest.mark.parametrize(
    "module",
    [
        "ops",
        "nn",
        "optim",
        "distributed",
        "data.cli",
        "convert.cli",
        "simulate.cli",
        "plan.cli",
        "evaluate.cli",
        "info",
        "pretrain.main",
    ],
)
def test_an_import_loads_nothing_slow(module):
    code = f"import sys, json, bert_unpad.{module}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert SLOW.isdisjoint(json.loads(done.stdout))
