"""The table of docs/training/combinations.md; `python -m tests.support.limit_table` writes it."""

from bert_unpad.pretrain.config.limits import GRAPHS_ON_RANKS, LIMITS, Limit
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "training" / "combinations.md"
BEGIN = "<!-- written by python -m tests.support.limit_table -->\n"


def _row(limit: Limit) -> str:
    given = " and ".join(f"`{name}` {values.text}" for name, values in limit.given.items())
    return f"| {given} | `{limit.option}` | {limit.allowed.text} | {limit.why} |\n"


def written() -> str:
    """The page with a table of all rows."""
    head = "| with | this option | must be | why |\n|---|---|---|---|\n"
    rows = "".join(map(_row, (*LIMITS, *GRAPHS_ON_RANKS)))
    return PAGE.read_text().partition(BEGIN)[0] + BEGIN + head + rows


if __name__ == "__main__":
    PAGE.write_text(written())
