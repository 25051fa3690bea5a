"""What goes with what: a row for each option that limits another one.

`check_rules` goes through the rows, and the tables in docs/training/combinations.md are written
from them. A further value of an option declares here what it needs; no other file compares it.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bert_unpad._choices import COMMUNICATING, ONE_BIT
from bert_unpad.data.prepared import is_streamed
from bert_unpad.pretrain.config.communication import MODELS_DIFFER, CommConfig
from bert_unpad.pretrain.config.errors import ConfigError
from bert_unpad.pretrain.config.growth import GrowthConfig
from bert_unpad.pretrain.config.model import ModelConfig
from bert_unpad.pretrain.config.update import ScheduleConfig

if TYPE_CHECKING:
    from bert_unpad.pretrain.config.run import PretrainConfig

_FP16_MAX = 65504


class Values(NamedTuple):
    """Values of an option, and how an error describes them."""

    text: str
    hold: Callable[[Any], bool]


@dataclass(frozen=True)
class Limit:
    """What an option may be where other options have certain values."""

    given: Mapping[str, Values]
    option: str
    allowed: Values
    why: str = ""
    """A clause about the options given."""

    def check(self, config: PretrainConfig) -> None:
        """Checks a configuration.

        Raises:
            ConfigError: the option has another value, with what was given; both are named.
        """
        given = {name: operator.attrgetter(name)(config) for name in self.given}
        value = operator.attrgetter(self.option)(config)
        if self.allowed.hold(value) or not all(self.given[x].hold(y) for x, y in given.items()):
            return
        named = " and ".join(
            name if self.given[name] is _GIVEN else f"{name} {_word(other)}"
            for name, other in given.items()
        )
        why = f", {self.why}" if self.why else ""
        raise ConfigError(
            self.option, f"expected {self.allowed.text} with {named}{why}, got {_word(value)}"
        )


def _word(value: Any) -> str:
    """A value as YAML has it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _list(values: Iterable[Any]) -> str:
    *most, last = map(_word, values)
    return f"{', '.join(most)} or {last}" if most else last


def _is(*values: Any) -> Values:
    return Values(_list(values), lambda value: value in values)


def _not(*values: Any) -> Values:
    return Values(f"another than {_list(values)}", lambda value: value not in values)


def _at_least(low: int) -> Values:
    return Values(f"a number >= {low}", lambda value: value >= low)


_ON, _OFF, _NULL = _is(True), _is(False), _is(None)
_GIVEN = Values("given", lambda value: value is not None)
_NUMBER = _GIVEN._replace(text="a number")
_ABOVE_0 = Values("a number > 0", lambda value: value > 0)


def _with(
    given: Mapping[str, Values], *needs: tuple[str, Values] | tuple[str, Values, str]
) -> Iterator[Limit]:
    """Rows for all that some options need."""
    return (Limit(given, *need) for need in needs)


def _one_of_two(first: str, second: str) -> tuple[Limit, Limit]:
    """Rows for two options of which exactly one is given."""
    return (
        Limit({first: _GIVEN}, second, _NULL, "which says the same"),
        Limit({second: _NULL}, first, _NUMBER),
    )


def _read_with(name: str, section: type, readers: Mapping[str, tuple[str, ...]]) -> Iterator[Limit]:
    """Rows for options that have their default unless another option has one of some values."""
    for option, values in readers.items():
        default = getattr(section, option.rpartition(".")[2])
        yield Limit({name: _not(*values)}, option, _is(default), "which does not read it")


_SHARED = {"optimizer.shard": _not("none")}
_IN_PASSES = {"optimizer.shard": _is("overlap", "fsdp")}
_FSDP = {"optimizer.shard": _is("fsdp")}
_GROWS = {"growth.name": _not("none")}
_ADDS_LAYERS = {"growth.name": _is("mslt", "stacking")}
_LOCAL = {"comm.hook": _is(*MODELS_DIFFER)}
_PER_RANK = _is("bucket", "before")
_PLAIN_HOOKS = _is("allreduce", "hierarchical")

