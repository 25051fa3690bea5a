"""What benchmarks.convergence makes of the runs that it keeps."""

import json

import pytest

from benchmarks import convergence
from benchmarks.lib.convergence_tables import NO_DIFFERENCE, compared, rows_of


@pytest.fixture
def keep(tmp_path):
    """Writes a run as the benchmark keeps it."""

    def write(name: str, seed: int, loss: float | None) -> None:
        run = {"seed": seed, "mlm_loss": loss, "mlm_accuracy": loss and 0.3}
        run |= {"clipped_share": 1.0, "training_loss": [5.0]}
        convergence.Testbed(tmp_path, 1).path(name, seed).write_text(json.dumps(run))

    return write


def test_what_is_inside_the_spread_is_no_difference(keep, tmp_path):
    for seed, loss in enumerate((4.0, 4.02, 4.04)):
        keep("plain", seed, loss)
    keep("start", 0, 4.5)
    keep("1-bit Adam", 0, 4.03)
    keep("0/1 Adam", 0, 4.03)
    keep("0/1 Adam", 1, 4.13)
    keep("none", 0, None)
    found = {"tables": convergence.collect(tmp_path)}
    assert compared(found, "1-bit Adam") == NO_DIFFERENCE
    assert compared(found, "0/1 Adam") == "+0.070"
    assert compared(found, "none") == "diverged"
    assert rows_of(found)["0/1 Adam"]["mlm_loss_of_seeds"] == [4.03, 4.13]


def test_optimizers_are_compared_by_their_best_rate(keep, tmp_path):
    low, middle, high = convergence.rates_of("AdamW")
    keep("plain", 0, 4.0)
    for rate, loss in ((low, 4.3), (middle, 4.2), (high, None)):
        keep(f"AdamW, lr {rate:g}", 0, loss)
    keep(f"AdamW, lr {middle:g}", 1, 4.22)
    keep(f"LAMB, lr {convergence.rates_of('LAMB')[0]:g}", 0, 4.1)
    found = {"tables": convergence.collect(tmp_path)}
    adam = rows_of(found)["AdamW"]
    assert adam["mlm_loss_of_seeds"] == [4.2, 4.22]
    assert adam["mlm_loss_of_rates"] == {f"{low:g}": 4.3, f"{middle:g}": 4.2, f"{high:g}": None}
    assert compared(found, "LAMB") == "-0.100"


def test_contenders_have_names_of_their_own():
    names = [name for contenders in convergence.TABLES.values() for name in contenders]
    assert len({convergence.PLAIN, convergence.START, *names}) == len(names) + 2
