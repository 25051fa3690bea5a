"""What goes with what: rows that can be broken, errors that name both sides, and the page."""

from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import pytest

from bert_unpad.pretrain.config import ConfigError, PretrainConfig
from bert_unpad.pretrain.config.limits import GRAPHS_ON_RANKS, LIMITS, Limit, Values
from bert_unpad.pretrain.config.options import find_options
from tests.support.limit_table import PAGE, written

OPTIONS = {option.name: option.type for option in find_options(PretrainConfig)}
# Values of options whose type does not list them.
SAMPLES = (None, False, True, 0, 0.1, 0.25, 0.5, 1, 8, 1e6, "mt_dao", "onebit_adam", "bert-base")


def _values(name: str) -> list[Any]:
    kinds = (OPTIONS[name], *get_args(OPTIONS[name]))
    listed = [x for kind in kinds if get_origin(kind) is Literal for x in get_args(kind)]
    return [*listed, {"wikipedia:simple": 1.0}, "auto", "stream:x", *SAMPLES]


def _find(name: str, values: Values, wanted: bool) -> Any:
    """A value that an option may have in a configuration, and that is, or is not, one of some."""
    for value in _values(name):
        try:
            if values.hold(value) == wanted:
                return value
        except (AttributeError, TypeError):  # of another type
            continue
    raise AssertionError(f"no value of {name} is, or is not, {values.text}")


def _with(config: PretrainConfig, name: str, value: Any) -> PretrainConfig:
    section, dot, key = name.rpartition(".")
    if not dot:
        return replace(config, **{name: value})
    return replace(config, **{section: replace(getattr(config, section), **{key: value})})


@pytest.mark.parametrize(
    "limit", [*LIMITS, *GRAPHS_ON_RANKS], ids=lambda x: f"{'+'.join(x.given)}-{x.option}"
)
def test_an_error_names_both_options_and_what_would_work(limit: Limit):
    config = PretrainConfig()
    for name, values in limit.given.items():
        config = _with(config, name, _find(name, values, wanted=True))
    limit.check(_with(config, limit.option, _find(limit.option, limit.allowed, wanted=True)))
    broken = _with(config, limit.option, _find(limit.option, limit.allowed, wanted=False))
    with pytest.raises(ConfigError) as raised:
        limit.check(broken)
    message = str(raised.value)
    assert message.startswith(f"{limit.option}: expected {limit.allowed.text} with ")
    assert all(name in message for name in limit.given)


def test_the_page_lists_the_rows():
    assert PAGE.read_text() == written(), "write it: python -m tests.support.limit_table"
