"""What a row of the table of families says."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Fields of transformers' configurations for which no encoder here supports another value.
_REQUIRED = {"is_decoder": False, "add_cross_attention": False, "is_encoder_decoder": False}

_LAYER = re.compile(r"bert\.encoder\.layer\.(\d+)\.(.+)")

HfNames = str | tuple[str, ...]
"""One name, or one for each part of a tensor that Hugging Face's files hold in parts."""


# Fields of config.json that are looked into before `EncoderConfig` checks what they have become.
_TYPES: dict[str, type] = {
    **dict.fromkeys(("architectures", "layer_types"), list),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict),
    **dict.fromkeys(("num_hidden_layers", "sliding_window"), int),
    **dict.fromkeys(("max_relative_positions", "position_buckets", "max_position_embeddings"), int),
}
_OPTIONAL = ("architectures", "layer_types", "rope_parameters", "rope_scaling", "sliding_window")
_JSON_NAMES = {list: "a list of strings", dict: "an object", int: "an integer"}


def _check_types(values: Mapping[str, Any]) -> None:
    for name in values.keys() & _TYPES.keys():
        value, kind = values[name], _TYPES[name]
        if value is None and name in _OPTIONAL:
            continue
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if not fits or (kind is list and not all(isinstance(x, str) for x in value)):
            raise ValueError(f"{name}: expected {_JSON_NAMES[kind]}, got {value!r}")


@dataclass(frozen=True)
class Family:
    """A kind of model as Hugging Face stores it: its config.json and the names of its tensors.

    Our tensors are named after BERT's, in every family; a name that the row does not mention is
    the same in both.
    """

    model_type: str
    """`model_type` of config.json."""
    architectures: Mapping[str, tuple[str, ...]]
    """The heads of each of transformers' classes that this model can be saved as; the first one is
    what a config.json without such a class gets."""
    fields: Mapping[str, tuple[str, Any]]
    """For each field of `EncoderConfig` its name in config.json, and transformers' default."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `EncoderConfig` that have the same value in every model of the family."""
    rates: Mapping[str, str] = field(default_factory=dict)
    """Dropout rates of `EncoderConfig` that are always this other rate, not hidden_dropout_prob."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json of which only this value is supported."""
    read_more: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Takes what needs more than a name out of a config.json, and returns fields of
    `EncoderConfig`."""
    write_more: Callable[[Any], dict[str, Any]] | None = None
    """The reverse of `read_more`: fields of config.json for a configuration."""
    trunk: str = "bert"
    """What the tensors below the heads begin with."""
    layer: Mapping[str, HfNames] = field(default_factory=dict)
    """Names within a layer, without `.weight` and `.bias`."""
    layer_prefix: str = "{trunk}.encoder.layer.{i}"
    """What the names of layer i begin with."""
    attention_norm: str = ""
    """The name of the norm before attention, where norms come before the halves of a layer."""
    final_norm: str = ""
    """The name of the norm after the last layer, where norms come before the halves of a layer."""
    modules: Mapping[str, HfNames] = field(default_factory=dict)
    """All other names, without `.weight` and `.bias`."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Tensors that files hold twice, or only under this name, and the name that counts."""
    unused: tuple[str, ...] = ()
    """Patterns of tensors in files that no model here has, and that need no word."""

    def check_extra(self, extra: Mapping[str, Any]) -> None:
        """Raises a ValueError where a field of config.json has an unsupported value."""
        for name, value in (_REQUIRED | dict(self.required)).items():
            if extra.get(name, value) != value:
                raise ValueError(f"{name}: expected {value!r}, got {extra[name]!r}")
        if pruned := extra.get("pruned_heads"):
            raise ValueError(f"pruned_heads: expected none, got {pruned!r}")

    def check_parts(self, config: Any) -> None:
        """Raises a ValueError where config.json could not express a configuration's field."""
        own, _ = self.read(self.write(config))
        for f in dataclasses.fields(config):
            expected = own.get(f.name, f.default)
            got = getattr(config, f.name)
            if f.name == "window_pattern":
                expected, got = (_repeated(x, config.num_hidden_layers) for x in (expected, got))
            if f.name not in ("extra", "model_type", "heads") and got != expected:
                raise ValueError(
                    f"{f.name}: expected {expected!r} in a model of type {self.model_type}, got "
                    f"{got!r}"
                )
        if config.heads not in self.architectures.values():
            known = ", ".join(map(repr, self.architectures.values()))
            raise ValueError(
                f"heads: expected one of {known} in a model of type {self.model_type}, got "
                f"{config.heads!r}"
            )

    def read(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields of `EncoderConfig` from those of config.json, and what of these is left."""
        _check_types(values)
        left = {name: value for name, value in values.items() if name != "model_type"}
        own = dict(self.parts)
        classes = left.get("architectures") or ()
        found = [self.architectures[name] for name in classes if name in self.architectures]
        own["heads"] = (found or list(self.architectures.values()))[0]
        own |= self.read_more(left) if self.read_more else {}
        own |= {name: left.pop(hf, default) for name, (hf, default) in self.fields.items()}
        return own, left

    def write(self, config: Any) -> dict[str, Any]:
        """Fields of config.json, without `extra`, `model_type` and `architectures`."""
        values = {hf: getattr(config, name) for name, (hf, _) in self.fields.items()}
        return values | (self.write_more(config) if self.write_more else {})

    def architecture(self, heads: tuple[str, ...]) -> str:
        """The class of transformers that has these heads."""
        return next(name for name, known in self.architectures.items() if known == heads)

    def hf_names(self, name: str, config: Any) -> HfNames:
        """The name, or names of the parts, that Hugging Face's files have for our tensor `name`."""
        module, _, kind = name.rpartition(".")
        if config.norm_place == "pre":
            module = self._norm_before_half(module, config.num_hidden_layers)
        if inner := _LAYER.fullmatch(module):
            i, module = int(inner[1]), inner[2]
            group, layer = divmod(i, config.inner_group_num)
            prefix = self.layer_prefix.format(trunk=self.trunk, i=i, group=group, layer=layer)
            found, prefix = self.layer.get(module, module), f"{prefix}."
        else:
            prefix = ""
            found = self.modules.get(module, re.sub(r"^bert\.", f"{self.trunk}.", module))
        if isinstance(found, str):
            return f"{prefix}{found}.{kind}"
        return tuple(f"{prefix}{part}.{kind}" for part in found)

    def _norm_before_half(self, module: str, layers: int) -> str:
        """A norm's name in the layer whose half follows it; other names as they are."""
        if module == "bert.encoder.LayerNorm":
            return f"bert.encoder.layer.0.{self.attention_norm}"
        inner = _LAYER.fullmatch(module)
        if inner is None or inner[2] != "output.LayerNorm":
            return module
        following = int(inner[1]) + 1
        if following == layers:
            return self.final_norm
        return f"bert.encoder.layer.{following}.{self.attention_norm}"


def _repeated(pattern: tuple[int, ...], length: int) -> tuple[int, ...]:
    return tuple(pattern[i % len(pattern)] for i in range(length))


OWN = Family(model_type="bert_unpad", architectures={}, fields={})
"""Any parts: config.json has the fields of `EncoderConfig`, and files have our names."""


def same(**defaults: Any) -> dict[str, tuple[str, Any]]:
    """For `Family.fields`: fields with the same name in config.json, and transformers' defaults."""
    return {name: (name, default) for name, default in defaults.items()}
