"""Tiny random models of any class of transformers, and inputs for them.

A configuration is the class's own with smaller sizes, by the names of its fields, and inputs follow
from the arguments of `forward`. What neither gets right has a row in `CONFIGS` or `INPUTS`.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.hf_models import transformers
from tests.support.seeds import derived

Call = dict[str, Any]
WIDTH, MELS, LENGTHS = 32, 16, (9, 5, 7)
# The largest value of a field, by the first pattern that is found in its name; None leaves it.
CAPS = (
    (r"feat_extract|decoder_dim|temporal_patch|tubelet|type_vocab|token_(id|index)s?$", None),
    (r"vocab_size|max_position|n_positions|num_position", 64),
    (r"heads?$|layers$|(^|_)depths?$|num_blocks$|n_(layer|block)$", 2),
    (r"head_dim$|^image_size|^img_size|num_mel|n_mels|^conv_dim|^tdnn_dim", MELS),
    (r"^patch_size$|experts$", 4),
    (r"sliding_window|local_attention|^window_size", 6),
    (r"max_source_positions", 12),
    (r"intermediate|ffn|mlp_dim|hidden_dim$|feed_forward|inner", 48),
    (r"(hidden|embedding|projection)_size|d_model|^width$|_dim$|^dim$|conv_channels", WIDTH),
)
# These follow from other fields.
_DERIVED = re.compile(
    "_?out_(features|indices)|stage_names|per_layer_config|mlp_layer_types|.*_per_layer|"
    "_name_or_path|transformers_version|architectures|.*dtype"
)
_ESM = {"vocab_size": 64, "pad_token_id": 1, "mask_token_id": 5}
_LEVELS = {
    "num_feature_levels": 3, "encoder_hidden_dim": WIDTH, "encoder_in_channels": [WIDTH] * 3,
    "decoder_in_channels": [WIDTH] * 3, "feat_channels": [WIDTH] * 3,
}  # fmt: skip
_STAGES = {
    "hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2],
}  # fmt: skip
_WINDOWS = {"window_size": 16}
_LW_DETR = {"image_size": 32, "num_windows": 4, "window_block_indices": [0]}
# What else configurations take, by the prefix of the model's name.
CONFIGS: dict[str, Call] = {
    "AST": {"max_length": 24, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
    "DFine": _LEVELS, "Deimv2": _LEVELS, "PPDocLayout": _LEVELS, "RTDetr": _LEVELS,
    "DeformableDetr": {"num_feature_levels": 3}, "RfDetrDecoder": {"num_feature_levels": 3},
    "Dots3Note": {"adapter_input_size": WIDTH, "per_layer_config": {}},
    "EmbeddingGemma2": {"global_head_dim": MELS}, "Esm": _ESM, "EvollaSaProt": _ESM,
    "Exaone4_5_Vision": _WINDOWS, "Qwen2_5OmniVision": _WINDOWS, "Qwen2_5_Vision": _WINDOWS,
    "Gemma3Text": {"use_bidirectional_attention": True},
    "HYV4VLVision": {"max_image_size": 16}, "HunYuanVLVision": {"max_image_size": 16},
    "Llama": {"is_causal": False}, "Qwen2Model": {"is_causal": False},
    "LwDetrViT": _LW_DETR,
    "LwDetrDecoder": {
        "backbone_config": {"model_type": "lw_detr_vit", "out_indices": [1]} | _LW_DETR,
        "projector_scale_factors": [2.0, 1.0, 0.5], "num_feature_levels": 3,
    },
    "MoonshineStreaming": {"num_key_value_heads": 2},
    "MobileBert": {"true_hidden_size": WIDTH, "intra_bottleneck_size": WIDTH},
    "Molmo2Vision": {"image_size": [16, 16], "num_position_embeddings": 16},
    "PatchTST": {"context_length": 16, "patch_length": 4, "patch_stride": 4},
    "PeAudioEncoder": {"dac_config": {"encoder_hidden_size": 4, "downsampling_ratios": [4, 8]}},
    "Phi4MultimodalAudio": {
        "ext_pw_out_channel": WIDTH, "depthwise_separable_out_channel": WIDTH,
        "feature_layer": -1,
    },
    "Qwen3ASR": {"max_source_positions": 64}, "Qwen3OmniMoeAudio": {"max_source_positions": 64},
    "Radio": {"max_img_size": 32, "cpe_max_size": 32},
    "Sam2Hiera": {
        "hidden_size": 8, "embed_dim_per_stage": [8, 16, 32, 64],
        "blocks_per_stage": [1, 2, 1, 1], "num_attention_heads_per_stage": [1, 1, 2, 2],
        "window_size_per_stage": [4] * 4, "global_attention_blocks": [2], "image_size": [64, 64],
        "window_positional_embedding_background_size": [2, 2],
    },
    "Sam3LiteTextText": {"num_hidden_layers": 4}, "SegformerModel": _STAGES,
    "VideoMAE": {"num_frames": 4},
    "VideoPrismVision": {"tubelet_size": [1, 4, 4]}, "VideoPrismVideo": {"tubelet_size": [1, 4, 4]},
    "VitPose": {"image_size": [16, 16], "patch_size": [8, 8]},
    "Vivit": {"num_frames": 4, "tubelet_size": [2, 4, 4]},
    "XCLIP": {"num_frames": 2}, "Xmod": {"default_language": "en_XX"},
}  # fmt: skip


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(derived(sum(shape) + 100 * len(shape)))
    return torch.randn(shape, generator=generator)


def integers(*shape: int, high: int = 50) -> Tensor:
    generator = torch.Generator().manual_seed(derived(sum(shape) + 100 * len(shape)))
    return torch.randint(6, high, shape, generator=generator)


def mask_of(*lengths: int) -> Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


_SIZES = [(4, 4), (2, 2), (1, 1)]


def _deformable(**more: Any) -> Call:
    """What a decoder with deformable attention takes: 5 queries on maps of three sizes."""
    return {
        "inputs_embeds": normal(2, 5, WIDTH),
        "encoder_hidden_states": normal(2, 21, WIDTH),
        "reference_points": normal(2, 5, 4).sigmoid(),
        "spatial_shapes": torch.tensor(_SIZES),
        "spatial_shapes_list": _SIZES,
        "level_start_index": torch.tensor([0, 16, 20]),
        **more,
    }


def _maps() -> list[Tensor]:
    return [normal(2, WIDTH, size, size) for size in (4, 2, 1)]


def _audio(frames_first: bool = False, **more: Any) -> Call:
    features = normal(2, MELS, 24)
    return {"input_features": features.mT if frames_first else features, **more}


def _speech_pair() -> Call:
    return _audio(True, attention_mask=_FRAMES, decoder_input_ids=integers(2, 9))


def _text() -> Call:
    ids = integers(len(LENGTHS), max(LENGTHS))
    ids[range(len(LENGTHS)), [length - 1 for length in LENGTHS]] = 60  # the end, for CLIP
    return {"input_ids": ids, "attention_mask": mask_of(*LENGTHS)}


_GRIDS = torch.tensor([[1, 4, 4], [1, 2, 4]])
_RATIOS = {"valid_ratios": torch.ones(2, 3, 2)}
_FRAMES = mask_of(24, 14)
# What a model is called with, by the prefix of its name, where the arguments' names do not tell.
INPUTS: dict[str, Callable[[], Call]] = {
    "AST": lambda: {"input_values": normal(2, 24, MELS)},
    "AudioFlamingo3": lambda: _audio(input_features_mask=_FRAMES),
    "BarkFine": lambda: {
        "codebook_idx": 1, "input_ids": integers(2, 9, 8), "attention_mask": mask_of(9, 5),
    },
    "Canary": lambda: _speech_pair(), "CohereAsrModel": lambda: _speech_pair(),
    "CLIPSegDecoder": lambda: {
        "hidden_states": [normal(2, 17, WIDTH)] * 3, "conditional_embeddings": normal(2, WIDTH),
    },
    "DFineDecoder": _deformable, "Deimv2Decoder": _deformable, "RTDetrDecoder": _deformable,
    "RTDetrV2Decoder": _deformable, "PPDocLayoutV2Decoder": _deformable,
    "DeformableDetrDecoder": lambda: _deformable(
        object_queries_position_embeddings=normal(2, 5, WIDTH), **_RATIOS
    ),
    "DeformableDetrEncoder": lambda: {
        "inputs_embeds": normal(2, 21, WIDTH), "attention_mask": mask_of(21, 21).bool(),
        "spatial_position_embeddings": normal(2, 21, WIDTH), **_RATIOS,
        "spatial_shapes": torch.tensor(_SIZES), "spatial_shapes_list": _SIZES,
        "level_start_index": torch.tensor([0, 16, 20]),
    },
    "RfDetrDecoder": lambda: _deformable(**_RATIOS),
    "LwDetrDecoder": lambda: _deformable(**_RATIOS),
    "Florence2Vision": lambda: {"hidden_states": normal(2, 3, 32, 32)},
    "Inkling2Vision": lambda: {
        "pixel_values": normal(4, 8, 8, 3), "image_grid_thw": torch.tensor([[1, 2, 2]]),
    },
    "Kimi_K25Vision": lambda: {"pixel_values": normal(24, 3, 4, 4), "grid_thw": _GRIDS},
    "Kosmos2_5Vision": lambda: {
        "flattened_patches": torch.cat(
            [torch.arange(32.0).view(16, 2).expand(2, -1, -1) // 8, normal(2, 16, WIDTH)], -1
        ),
        "attention_mask": mask_of(16, 9),
    },
    "LwDetrViTBackbone": lambda: {"pixel_values": normal(2, 3, 32, 32)},
    "MiniCPM": lambda: {
        "pixel_values": normal(1, 3, 4, 96), "target_sizes": torch.tensor([[4, 4], [2, 4]]),
    },
    "Molmo2Vision": lambda: {"pixel_values": normal(2, 16, 48)},
    "MuseGlimmerAssistant": lambda: {
        "noise_embeds": normal(2, 4, WIDTH), "context_hidden_states": normal(2, 9, 160),
    },
    "MuseGlimmerVision": lambda: {"pixel_values": normal(24, 96), "grid_thw": _GRIDS},
    "MuseSparkVision": lambda: {"pixel_values": normal(24, 96), "grid_thw": _GRIDS},
    "Nemotron3": lambda: _audio(True, attention_mask=_FRAMES),
    "Nemotron3_5TranscribeWord": lambda: {
        "inputs_embeds": normal(2, 12, WIDTH), "attention_mask": mask_of(12, 7),
    },
    "ModernVBert": lambda: _text(), "UltraVBert": lambda: _text(),
    "OmniASRAudio": lambda: {"input_values": normal(2, 1, 4000)},
    "Phi4MultimodalAudio": lambda: {"hidden_states": normal(2, 64, 80), "mask": mask_of(64, 40)},
    "PPDocLayoutV3Hybrid": lambda: {"inputs_embeds": _maps(), "x4_feat": [normal(2, WIDTH, 8, 8)]},
    "Qwen3ASR": lambda: {
        "input_features": normal(2, MELS, 200), "input_features_mask": mask_of(200, 120),
    },
    "Qwen3OmniMoeAudio": lambda: {
        "input_features": normal(MELS, 200), "feature_lens": torch.tensor([120, 80]),
    },
    "Siglip2Vision": lambda: {
        "pixel_values": normal(2, 16, 48), "pixel_attention_mask": mask_of(16, 9),
        "spatial_shapes": torch.tensor([[4, 4], [3, 3]]),
    },
    "XCLIPModel": lambda: _text() | {"pixel_values": normal(3, 8, 3, 16, 16)},
    "DiaModel": lambda: {
        "input_ids": integers(2, 9), "attention_mask": mask_of(9, 5),
        "decoder_input_ids": integers(2, 9, 9),
    },
    "FunAsrNano": lambda: {
        "input_features": normal(2, 24, 7 * MELS), "input_features_mask": _FRAMES,
    },
    "Gemma4Vision": lambda: {
        "pixel_values": normal(2, 16, 48),
        "pixel_position_ids": torch.cartesian_prod(*2 * [torch.arange(4)]).repeat(2, 1, 1),
    },
    "Idefics2Perceiver": lambda: {
        "context": normal(2, 12, WIDTH), "attention_mask": mask_of(12, 7),
    },
    "MusicgenDecoder": lambda: {
        "input_ids": integers(8, 9), "encoder_hidden_states": normal(2, 9, WIDTH),
        "encoder_attention_mask": mask_of(9, 5),
    },
    "PaddleOCRVision": lambda: {
        "pixel_values": normal(1, 24, 3, 4, 4), "grid_thw": _GRIDS,
        "cu_seqlens": torch.tensor([0, 16, 24], dtype=torch.int32),
    },
    "PeAudioEncoder": lambda: {
        "input_values": normal(2, 1, 4000), "padding_mask": mask_of(4000, 2500),
    },
    "PatchTST": lambda: {"past_values": normal(2, 16, 1)},
    "Qwen2_5OmniAudio": lambda: {
        "input_features": normal(MELS, 24), "feature_lens": torch.tensor([14, 10]),
        "aftercnn_lens": torch.tensor([7, 5]),
    },
    "Sam3DetrEncoder": lambda: {
        "vision_features": [normal(2, WIDTH, 4, 4)], "text_features": normal(2, 7, WIDTH),
        "vision_pos_embeds": [normal(2, WIDTH, 4, 4)], "text_mask": mask_of(7, 4).bool(),
    },
    "Sam3DetrDecoder": lambda: {
        "vision_features": normal(2, 16, WIDTH), "text_features": normal(2, 7, WIDTH),
        "vision_pos_encoding": normal(2, 16, WIDTH), "text_mask": mask_of(7, 4).bool(),
        "spatial_shapes": torch.tensor([[4, 4]]),
    },
    "Sam3MaskDecoder": lambda: {
        "decoder_queries": normal(2, 5, WIDTH), "encoder_hidden_states": normal(2, 16, WIDTH),
        "backbone_features": [normal(2, WIDTH, size, size) for size in (16, 8, 4)],
        "prompt_features": normal(2, 7, WIDTH), "prompt_mask": mask_of(7, 4).bool(),
    },
    "Segformer": lambda: {"pixel_values": normal(2, 3, 32, 32)},
    "VideoMAE": lambda: {"pixel_values": normal(2, 4, 3, 16, 16)},
    "Vivit": lambda: {"pixel_values": normal(2, 4, 3, 16, 16)},
    "XCLIPVision": lambda: {"pixel_values": normal(4, 3, 16, 16)},
}  # fmt: skip


def row_of(table: Mapping[str, Any], name: str, default: Any) -> Any:
    """The row of the longest prefix of a name."""
    found = [prefix for prefix in table if name.startswith(prefix)]
    return table[max(found, key=len)] if found else default


def model_class(package: str, name: str) -> type[nn.Module] | None:
    """Returns a class of transformers.models.<package>, or None where this version lacks it."""
    folder = Path(transformers.models.__file__).parent / package
    for file in sorted(folder.glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{package}.{file.stem}")
        if hasattr(module, name):
            return getattr(module, name)
    return None


def tiny_config(kind: type[nn.Module]) -> Any:
    fields = _smaller(kind.config_class().to_dict())
    return kind.config_class(**fields | row_of(CONFIGS, kind.__name__, {}))


def _smaller(fields: Call) -> Call:
    found = {}
    for name, value in fields.items():
        if _DERIVED.fullmatch(name):
            continue
        cap = next((cap for pattern, cap in CAPS if re.search(pattern, name)), None)
        if isinstance(value, dict):
            part = "config" in name or name in ("encoder", "decoder")
            value = _smaller(value) if part else value
        elif name == "layer_types" and value:
            value = (list(dict.fromkeys(value)) * 2)[:2]
        elif name.endswith("token_id") and type(value) is int:
            value = min(value, 5)
        elif cap and type(value) is int:
            value = min(value, cap)
        elif cap and isinstance(value, (list, tuple)):
            value = [min(x, cap) if type(x) is int else x for x in value]
        found[name] = value
    return found


def tiny_model(kind: type[nn.Module]) -> nn.Module:
    """A model in evaluation mode, with weights large enough for every part to matter."""
    model = kind._from_config(tiny_config(kind)).float().eval()
    generator = torch.Generator().manual_seed(derived(0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() > 1:
                p.copy_(noise / max(1, p.shape[1:].numel()) ** 0.5)
            else:
                p.copy_(0.1 * noise + (not name.endswith("bias")))
    return model


def packed_inputs(model: nn.Module) -> tuple[Call, list[Tensor]]:
    """A call with sequences in one row, and the ids of each."""
    rows = [integers(1, length) for length in LENGTHS]
    # RoBERTa's positions begin behind the padding token's id.
    name = type(model).__name__
    first = 2 if re.search("AltCLIP|Roberta|Camembert|Data2Vec|Esm(?!c)|Xmod", name) else 0
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    call = {
        "input_ids": torch.cat(rows, 1),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }
    if "position_ids" in inspect.signature(model.forward).parameters:
        call["position_ids"] = torch.cat([torch.arange(n) + first for n in LENGTHS])[None]
    return call, rows


def inputs(model: nn.Module) -> Call:
    """What to call a model with: padded where it takes a mask."""
    kind, config = type(model), model.config
    names = list(inspect.signature(kind.forward).parameters)[1:]
    if row := row_of(INPUTS, kind.__name__.replace("LiteText", ""), None):
        return row()
    main = kind.main_input_name if kind.main_input_name in names else names[0]
    size = getattr(config, "image_size", None) or 16
    size = list(size) if isinstance(size, (list, tuple)) else [size, size]
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", 3)
    grid = next((name for name in names if name.endswith("grid_thw")), None)
    call: Call = {}
    if grid:
        patch = config.patch_size
        width = channels * (getattr(config, "temporal_patch_size", 1) or 1) * patch * patch
        call |= {main: normal(24, width), grid: _GRIDS}
        if "merge_sizes" in names:
            call["merge_sizes"] = torch.tensor([1, 1])
    elif main == "input_ids":
        call[main], mask = _text().values()
        if "pixel_values" in names and getattr(config, "vision_config", None):
            call["pixel_values"] = normal(len(LENGTHS), 3, *2 * [config.vision_config.image_size])
    elif main == "pixel_values_videos":
        call[main] = normal(2, getattr(config, "num_frames", 4), channels, *size)
    elif main == "input_features":
        call[main] = _audio()[main]
    elif main == "input_values":
        call[main], mask = normal(3, 4000), mask_of(4000, 2500, 3300)
    elif main == "inputs_embeds" and "HybridEncoder" in kind.__name__:
        call[main] = _maps()
    elif main in ("inputs_embeds", "hidden_states"):
        call[main], mask = normal(2, 12, WIDTH), mask_of(12, 7)
        keys = 12
        if "encoder_hidden_states" in names:
            keys = 10
            call |= {"encoder_hidden_states": normal(2, keys, WIDTH)}
            call |= {"encoder_attention_mask": mask_of(keys, 6)}
        if "spatial_position_embeddings" in names:
            call["spatial_position_embeddings"] = normal(2, keys, WIDTH)
        if "object_queries_position_embeddings" in names:
            call["object_queries_position_embeddings"] = normal(2, 12, WIDTH)
            names.remove("attention_mask")
    else:
        call[main] = normal(2, channels, *size)
    if "attention_mask" in names and main != "pixel_values" and main != "input_features":
        call["attention_mask"] = mask
    if "decoder_input_ids" in names:
        call["decoder_input_ids"] = integers(len(call[main]), max(LENGTHS))
    return call
