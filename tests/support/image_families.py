"""Tiny random models with images, each with a tokenizer and the files of its processor."""

import json
from pathlib import Path
from typing import Any

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_IMAGES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
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
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.2,
}


def _tokenizer(names: dict[str, str]) -> Any:
    """Return a tokenizer of bytes with special tokens, some of them named."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [*QWEN, *names.values()]
    vocab = {token: index for index, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=names
    )


def _qwen_processor(folder: Path, *, processor: str, patch_size: int) -> None:
    common = {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    of_images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor,
        "size": size,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(of_images | common))
    of_videos = {"video_processor_type": "Qwen2VLVideoProcessor", "size": size}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(of_videos | common))


def _qwen2_5_vl() -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = QWEN_VISION | {"window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    return {"text_config": TEXT | {"rope_parameters": rope}, "vision_config": vision}


def _qwen3_vl() -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0, "mrope_interleaved": True}
    vision = QWEN_VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, "patch_size": 16}
    return {"text_config": TEXT | {"head_dim": 16, "rope_parameters": rope}, "vision_config": vision}


IMAGE_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""transformers' model types."""


def make_image_family(name: str, folder: Path, **changes: Any) -> None:
    """Write the random model of a family, with its tokenizer, processor and chat template.

    Args:
        name: One of IMAGE_FAMILIES.
        folder: The folder, which may not exist.
        **changes: Fields of the configuration that are replaced.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(QWEN_IMAGES)
    tokenizer.save_pretrained(folder)
    ids = {
        "image_token_id": "image_token",
        "video_token_id": "video_token",
        "vision_start_token_id": "vision_bos_token",
        "vision_end_token_id": "vision_eos_token",
    }
    ids_of = {field: tokenizer.convert_tokens_to_ids(QWEN_IMAGES[own]) for field, own in ids.items()}
    fields = {"qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl}[name]()
    is_newer = name == "qwen3_vl"
    _qwen_processor(
        folder,
        processor="Qwen3VLProcessor" if is_newer else "Qwen2_5_VLProcessor",
        patch_size=fields["vision_config"]["patch_size"],
    )
    (folder / "chat_template.jinja").write_text(
        TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    )
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(fields | ids_of | {"tie_word_embeddings": False} | changes))
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():  # biases and norms: a lost one must be seen
            if tensor.ndim <= 1:
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=random))
    model.save_pretrained(folder)