LIMITS: tuple[Limit, ...] = (
    *_one_of_two("batching.global_batch_size", "batching.batch_size_per_rank"),
    *_one_of_two("schedule.total_steps", "schedule.epochs"),
    Limit({"schedule.warmup_steps": _GIVEN}, "schedule.warmup_share", _NULL, "which says the same"),
    *_read_with(
        "schedule.name",
        ScheduleConfig,
        {
            "schedule.power": ("polynomial",),
            "schedule.decay_share": ("wsd",),
            "schedule.end_lr_share": ("polynomial", "linear", "cosine", "wsd"),
            "schedule.decay_from": ("polynomial", "linear", "cosine"),
        },
    ),
    # Batches.
    Limit({"batching.warmup_batch_size": _GIVEN}, "batching.warmup_steps", _NUMBER),
    *_with(
        {"batching.warmup_steps": _GIVEN},
        ("batching.warmup_batch_size", _NUMBER),
        ("schedule.total_steps", _NUMBER, "where epochs have unequal numbers of updates"),
    ),
    *_with(
        {"batching.rank_speeds": _GIVEN, "batching.strategy": _is("exchange")},
        ("batching.scope", _is("node", "world", "two_level")),
    ),
    *_with(
        {"batching.rank_speeds": _GIVEN},
        ("cuda_graphs", _OFF, "since graphs have one number of sequences"),
    ),
    # Clipping.
    Limit({"clip.mode": _PER_RANK}, "clip.max_norm", _ABOVE_0),
    *_with(
        {"clip.wire_dtype": _is("fp16")},
        ("clip.mode", _PER_RANK, "which needs a bound"),
        (
            "clip.max_norm",
            Values(f"at most {_FP16_MAX}", lambda value: value <= _FP16_MAX),
            "which holds no greater number",
        ),
    ),
    Limit({"clip.wire_dtype": _is("fp32")}, "clip.error_feedback", _OFF, "which loses nothing"),
    *_with(
        {"clip.mode": _is("before")},
        ("clip.error_feedback", _OFF),
        ("comm.bucket_mb", _NULL, "which has one bucket"),
        ("comm.hook", _PLAIN_HOOKS, "which does its own averaging"),
    ),
    # Comm hooks.
    *_with(
        {"comm.hook": _is("power_sgd", "dream_ddp", "gradient_flow")},
        ("clip.wire_dtype", _is("fp32")),
    ),
    *_read_with("comm.hook", CommConfig, {"comm.guarantee": ("auto",)}),
    *_with(
        {"comm.hook": _is("auto")},
        ("clip.wire_dtype", _is("fp32"), "which chooses it"),
        ("comm.local_sgd_group", _NULL, "which averages gradients within machines"),
        ("optimizer.shard", _is("none"), "whose ranks make whole updates"),
        ("optimizer.overlap", _OFF, "which times updates by themselves"),
        ("optimizer.name", _not(*COMMUNICATING), "whose gradients travel"),
        ("compile", _OFF, "which wraps the model again when it changes"),
        ("data.objective", _not("rtd"), "which measures passes of one encoder"),
    ),
    *_with(
        _LOCAL,
        ("optimizer.shard", _is("none"), "with which ranks update models apart"),
        ("optimizer.overlap", _OFF, "which averages models after updates"),
    ),
    # Optimizers.
    *_with(
        {"optimizer.name": _is(*ONE_BIT)},
        ("comm.start", _at_least(1), "which needs a variance before it compresses"),
    ),
    *_with(
        {"optimizer.name": _is("muon", *COMMUNICATING)},
        ("optimizer.shard", _is("none"), "whose state is not shared out"),
    ),
    # Updates that ranks share out.
    Limit(_SHARED, "optimizer.overlap", _OFF, "whose ranks send each other updated weights"),
    *_with(
        _IN_PASSES,
        (
            "clip.mode",
            _is("bucket", "after", "none"),
            "which sends gradients before the whole gradient is there",
        ),
        ("comm.hook", _is("allreduce"), "which averages without DDP"),
        ("growth.name", _is("none"), "whose buckets do not change"),
        ("cuda_graphs", _OFF, "whose exchanges run between modules"),
        ("compile", _OFF, "whose exchanges run between modules"),
        (
            "batching.rank_speeds",
            Values("numbers or null", lambda value: value != "auto"),
            "where ranks wait for each other as they compute",
        ),
    ),
    *_with(
        _FSDP,
        ("comm.bucket_mb", _NULL, "whose buckets are the encoder's layers"),
        ("clip.wire_dtype", _is("fp32", "bf16"), "which averages in it"),
        ("clip.error_feedback", _OFF, "which casts gradients itself"),
    ),
    Limit(_FSDP | {"clip.mode": _is("bucket")}, "clip.policy", _is("equal")),
    # Growth.
    *_read_with(
        "growth.name",
        GrowthConfig,
        {
            "growth.layers": ("mslt", "stacking"),
            "growth.lengths": ("lengths",),
            "growth.shares": ("mslt", "stacking", "lengths"),
            "growth.joint_share": ("mslt",),
            "growth.learning_rate": ("mslt", "stacking", "lengths"),
        },
    ),
    *_with(
        {"growth.name": _is("lengths")},
        ("growth.lengths", _GIVEN._replace(text="numbers such as [128, 512]")),
    ),
    *_with(
        _GROWS,
        ("schedule.total_steps", _NUMBER),
        ("comm.hook", _is("allreduce")),
        ("optimizer.name", _not(*COMMUNICATING), "between whose stages parameters change"),
        ("cuda_graphs", _OFF, "between whose stages layers change"),
    ),
    *_with(
        {"growth.name": _is("layer_drop")},
        ("compile", _OFF, "whose every choice of layers would be compiled"),
    ),
    *_with(
        _ADDS_LAYERS,
        (
            "model.preset",
            Values("no folder with weights", lambda value: ModelConfig(value).weights is None),
        ),
        ("optimizer.shard", _is("none"), "between whose stages parameters change"),
    ),
    # Passes.
    *_with(
        {"compile": _ON},
        ("cuda_graphs", _OFF),
        ("optimizer.overlap", _OFF, "which takes layers together"),
        ("amax_history", _NULL),
    ),
    *_with(
        {"cuda_graphs": _ON},
        ("attention_schedule", _is("list"), "which replay the launches of another batch"),
    ),
    Limit({"precision": _not("fp8")}, "amax_history", _NULL, "which does not read it"),
    # Data.
    *_read_with("data.objective", ModelConfig, {"model.generator_share": ("rtd",)}),
    *_with(
        {"data.objective": _is("rtd")},
        ("cuda_graphs", _OFF, "which draws tokens in the middle of a pass"),
        ("growth.name", _is("none", "lengths"), "of whose two encoders stages would change one"),
    ),
    *_with(
        {"data.source": Values("a stream", is_streamed)},
        ("batching.strategy", _is("exchange"), "which has no index of lengths"),
        ("schedule.total_steps", _NUMBER, "whose length is not known"),
    ),
    *_with(
        {"data.mixture": _GIVEN},
        ("batching.strategy", _not("packed"), "whose epochs have different examples"),
    ),
    # Evaluations and logs.
    Limit({"evaluation.target_accuracy": _GIVEN}, "evaluation.examples", _ABOVE_0),
    *_with(
        {"evaluation.every_samples": _GIVEN},
        (
            "batching.strategy",
            _is("stratified", "random", "exchange"),
            "which counts on as many sequences in each update",
        ),
        ("batching.warmup_batch_size", _NULL, "which counts on as many sequences in each update"),
    ),
    Limit({"logging.mlperf_submission": _GIVEN}, "logging.mlperf", _GIVEN._replace(text="a file")),
    *_with(
        {"logging.mlperf": _GIVEN},
        ("evaluation.target_accuracy", _NUMBER),
        ("schedule.total_steps", _NUMBER),
    ),
)
"""What any run has to keep to."""

GRAPHS_ON_RANKS: tuple[Limit, ...] = tuple(
    _with(
        {"cuda_graphs": _ON},
        # The other hooks need DDP, or move weights to memory that no graph reads.
        ("comm.hook", _PLAIN_HOOKS, "which several ranks average without DDP"),
        ("optimizer.name", _not(*COMMUNICATING), "whose gradients several ranks average"),
    )
)
"""What a run with several ranks has to keep to as well."""
