"""Tiny random models with images, each with a tokenizer and the files of its processor."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ORDINARY = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{% for c in m.content %}{% if c.type == 'image' %}IMAGE"
    "{% else %}{{c.text}}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
AXES = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFamily:
    """A family of models with images.

    Attributes:
        text: Fields of the text configuration.
        vision: Fields of the vision configuration.
        others: Other fields of config.json.
        tokens: Named special tokens of the tokenizer.
        ids: Fields of config.json that name the id of such a token.
        placeholder: What the chat template writes for an image.
        images: preprocessor_config.json.
        processor: processor_config.json.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    others: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, str]
    ids: dict[str, str]
    placeholder: str
    images: dict[str, Any]
    processor: dict[str, Any]


def _qwen(
    name: str,
    *,
    text: dict[str, Any],
    vision: dict[str, Any],
    patch_size: int = 14,
    images: str = "Qwen2VLImageProcessor",
) -> ImageFamily:
    """Return a family whose positions have three axes."""
    size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    sizes = {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    of_vision = {
        "depth": 2,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": patch_size,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.2,
    }
    return ImageFamily(
        text=TEXT | {"rope_parameters": AXES} | text,
        vision=of_vision | vision,
        tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        },
        ids={
            "image_token_id": "image_token",
            "video_token_id": "video_token",
            "vision_start_token_id": "vision_bos_token",
            "vision_end_token_id": "vision_eos_token",
        },
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        images={"image_processor_type": images, **sizes, **NORMAL},
        processor={"processor_class": name},
    )


def _framed(name: str, *, text: dict[str, Any], vision: dict[str, Any], **others: Any) -> ImageFamily:
    """Return a family with one placeholder that becomes as many, and images of one size."""
    images = {"image_processor_type": others.pop("images"), "size": {"height": 28, "width": 28}, **NORMAL}
    return ImageFamily(
        text=TEXT | text,
        vision={"image_size": 28, "patch_size": 14, "hidden_size": 32, "intermediate_size": 48} | vision,
        tokens={"image_token": "<image>", **others.pop("tokens", {})},
        ids={"image_token_id": "image_token", **others.pop("ids", {})},
        placeholder=others.pop("placeholder", "<image>"),
        images=images | others.pop("image_settings", {}),
        processor={"processor_class": name, **others.pop("processor", {})},
        others=others,
    )


QWEN_VISION = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
NEWER_VISION = QWEN_VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
INTERLEAVED = {"rope_parameters": AXES | {"mrope_interleaved": True}}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, ImageFamily] = {
    "qwen2_vl": _qwen("Qwen2VLProcessor", text={}, vision={"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VLProcessor",
        text={},
        vision=QWEN_VISION | {"window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    ),
    "qwen3_vl": _qwen("Qwen3VLProcessor", text=INTERLEAVED, vision=NEWER_VISION, patch_size=16),
    "qwen3_vl_moe": _qwen("Qwen3VLProcessor", text=INTERLEAVED | MIXTURE, vision=NEWER_VISION, patch_size=16),
    "gemma3": _framed(
        "Gemma3Processor",
        text={"sliding_window": 4, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
        vision=LAYERS | {"model_type": "siglip_vision_model"},
        images="Gemma3ImageProcessor",
        tokens={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        ids={"boi_token_id": "boi_token", "eoi_token_id": "eoi_token"},
        placeholder="<start_of_image>",
        processor={"image_seq_length": 4},
        mm_tokens_per_image=4,
    ),
    "llava": _framed(
        "LlavaProcessor",
        text={"model_type": "llama"},
        vision=LAYERS | {"model_type": "clip_vision_model"},
        images="CLIPImageProcessor",
        image_settings={"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        processor={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        vision_feature_layer=-1,
    ),
    "internvl": _framed(
        "InternVLProcessor",
        text={"model_type": "qwen2"},
        vision=LAYERS | {"image_size": [28, 28], "patch_size": [14, 14]},
        images="GotOcr2ImageProcessor",
        image_settings={"crop_to_patches": False},
        tokens={
            "image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        placeholder="<IMG_CONTEXT>",
        processor={"image_seq_length": 1},
        image_seq_length=1,
        downsample_ratio=0.5,
    ),
    "qwen3_5": _qwen(
        "Qwen3VLProcessor",
        text=INTERLEAVED
        | LINEAR
        | {"rope_parameters": INTERLEAVED["rope_parameters"] | {"partial_rotary_factor": 1.0}},
        vision=QWEN_VISION | {"num_position_embeddings": 64},
        patch_size=16,
    ),
    "glm4v": _qwen(
        "Glm4vProcessor",
        text={"rope_parameters": AXES | {"partial_rotary_factor": 1.0}},
        vision=QWEN_VISION | {"image_size": 56},
        images="Glm4vImageProcessor",
    ),
}
"""Families by transformers' model type."""

IMAGE_FAMILIES = tuple(FAMILIES)


def _tokenizer(names: dict[str, str]) -> Any:
    """Return a tokenizer of bytes with special tokens, some of them named."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = list(dict.fromkeys([*ORDINARY, *names.values()]))
    vocab = {token: index for index, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=names
    )


def make_image_family(name: str, folder: Path, **changes: Any) -> None:
    """Write the random model of a family, with its tokenizer, processor and chat template.

    Args:
        name: One of IMAGE_FAMILIES.
        folder: The folder, which may not exist.
        **changes: Fields of the text configuration that are replaced.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(family.tokens)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(family.images | family.processor))
    (folder / "processor_config.json").write_text(json.dumps(family.processor))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", family.placeholder))
    ids = {one: tokenizer.convert_tokens_to_ids(family.tokens[token]) for one, token in family.ids.items()}
    fields = {"text_config": family.text | changes, "vision_config": family.vision, "tie_word_embeddings": False}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **fields, **family.others, **ids)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():  # biases and norms: a lost one must be seen
            if tensor.ndim <= 1:
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=random))
    model.save_pretrained(folder)
