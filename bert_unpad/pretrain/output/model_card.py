"""The README.md of an exported model: the model card that the Hugging Face Hub shows and indexes.

It says what the model is, what it learned from, by which recipe, and how good it is. The licence is
left `unknown`: only the owner of the data and the weights can say it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_unpad import __version__
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.config import PretrainConfig
from bert_unpad.pretrain.losses import TASKS

_HUB = ("hf:", "stream:")
_NAMES = {"stdlib": "docstrings of Python's standard library"}


def write_model_card(
    folder: Path, config: PretrainConfig, model: EncoderForPreTraining, summary: Mapping[str, Any]
) -> None:
    """Writes README.md.

    Args:
        folder: of the exported model.
        config: the run's settings.
        model: the trained model.
        summary: the figures of the run, as in summary.json.
    """
    # Not at the top: it takes a quarter of a second, and only the end of a run needs it.
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    sources = config.data.mixture or {config.data.source: 1.0}
    names = [_shown(source) for source in sources]
    own = model.config.model_type == "bert_unpad"
    task = "fill-mask" if "mlm" in model.config.heads else None
    metrics = _metrics(config, summary)
    data = ModelCardData(
        license="unknown",
        library_name="bert_unpad" if own else "transformers",
        pipeline_tag=task,
        tags=["bert_unpad", model.config.model_type],
        datasets=[_hub_name(source) for source in sources if source.startswith(_HUB)] or None,
        model_name=Path(config.run_dir).resolve().name,
        eval_results=[
            EvalResult(
                task_type=task or "other",
                dataset_type="held-out",
                dataset_name=f"held out of {', '.join(names)}",
                metric_type="accuracy" if name.endswith("accuracy") else "loss",
                metric_name=name,
                metric_value=value,
            )
            for name, value in metrics.items()
        ]
        or None,
    )
    loader = "bert_unpad.nn.EncoderForPreTraining" if own else "transformers.AutoModel"
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {data.model_name}\n",
        f"An encoder of the family {model.config.model_type}, pretrained with bert_unpad "
        f"{__version__}. `{loader}.from_pretrained` reads this folder, "
        "`transformers.AutoTokenizer` its tokenizer.\n",
        f"## Data\n\n{_list(_data(config, names))}",
        f"## Recipe\n\n{_list(_recipe(config, model, summary))}",
        f"## Held-out metrics\n\n{_list(metrics) or '- none: no example was held out'}",
        "## Licence\n\nNot stated yet: write it here and into the field `license` above.\n",
    ]
    ModelCard("\n".join(parts)).save(folder / "README.md")


def _hub_name(source: str) -> str:
    return source.partition(":")[2].partition("?")[0]


def _shown(source: str) -> str:
    """A source without the folders of this machine."""
    if source.startswith(_HUB):
        return _hub_name(source)
    return _NAMES.get(source, Path(source.removeprefix("shards:").partition("?")[0]).name)


def _data(config: PretrainConfig, names: list[str]) -> dict[str, Any]:
    data = config.data
    return {
        "text": ", ".join(names),
        "objective": data.objective,
        "masked": f"{data.masked_lm_prob} of the tokens, by {data.mask_unit}",
        "longest example": f"{data.max_seq_length} tokens",
    }


def _recipe(
    config: PretrainConfig, model: EncoderForPreTraining, summary: Mapping[str, Any]
) -> dict[str, Any]:
    sizes = model.config
    return {
        "model": f"{sizes.num_hidden_layers} layers of width {sizes.hidden_size}, "
        f"{summary['parameters']:,} parameters",
        "training": f"{summary['steps']:,} updates, {summary['sequences']:,} sequences, "
        f"{summary['tokens']:,} tokens",
        "optimizer": f"{config.optimizer.name}, learning rate {config.optimizer.lr}, "
        f"schedule {config.schedule.name}",
        "precision": config.precision,
        "seed": config.seed,
        "hardware": f"{summary['device']}, ranks: {summary['ranks']}, "
        f"{summary['seconds']:,.0f} s of training",
    }


def _metrics(config: PretrainConfig, summary: Mapping[str, Any]) -> dict[str, float]:
    held_out = summary["held_out"] or {}
    names = ["loss", *(f"{task.name}_accuracy" for task in TASKS[config.data.objective])]
    return {name: held_out[name] for name in names if held_out.get(name) is not None}


def _list(entries: Mapping[str, Any]) -> str:
    return "".join(f"- {name}: {value}\n" for name, value in entries.items())
