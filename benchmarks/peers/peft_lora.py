"""transformers with peft in benchmarks/lora.py: it trains the adapter, and writes the initial policy and adapter."""

from pathlib import Path
from typing import Any

import torch
import transformers
from _lora_workload import ADAPTER, POLICY, PRESETS, RANKS
from peft import LoraConfig, PeftModel, get_peft_model
from transformers_learner import Padded


def prepare(folder: Path, preset: str) -> None:
    """Write a policy with random weights, and an adapter with a random B, so that no gradient is zero."""
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**PRESETS[preset].policy))
    model.save_pretrained(folder / POLICY)
    config = LoraConfig(
        r=RANKS[preset], lora_alpha=2 * RANKS[preset], target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0.0, 0.01)
    adapted.save_pretrained(str(folder / ADAPTER))


def opened(folder: Path, preset: str, system: str, *, recompute: bool) -> Padded:  # noqa: ARG001 - there is one
    """Return the learner that trains the adapter."""

    def adapted(model: Any) -> Any:
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return PeftModel.from_pretrained(model, folder / ADAPTER, is_trainable=True)

    return Padded(folder / POLICY, PRESETS[preset], adapted=adapted)
