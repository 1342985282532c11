"""Every architecture of transformers with random weights, small enough to train on a CPU in a second, and its batches.

Nothing is downloaded. A configuration class is instantiated, its sizes are replaced by small ones by their names, and
it is instantiated again, so that values derived from sizes follow. `_SIZES` overrides the rules for architectures that
they do not fit.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

VOCAB = 99
LENGTH = 12
IMAGE = 32
BATCH = 2

# Training task of an architecture: the first that it has a head for.
TASKS = {
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "contrastive": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio-classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "video-classification": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "depth": "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "time-series": "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}

# Small sizes by their names in configurations; the first match counts.
_NAMED: list[tuple[str, int]] = [
    (r"vocab_size.*|.*_vocab_size|num_embeddings", VOCAB),
    (r"type_vocab_size", 2),
    (r"(n|num)_group(s)?|topk_group|n_groups|num_conv_pos_embedding_groups|num_feat_extract_groups", 1),
    (r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts|num_selected_experts|moe_k|experts_per_token", 2),
    (r"(n|num|moe_num)(_local|_routed)?_experts|moe_num_experts|num_local_experts|ffn_config_num_experts", 4),
    (r"n_shared_experts|num_shared_experts", 1),
    (r"(qk_)?rope_head_dim|qk_nope_head_dim|v_head_dim|head_dim|attention_head_dim|kv_channels|d_kv|.*_head_dim", 8),
    (r"(q|kv|o)_lora_rank|lora_rank|time_step_rank|mamba_dt_rank|.*_lora_dim", 8),
    (r"num_key_value_heads|multi_query_group_num|num_kv_heads|n_head_kv|.*num_key_value_heads|num_kv", 2),
    (r".*num_attention_heads|num_heads|n_heads?|.*attention_heads|.*_num_heads|nhead|heads|num_attn_heads", 4),
    (r"num_feat_extract_layers", 99),
    (r"(?!.*max).*(num|n)_(hidden_|encoder_|decoder_|text_|vision_)?layers?|.*num_layers|.*_layers|depth|n_layer", 2),
    (r".*intermediate_(size|dim).*|.*ffn_dim.*|d_ff|n_inner|.*ffn_hidden_size|.*mlp_dim|d_inner", 48),
    (
        r".*hidden_size.*|d_model|n_embd|(?!.*(conv|feat)).*embed(ding)?_dim|.*hidden_dim|dim|d_embed|width|"
        r"embed(ding)?_size|.*projection_dim|proj(ection|ector)?_(size|dim)|out_hidden_size|output_dim",
        32,
    ),
    (r"state_size|.*d_state|ssm_state_size|mamba_state_dim", 8),
    (r"(mamba_)?d_head|mamba_head_dim", 16),
    (r"n_positions|n_ctx|.*max_position_embeddings|max_seq_len(gth)?|max_(source|target)_positions|.*_max_length", 64),
    (r".*image_size|crop_size|img_size", IMAGE),
    (r"patch_size|.*_patch_size", 8),
    (r"max_2d_position_embeddings", 64),
    (r"num_labels", 5),
    (r"num_queries|num_query_tokens|num_latents|num_object_queries", 4),
    (r"num_mel_bins", 16),
    (r"mm_tokens_per_image|rotary_dim", 4),
    (r"(sliding|attention)_window|window_size", 4),
    (r"chunk_size|attention_chunk_size|mamba_chunk_size", 4),
    (r"(chunk_length|.*attn_chunk_length|block_size)", 4),
]

# Overrides by model type; a dict is for the configuration inside of this name.
_SIZES: dict[tuple[str, ...], dict[str, Any]] = {
    ("deepseek_v3", "deepseek_v32", "axk1", "axk2", "glm4_moe_lite", "glm_moe_dsa", "youtu"): {
        "num_key_value_heads": 4
    },
    ("deepseek_v2",): {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    ("swin", "donut-swin"): {"depths": [1, 1], "num_heads": [2, 2], "embed_dim": 16, "patch_size": 4},
    ("gpt_neo",): {"attention_types": [[["global", "local"], 1]]},
    ("jamba",): {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    ("xlnet",): {"d_head": 8},
    ("flaubert", "xlm"): {"emb_dim": 32},
    ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"): {
        "layer_types": ["linear_attention", "full_attention"]
    },
    ("zamba", "zamba2"): {"layer_types": ["mamba", "hybrid"]},
    ("granitemoehybrid",): {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    ("bamba",): {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16},
    ("recurrent_gemma",): {"num_hidden_layers": 3},
    ("speech_to_text",): {"input_feat_per_channel": 16},
}


def _sizes_of(model_type: str) -> dict[str, Any]:
    return next((sizes for types, sizes in _SIZES.items() if model_type in types), {})


def architectures() -> list[str]:
    """Return the model types that some task has a class for."""
    return [name for name in CONFIG_MAPPING if task_of(name) is not None]


def task_of(name: str) -> str | None:
    """Return the training task of an architecture; None if there is no class."""
    return next((task for task, table in TASKS.items() if _class_name(name, table) is not None), None)


def _class_name(name: str, table: str) -> str | None:
    found = getattr(modeling_auto, table).get(name)
    return found[0] if isinstance(found, (tuple, list)) else found


def tiny_model(name: str, **changes: Any) -> tuple[PreTrainedModel, str]:
    """Return a small random model of an architecture, and its task; `changes` apply to the configuration."""
    task = task_of(name)
    assert task is not None
    found = _class_name(name, TASKS[task])
    assert found is not None
    model_class = getattr(transformers, found)
    config = tiny_config(CONFIG_MAPPING[name])
    for each in _configs(config):
        # Otherwise ranks would skip different layers, and FSDP2's collectives hang; masks drawn by numpy are an error.
        chances = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob")
        without = {**dict.fromkeys(chances, 0.0), "apply_spec_augment": False}
        for attribute, value in (without | changes).items():
            if hasattr(each, attribute):
                setattr(each, attribute, value)
    torch.manual_seed(0)
    model = model_class(config)
    assert isinstance(model, nn.Module)
    return model.train(), task


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return a configuration with small sizes."""
    return config_class(**_small(config_class()) | _sizes_of(config_class.model_type))


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _configs(value)


