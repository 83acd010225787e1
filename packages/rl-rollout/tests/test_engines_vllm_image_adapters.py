"""vLLM with an adapter of a model of images, and models that it would compute wrongly.

Apart from other tests, because a process holds one engine.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from image_engines import ImagePrompts
from image_families import make_image_family
from safetensors.torch import load_file, save_file

from rl_core.errors import EngineError
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions


@pytest.mark.soak
def test_attention_among_the_tokens_of_an_image_is_refused_on_cpus(tmp_path: Path, learner_process_group: None) -> None:
    """On CPUs, vLLM's attention lets a token of an image see only those before it."""
    make_image_family("gemma3", tmp_path, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    file = tmp_path / "model.safetensors"
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in load_file(file).items()
    }
    save_file(renamed, file)  # as vLLM knows them
    options = VLLMOptions(max_model_len=128, max_num_batched_tokens=512, kv_cache_gib=0.02, image_folder=tmp_path)
    with pytest.raises(EngineError, match="does not compute on CPUs"):
        asyncio.run(VLLMEngine(tmp_path, options).start())


@pytest.mark.soak
def test_an_adapter_that_names_modules_as_the_class_does_is_served(tmp_path: Path, learner_process_group: None) -> None:
    """The folder names its language layers otherwise."""
    axes = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rope_parameters": axes}
    make_image_family("qwen2_5_vl", tmp_path / "model", **heads)
    prompts = ImagePrompts(tmp_path / "model", tmp_path / "images")
    sizes: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "max_lora_rank": 8,
    }
    options = VLLMOptions(**sizes, kv_cache_gib=0.02, image_folder=prompts.store.folder)
    engine = VLLMEngine(prompts.model_dir, options)
    asyncio.run(engine.start())
    prompts.check_adapter(engine, rank=8)
    asyncio.run(engine.close())
