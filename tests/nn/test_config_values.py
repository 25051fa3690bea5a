"""A config.json with a value of another type: a ValueError that names a field, or it is taken."""

import pytest

from bert_unpad.nn import PRESETS, EncoderConfig
from bert_unpad.nn.families import FAMILIES

STRANGE = (5, -1, 1.5, "x", True, None, [], [["x"]], ["x"], [3], {}, {"x": 1})


def config_json(family: str) -> dict:
    """Of the smallest preset of a family, with all fields."""
    preset = next(
        values for values in PRESETS.values() if values.get("model_type", "bert") == family
    )
    return EncoderConfig(**preset).to_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_other_types(family: str) -> None:
    values = config_json(family)
    more = ("architectures", "rope_scaling", "rope_parameters", "layer_types", "sliding_window")
    messages = []
    for name in sorted({*values, *more} - {"model_type"}):
        for strange in STRANGE:
            try:
                EncoderConfig.from_dict(values | {name: strange})
            except ValueError as error:
                messages.append(str(error))
    assert len(messages) > 3 * len(values)
    assert [x for x in messages if ": expected" not in x] == []