def _small(config: PreTrainedConfig, ids: Iterator[int] | None = None) -> dict[str, Any]:
    """Return the arguments of a configuration that differ from its defaults."""
    ids = ids or iter(range(VOCAB - 1, 0, -1))
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            inner = _small(value, ids) | _sizes_of(config.model_type).get(name, {})
            found[name] = {"model_type": value.model_type, **inner}
        elif isinstance(value, bool) or name.startswith("_"):
            continue
        elif isinstance(value, int) and name.endswith(("_token_id", "_token_index", "_idx", "_token_ids")):
            if value >= VOCAB:
                found[name] = next(ids)
        elif isinstance(value, int) or (value is None and name in ("head_dim", "intermediate_size")):
            size = _size_of(name)
            if size is not None and (value is None or value > size):
                found[name] = size
        elif isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
            small = _small_list(name, list(value))
            if small is not None:
                found[name] = small
        elif isinstance(value, dict) and "mrope_section" in value:
            found[name] = {**value, "mrope_section": [1, 1, 2]}
    return found


def _size_of(name: str) -> int | None:
    return next((size for pattern, size in _NAMED if re.fullmatch(pattern, name)), None)


def _small_list(name: str, value: list[int]) -> list[int] | None:
    """Return sizes of stages: one block each, few channels, and a number of heads that divides them."""
    if re.fullmatch(r"depths?|num_blocks|layers|.*_depths|stage_num_blocks|layer_repeats|num_block.*", name):
        return [1] * len(value)
    if re.fullmatch(r"(encoder_|decoder_)?hidden_sizes?|embed_dims?|dims?|.*channels|neck_hidden_sizes|widths", name):
        return [16 * min(2**stage, 4) for stage in range(len(value))] if len(set(value)) > 1 else [32] * len(value)
    if re.fullmatch(r"num_heads|num_attention_heads|.*_heads", name):
        return [min(2, each) for each in value]
    if re.fullmatch(r"conv_dim|tdnn_dim", name):
        return [16] * len(value)
    if re.fullmatch(r".*image_size|img_size|crop_size", name):
        return [IMAGE] * len(value)
    return None


# --- batches -----------------------------------------------------------------------------------------------


