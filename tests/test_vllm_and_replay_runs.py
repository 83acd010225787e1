"""Both trainers on a bfloat16 mixture, with real vLLM and Megatron: the learner replays, and every update is proven."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from async_runs import train_async_here
from tiny_run import TinyRun, make_tiny_run, train_here

from rl_metrics.trackers.jsonl import read_metrics

pytest.importorskip("vllm")

STEPS = 2
BFLOAT16: dict[str, Any] = {
    "rollout__engine": "vllm",
    "vllm__dtype": "bfloat16",
    "vllm__kv_cache_gib": 0.01,
    "optimizer__dtype": "bfloat16",
    "optimizer__learning_rate": 1e-3,
    "trainer__steps": STEPS,
    "trainer__validate_every": 0,
    "trainer__validate_first": False,
    "trainer__checkpoint_every": 0,
}


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    """Inputs of a tiny run with a mixture of experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    run = make_tiny_run(tmp_path)
    torch.manual_seed(0)
    config = Qwen3MoeConfig.from_pretrained(run.folder / "policy").to_dict()
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    dropped = ("model_type", "architectures", "layer_types", "dtype")
    kept = {name: value for name, value in config.items() if name not in dropped}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**kept, **sizes})).float().save_pretrained(run.folder / "policy")
    return run


@pytest.mark.parametrize(
    "train", [pytest.param(train_here, marks=pytest.mark.soak), train_async_here], ids=["sync", "async"]
)
def test_a_bfloat16_mixture_trains_with_replay_and_proof(train: Callable[..., int], run: TinyRun) -> None:
    assert train(run, **BFLOAT16) == 0
    steps = [row.metrics for row in read_metrics(run.run_folder / "metrics.jsonl") if row.step > 0]
    assert len(steps) == STEPS
    assert 0 < steps[0]["router/rerouted_share"] < 0.1
    assert all(0 < step["router/rerouted_share"] < 0.6 for step in steps), "later, also of older weights"
    assert all(step["router/unknown_share"] == 0 for step in steps)
    assert sum(step["rollout/audited_sessions"] for step in steps) > 0
    assert all(step["rollout/audit_failures"] == 0 for step in steps)
    published = [step["weights/canary_max_diff"] for step in steps if "weights/canary_max_diff" in step]
    assert published
    assert all(0 < worst < 0.3 for worst in published)
    first = steps[0]  # its rollouts are from the weights that it trains
    assert first["router/k3_kl/replay"] < first["router/k3_kl/no_replay"]
