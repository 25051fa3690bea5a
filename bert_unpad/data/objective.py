"""What a model may learn, and which examples that needs."""

from typing import Literal

Objective = Literal["mlm_nsp", "mlm", "mlm_sop", "rtd"]
"""`data.objective`."""
Documents = Literal["apart", "joined"]
"""`data.documents`."""
SecondSegment = Literal["next_or_random", "in_order_or_swapped"]

SECOND_SEGMENTS: dict[Objective, SecondSegment | None] = {
    "mlm_nsp": "next_or_random",
    "mlm": None,
    "mlm_sop": "in_order_or_swapped",
    "rtd": None,
}
"""What the second segment of an example is; None: examples have one segment."""