def batch_of(model: PreTrainedModel, task: str, image_tokens: int = 0, *, padding: bool = False) -> dict[str, Any]:
    """Return random inputs by the names of the arguments of forward.

    Args:
        image_tokens: number of tokens that stand for an image's features.
        padding: pass an `attention_mask` for `input_ids`, whose first row ends with three tokens of padding.
    """
    taken = inspect.signature(model.forward).parameters
    wanted = [name for name in _INPUTS if name in taken and _wanted(name, task, model)]
    batch = {name: _INPUTS[name](model, image_tokens) for name in wanted}
    if padding and "input_ids" in batch and "attention_mask" in taken:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -3:] = 0
    return batch


def _wanted(name: str, task: str, model: PreTrainedModel) -> bool:
    """Return whether a task has this input: its main one, and its targets."""
    main = model.main_input_name
    speech = task in ("speech-seq2seq", "ctc", "audio-classification")
    if name == main:
        return True
    if name == "input_ids":
        return (
            not speech
            and main in ("input_ids", "pixel_values")
            and task not in ("image-classification", "video-classification", "segmentation", "depth", "detection")
        )
    if name == "pixel_values":
        return task in ("image-text-to-text", "contrastive", "base")
    if name in ("labels", "decoder_input_ids"):
        return task not in ("base", "contrastive", "segmentation", "depth", "detection", "time-series")
    if name == "return_loss":
        return task == "contrastive"
    return True


def _ids(model: PreTrainedModel, image_tokens: int = 0) -> Tensor:
    """Return random tokens above the usual special ones; `image_tokens` of each row represent the image."""
    text = torch.randint(5, 80, (BATCH, LENGTH))
    config: Any = model.config
    known = (getattr(config, f"image_token_{end}", None) for end in ("id", "index"))
    image = next((token for token in known if isinstance(token, int)), None)
    if image is None or not image_tokens:
        return text
    return torch.cat([text[:, :1], torch.full((BATCH, image_tokens), image), text[:, 1:]], dim=1)


def _labels(model: PreTrainedModel, image_tokens: int = 0) -> Tensor:
    name = type(model).__name__
    if name.endswith(("ImageClassification", "AudioClassification", "VideoClassification", "SequenceClassification")):
        return torch.randint(0, model.config.num_labels or 2, (BATCH,))
    if name.endswith("CTC"):
        return torch.randint(1, 20, (BATCH, 3))
    return _ids(model, image_tokens)


def _decoder_ids(model: PreTrainedModel, image_tokens: int = 0) -> Tensor:
    return torch.randint(5, 80, (BATCH, LENGTH))


def _pixels(model: PreTrainedModel, image_tokens: int = 0) -> Tensor:
    """Return random images or videos with the channels and sizes of the configuration."""
    channels, size = 3, IMAGE
    for config in _configs(model.config):
        channels = getattr(config, "num_channels", channels)
        size = getattr(config, "image_size", size)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    if "Video" in type(model).__name__ or getattr(model.config, "num_frames", None):
        return torch.randn(BATCH, model.config.num_frames, channels, height, width)
    return torch.randn(BATCH, channels, height, width)


def _features(model: PreTrainedModel, image_tokens: int = 0) -> Tensor:
    bins = next((c.num_mel_bins for c in _configs(model.config) if hasattr(c, "num_mel_bins")), 16)
    length = 2 * getattr(model.config, "max_source_positions", 64)
    return torch.randn(BATCH, bins, length) if "hisper" in type(model).__name__ else torch.randn(BATCH, 64, bins)


_INPUTS: dict[str, Callable[[PreTrainedModel, int], Any]] = {
    "input_ids": _ids,
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": lambda model, _: torch.randn(BATCH, 6400),
    "bbox": lambda model, _: torch.randint(0, 20, (BATCH, LENGTH, 4)).sort(dim=-1).values[..., [0, 1, 2, 3]],
    "decoder_input_ids": _decoder_ids,
    "labels": _labels,
    "return_loss": lambda model, _: True,
}


def loss_of(output: Any) -> Tensor:
    """Return the model's loss, or else the mean square of all results that have a gradient."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    found = [tensor.float().square().mean() for tensor in _tensors(output) if tensor.requires_grad]
    if not found:
        raise ValueError("no output has a gradient")
    return torch.stack(found).sum()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
