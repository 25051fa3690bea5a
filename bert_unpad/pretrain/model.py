"""From the configuration to a model that trains: weights, compilation, DDP."""

import dataclasses

import torch
from torch import nn

from bert_unpad import ops
from bert_unpad._capability import LEAST_CAPABILITY, multiplies, reaches
from bert_unpad.batch import PackedInputs
from bert_unpad.nn import (
    Encoder,
    EncoderConfig,
    EncoderForPreTraining,
    ReplacedTokenPreTraining,
    generator_config,
)
from bert_unpad.nn.config import Head
from bert_unpad.nn.weights import read_config
from bert_unpad.ops.attention import HEAD_DIMS
from bert_unpad.pretrain.config import ConfigError, PretrainConfig


def build_model(
    config: PretrainConfig,
    vocab_size: int,
    max_seq_length: int,
    pad_id: int | None = None,
    mask_id: int | None = None,
) -> EncoderForPreTraining:
    """The model on the CPU, fresh or from a folder, the same on all ranks for the same seed.

    Args:
        config: of the run.
        vocab_size: of the tokenizer.
        max_seq_length: longest example of the data, in tokens.
        pad_id: the tokenizer's id for padding, which a fresh model notes for transformers; None:
            the preset's.
        mask_id: the tokenizer's id of [MASK], for a fresh model that treats it in a way of its own.

    Raises:
        ConfigError: the model does not fit the data, or the folder's weights do not fit the sizes.
    """
    sizes = config.model.resolve(vocab_size, config.data)
    fresh = config.model.weights is None
    pad, mask, offset = sizes.pad_token_id, sizes.mask_token_id, sizes.position_offset
    if fresh and pad_id is not None:
        # In families that have an offset it is the first id after that of padding.
        pad, offset = pad_id, pad_id + 1 if offset else 0
    if max_seq_length + offset > sizes.max_position_embeddings:
        more = f" and {offset} rows that no token of this family gets" if offset else ""
        raise ConfigError(
            "model.max_position_embeddings",
            f"expected at least {max_seq_length + offset}, for the tokens of the longest example"
            f"{more}, got {sizes.max_position_embeddings}",
        )
    if mask is not None and mask_id is not None:
        if not fresh and mask != mask_id:
            raise ConfigError(
                "data.tokenizer",
                f"expected the model's, whose [MASK] is token {mask}, got one where it is "
                f"{mask_id}",
            )
        mask = mask_id
    sizes = dataclasses.replace(sizes, pad_token_id=pad, position_offset=offset, mask_token_id=mask)
    torch.manual_seed(config.seed)
    model = _make(config, sizes)
    for encoder in (module for module in model.modules() if isinstance(module, Encoder)):
        encoder.recompute = config.recompute
        encoder.attention_schedule = config.attention_schedule
        encoder.fp8 = config.precision == "fp8"
    add_gradients_in_products(model)
    return model.train()


def _make(config: PretrainConfig, sizes: EncoderConfig) -> EncoderForPreTraining:
    """A fresh model, or one from a folder.

    Raises:
        ConfigError: the folder's weights do not fit the sizes.
    """
    given, replaced_tokens = config.model, config.data.objective == "rtd"
    if given.weights is None and replaced_tokens:
        return ReplacedTokenPreTraining(sizes, generator_config(sizes, given.generator_share))
    if given.weights is None:
        return EncoderForPreTraining(sizes)
    try:
        if replaced_tokens:
            return ReplacedTokenPreTraining.from_pretrained(given.weights, **given.overrides())
        if set(sizes.heads) < set(read_config(given.weights).heads):
            whole = EncoderForPreTraining.from_pretrained(given.weights, **given.overrides())
            return _with_fewer_heads(whole, sizes.heads)
        return EncoderForPreTraining.from_pretrained(
            given.weights, heads=sizes.heads, **given.overrides()
        )
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError("model.preset", str(error)) from error


def _with_fewer_heads(
    whole: EncoderForPreTraining, heads: tuple[Head, ...]
) -> EncoderForPreTraining:
    """A model with the weights of one that has more heads."""
    model = EncoderForPreTraining(dataclasses.replace(whole.config, heads=heads))
    weights = whole.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


def check_model(config: PretrainConfig, device: torch.device) -> None:
    """Checks the model's sizes and precision as far as that takes no data.

    Raises:
        ConfigError: a size does not fit, or the device has no kernel for the width of a head or
            does not multiply the precision.
    """
    if config.precision in ("bf16", "fp8") and not multiplies(device, config.precision):
        capability = torch.cuda.get_device_capability(device)
        precisions = [name for name in LEAST_CAPABILITY if reaches(capability, name)]
        raise ConfigError(
            "precision",
            f"expected one of {', '.join(precisions)} on a GPU of compute capability "
            f"{capability[0]}.{capability[1]}, got {config.precision}",
        )
    sizes = config.model.resolve(1, config.data)
    served = HEAD_DIMS[device.type]
    if sizes.head_dim not in served:
        wanted = f"1 to {max(served)}" if isinstance(served, range) else f"one of {list(served)}"
        raise ConfigError(
            "model.num_attention_heads",
            f"expected hidden_size / num_attention_heads to be {wanted} on this device "
            f"({device.type}), got {sizes.hidden_size} / {sizes.num_attention_heads} = "
            f"{sizes.head_dim}",
        )


def add_gradients_in_products(model: nn.Module) -> None:
    """Lets passes add to weight gradients that are there within the products that make them: later
    ones of a step, and all with CUDA graphs, whose gradients stay."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            ops.accumulate_in_place(module.weight)


def to_device(
    inputs: PackedInputs, model: EncoderForPreTraining, device: torch.device
) -> PackedInputs:
    """Copies inputs to the model's device, with all that is computed on the host once a batch."""
    if model.bert.encoder.attention_schedule == "groups":
        _ = inputs.batch.group_sizes  # kept by the batch; torch.compile could not trace it
    return inputs.to(device, non_blocking=True)
