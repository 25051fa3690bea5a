"""The GPU benchmarks of operators that memory limits, as far as they run without a GPU."""

import json

import pytest
import torch

from benchmarks.lib import cuda_gelu, cuda_loss, cuda_mlp, cuda_norm, memory_bound
from benchmarks.lib.memory_bound import OURS, Case, Contender, by_autograd


@pytest.mark.parametrize(
    ("module", "count"), [(cuda_gelu, 2), (cuda_loss, 1), (cuda_mlp, 6), (cuda_norm, 4)]
)
def test_a_rehearsal_gives_a_whole_report(module, count: int, capsys) -> None:
    report = memory_bound.run(module.cases, "cpu", rounds=2, seed=1)
    assert json.loads(json.dumps(report)) == report
    assert len(report["results"]) == count
    for row in report["results"]:
        assert row["not_run"] == {}
        for which in ("forward", "backward", "both"):
            contenders = row["passes"][which]["contenders"]
            assert contenders.keys() == row["errors"].keys()
            assert contenders[OURS]["times_of_ours"] == 1.0
            assert all(result["ms"] > 0 for result in contenders.values())
    assert "torch.compile" in capsys.readouterr().out


def test_bytes_are_those_of_operands_and_results() -> None:
    for case in cuda_gelu.cases("cpu"):
        assert case.bytes == {"forward": 2 * 32 * 64 * 2, "backward": 3 * 32 * 64 * 2}
    for case in cuda_loss.cases("cpu"):
        assert case.bytes == {"forward": 16 * 96 * 2, "backward": 2 * 16 * 96 * 2}
    for case in cuda_norm.cases("cpu"):
        size, dropout = 32 * 64 * 2, "dropout 0.1" in case.name
        assert case.bytes == {"forward": 3 * size, "backward": (5 if dropout else 4) * size}


def _case(peer) -> Case:
    x, dy = torch.randn(4, 8), torch.randn(4, 8)
    ours = by_autograd(torch.tanh, [x], dy)
    return Case("tanh", {"forward": 1, "backward": 1}, {OURS: lambda: ours, "peer": peer}, ours)


def test_a_wrong_contender_is_found() -> None:
    x, dy = torch.randn(4, 8), torch.randn(4, 8)
    entered, _, missing = memory_bound.enter(_case(lambda: by_autograd(torch.sin, [x], dy)))
    assert list(entered) == [OURS]
    assert "wrong result" in missing["peer"]
    nan = by_autograd(lambda x: x * torch.nan, [x], dy)
    assert "wrong result" in memory_bound.enter(_case(lambda: nan))[2]["peer"]


def test_a_contender_that_does_not_run_says_why() -> None:
    def fails():
        raise RuntimeError("no such kernel")

    _, _, missing = memory_bound.enter(_case(lambda: Contender(fails, fails)))
    assert missing == {"peer": "no such kernel"}
    case = Case("c", {}, {OURS: fails}, _case(fails).reference)
    with pytest.raises(SystemExit, match="our own 'bert_unpad' does not run: no such kernel"):
        memory_bound.enter(case)
