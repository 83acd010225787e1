"""`[lora]` in the checks, the plan and the engine's options."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from invented_inputs import invented_inputs

from rl_core.errors import SettingsError
from rl_distill import LoraOptions
from rl_distill.checkpoints.peft_folder import write_adapter
from rl_rollout.engines import TransformersOptions
from rl_trainer_parts.checks.all_checks import check_settings
from rl_trainer_parts.checks.models import trainable_problems
from rl_trainer_parts.commands.plan import describe_plan
from rl_trainer_parts.rollouts.engines import engine_options
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
OF_LAYER = (2 * 2048 + 2 * 1536) + 3 * 5120
"""Sum of rows and columns of a layer's matrices: its adapter's parameters per unit of rank."""
TOTAL = 2 * (15 * 1024**2 + 2 * 1024 + 2 * 128) + 1024 + 1024**2
GIB, MIB = 2**30, 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with all files that the checks read."""
    (tmp_path / "train.jsonl").write_text("{}")
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "model.safetensors"):
        (policy / name).write_text("")
    return tmp_path


def settings_with(folder: Path, **sections: dict[str, Any]) -> Settings:
    given: dict[str, Any] = {
        "policy": {"path": folder / "policy"},
        "prompts": {"train": folder / "train.jsonl"},
        "reward": {"function": "exact_match"},
    }
    return build_settings({**given, **{name: {**given.get(name, {}), **values} for name, values in sections.items()}})


def problems(folder: Path, **sections: dict[str, Any]) -> list[str]:
    settings = settings_with(folder, **sections)
    try:
        check_settings(settings, trainable_problems(settings))
    except SettingsError as error:
        return str(error).splitlines()
    return []


def plan(folder: Path, **sections: dict[str, Any]) -> str:
    return describe_plan(settings_with(folder, **sections), invented_inputs(train=30))


def test_an_adapter_is_possible(folder: Path) -> None:
    assert problems(folder, lora={"rank": 8, "target_modules": ["q_proj", "mlp.*"], "serving": "merged"}) == []


def test_all_that_is_wrong_is_told_at_once(folder: Path) -> None:
    found = problems(
        folder,
        lora={"target_modules": ["q_proj"]},
        vllm={"max_lora_rank": 4, "lora_target_modules": ["q_proj"], "max_adapters": 2},
    )
    assert [line.partition(" ")[0] for line in found] == [
        "vllm.max_lora_rank",
        "vllm.lora_target_modules",
        "vllm.max_adapters",
        "lora.rank",
    ]
    assert found[-1].startswith("lora.rank = 0 trains all weights; found adapter settings: lora.target_modules.")


def test_impossible_values_are_told_at_once(folder: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        problems(folder, lora={"rank": 8, "alpha": 0, "dropout": 1.5, "target_modules": []})
    assert str(refused.value).splitlines() == [
        "lora.alpha must be above 0, or none; found 0.",
        "lora.dropout must be below 1; found 1.5.",
        "lora.target_modules must be of length 1 or more; found [].",
    ]


def test_an_adapter_without_rank_is_refused_and_not_left_out(folder: Path) -> None:
    assert problems(folder, lora={"alpha": 16, "path": folder}) == [
        "lora.rank = 0 trains all weights; found adapter settings: lora.alpha, lora.path. Set lora.rank, or leave them "
        "out."
    ]
    assert problems(folder, lora={"rank": 0}) == []


def test_patterns_and_folders_that_do_not_fit_are_named(folder: Path) -> None:
    (wrong,) = problems(folder, lora={"rank": 8, "target_modules": ["qkv"]})
    assert wrong.startswith("lora.target_modules has 'qkv': ")
    assert "q_proj" in wrong
    (missing,) = problems(folder, lora={"rank": 8, "path": folder / "none"})
    assert missing.startswith("lora.path: ")
    assert str(folder / "none" / "adapter_config.json") in missing
    tensors = {"q_proj.lora_A.weight": torch.zeros(4, 8), "q_proj.lora_B.weight": torch.zeros(8, 4)}
    write_adapter(folder / "another", tensors, options=LoraOptions(rank=4), matrices=[], base=None)
    (another,) = problems(folder, lora={"rank": 8, "path": folder / "another"})
    assert "rank is 4, this learner's 8" in another


def test_the_engine_has_room_for_the_adapter_that_it_is_given(folder: Path) -> None:
    options = engine_options(settings_with(folder, lora={"rank": 8}))
    assert (options.max_lora_rank, {*options.lora_target_modules}) == (8, LINEAR)
    some = settings_with(folder, lora={"rank": 4, "target_modules": ["q_proj"]}, rollout={"engine": "transformers"})
    assert isinstance(engine_options(some), TransformersOptions)
    assert engine_options(some).lora_target_modules == ("q_proj",)
    for without in (
        engine_options(settings_with(folder)),
        engine_options(settings_with(folder, lora={"rank": 8, "serving": "merged"})),
        engine_options(settings_with(folder, lora={"rank": 8}), serves_adapter=False),
    ):
        assert (without.max_lora_rank, without.lora_target_modules) == (0, ())


def test_the_plan_counts_what_trains_and_what_travels(folder: Path) -> None:
    lines = plan(folder, lora={"rank": 8}, optimizer={"learning_rate": 1e-4}, algorithm={"kl_coefficient": 0.1})
    trained = 8 * 2 * OF_LAYER
    assert f"  trains     {trained:,} of {TOTAL:,} parameters ({trained / TOTAL:.2%}); the others are frozen" in lines
    assert (
        "             rank 8, B @ A scaled by 2, on 14 matrices:\n             q_proj, k_proj, v_proj, o_proj, "
        in lines
    )
    assert f"  an update  {4 * trained / MIB:.2f} MiB, served beside the base model" in lines
    assert f"  learner    {(4 * TOTAL + 16 * trained) / MIB:.2f} MiB (weights, gradients, optimizer)" in lines
    assert "  reference  none: it shares the learner's (weights)" in lines
    assert "rate       0.0001; LoRA usually needs ten times the learning rate of full training" in lines
    merged = plan(folder, lora={"rank": 8, "serving": "merged"})
    assert f"  an update  {4 * TOTAL / MIB:.2f} MiB, all weights with the adapter merged" in merged
    assert "optimizer.learning_rate = 1e-06 looks like a rate for full training" in merged
    assert "ten times as much, 1e-05" in merged
    assert "Adapter" not in plan(folder)
