"""Rotary positions in config.json, in the forms of transformers 5 and of older versions."""

from typing import Any


def read_rope(values: dict[str, Any], theta: float) -> dict[str, Any]:
    """Takes the fields of one kind of rotary positions out of a config.json.

    Args:
        values: of config.json; `rope_parameters`, `rope_theta` and `rope_scaling` are taken out.
        theta: the default.

    Returns:
        `rotary_theta` and `rotary_factor` of `EncoderConfig`.

    Raises:
        ValueError: the positions are scaled in a way that is not supported.
    """
    older = values.pop("rope_scaling", None) or {}
    theta = values.pop("rope_theta", theta)
    parameters = values.pop("rope_parameters", None) or {}
    return {
        "rotary_theta": parameters.get("rope_theta", theta),
        "rotary_factor": _factor("rope_parameters", older | parameters),
    }


def read_ropes(values: dict[str, Any], thetas: dict[str, float], older: dict[str, str]):
    """Takes the rotary positions of several kinds of layers out of a config.json.

    Args:
        values: of config.json; `rope_parameters`, `rope_scaling` and the names in `older` are taken
            out.
        thetas: the default of each kind.
        older: the name that the theta of each kind had.

    Returns:
        The theta of each kind.

    Raises:
        ValueError: positions are scaled.
    """
    scaling = values.pop("rope_scaling", None) or {}
    parameters = values.pop("rope_parameters", None) or {}
    found = {}
    for kind, theta in thetas.items():
        own = parameters.get(kind) or {}
        if not isinstance(own, dict):
            raise ValueError(f"rope_parameters.{kind}: expected an object, got {own!r}")
        own = scaling | own
        found[kind] = own.get("rope_theta", values.pop(older[kind], theta))
        if (factor := _factor(f"rope_parameters.{kind}", own)) != 1.0:
            raise ValueError(f"rope_parameters.{kind}.factor: expected 1, got {factor}")
    return found


def write_rope(theta: float, factor: float = 1.0) -> dict[str, Any]:
    """The way back: one entry of `rope_parameters`."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    return found if factor == 1.0 else found | {"rope_type": "linear", "factor": factor}


def _factor(name: str, parameters: dict[str, Any]) -> float:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "linear"):
        raise ValueError(f"{name}.rope_type: expected default or linear, got {kind!r}")
    return parameters.get("factor", 1.0) if kind == "linear" else 1.0
