"""Impossible layouts, clusters and critics are refused by arithmetic alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from invented_inputs import invented_inputs
from refusals import refusal

from rl_core.errors import SettingsError
from rl_trainer_parts.checks.all_checks import check_values
from rl_trainer_parts.commands.plan import describe_plan
from rl_trainer_parts.learning.start_learners import gpus_per_rank, rank_pool
from rl_trainer_parts.rollouts.engines import replica_pool
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}


SHARED_GPU = {"weights.transport": "ipc", "rollout.placement": "process"}


def settings_with(changes: dict[str, Any]) -> Settings:
    values: dict[str, dict[str, Any]] = {
        "policy": {"path": Path("p")},
        "prompts": {"train": Path("t")},
        "reward": {"function": "exact_match"},
    }
    for name, value in changes.items():
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = value
    return build_settings(values, {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"parallel.ranks": 4, "parallel.tensor": 3},
            "parallel.ranks = 4 must be a multiple of tensor * pipeline * context",
        ),
        ({"parallel.ranks": 2}, 'set cluster.placement to "process" or "ray"; found "inline"'),
        ({"parallel.sequence": True}, "sequence = true needs tensor > 1"),
        ({"parallel.virtual_pipeline": 2}, "virtual_pipeline = 2 needs pipeline > 1"),
        ({"cluster.ray_address": "host:1"}, 'cluster.ray_address needs cluster.placement = "ray" or rollout.placement'),
        (
            {"replicas.count": 2},
            "replicas.count = 2, replicas.cpus and replicas.gpus need engines in separate processes",
        ),
        ({"weights.transport": "ipc"}, 'set rollout.placement to "process" and replicas.count to 1, or use'),
        (
            {**SHARED_GPU, "replicas.count": 2},
            'weights.transport = "ipc" needs one engine in its own process and a single-rank learner on the same GPU',
        ),
        ({**SHARED_GPU, "vllm.tensor_parallel_size": 2}, "set vllm.tensor_parallel_size to 1, or use"),
        (
            {**SHARED_GPU, "cluster.placement": "process"},
            'set cluster.placement to "inline" and parallel.ranks to 1, or use',
        ),
        (
            {"rollout.offload_keeps_weights": False, "lora.rank": 4},
            "rollout.offload_keeps_weights = false drops the",
        ),
        ({"replicas.count": 0, "rollout.placement": "process"}, "replicas.count must be at least 1; found 0"),
        (
            {"rollout.placement": "ray", "cluster.ray_address": "host:1"},
            "replicas.gpus must be set when the run joins a Ray cluster",
        ),
        ({"cluster.gpus_per_rank": 1}, "reserve nothing for a rank in the trainer's process"),
        ({"cluster.placement": "ray", "cluster.ray_address": "host:1"}, "cluster.gpus_per_rank must be set when the"),
        ({"cluster.gpus_per_rank": -1}, "cluster.gpus_per_rank must be at least 0, or none; found -1"),
        ({"trainer.epochs": 0}, "trainer.epochs must be at least 1; found 0"),
        ({"trainer.steps": 1e18}, "trainer.steps must be at most 1000000000; found 1000000000000000000"),
        ({"rollout.group_size": 1e12}, "rollout.group_size must be at most 1000000000; found 1000000000000"),
        ({"run.seed": 2**64}, f"run.seed must be at most {2**63 - 1}; found {2**64}"),
        ({"run.seed": 2**63}, f"run.seed must be at most {2**63 - 1}; found {2**63}"),
        ({"prompts.date": "31.1.2026"}, "prompts.date must be a day such as \"2026-01-31\"; found '31.1.2026'"),
        ({"critic.value_clip": 0}, "critic.value_clip must be above 0; found 0"),
        ({"weights.transport": "tcp"}, 'weights.transport = "tcp" needs engines in separate processes'),
        (
            {"weights.transport": "direct", "rollout.placement": "process"},
            "needs every rank in its own process, to send its own shards",
        ),
        (
            {"weights.transport": "direct", "cluster.placement": "process", "trainer.offload_learner": True},
            "trainer.offload_learner = true frees them before the engine has received them",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_values(settings_with(changes))
    assert said in str(refused.value)


def test_one_engine_beside_a_learner_of_one_rank_may_share_its_gpu() -> None:
    offloaded = {**SHARED_GPU, "rollout.offload_engine": True, "rollout.offload_keeps_weights": False}
    assert refusal(check_values, settings_with(offloaded)) is None
    merged = {"rollout.offload_keeps_weights": False, "lora.rank": 4, "lora.serving": "merged"}
    assert refusal(check_values, settings_with(merged)) is None


def test_four_ranks_in_processes_are_taken() -> None:
    ranks = {"parallel.ranks": 4, "parallel.tensor": 2, "cluster.placement": "process"}
    assert refusal(check_values, settings_with(ranks)) is None
    engines = {"rollout.placement": "process", "weights.transport": "direct"}
    assert (
        refusal(check_values, settings_with({"parallel.ranks": 2, "cluster.placement": "process", **engines})) is None
    )


def test_each_rank_has_a_gpu_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = settings_with({"parallel.ranks": 2, "cluster.placement": "process"})
    on_cpus = settings_with({"parallel.ranks": 2, "cluster.placement": "process", "cluster.gpus_per_rank": 0})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert rank_pool(shared) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    pool, without = rank_pool(shared), rank_pool(on_cpus)
    assert pool is not None
    assert pool.gpus == 1
    assert without is not None  # a pool without GPUs hides the existing ones
    assert without.gpus == 0
    assert gpus_per_rank(settings_with({})) == 0


def test_replicas_share_out_the_gpus_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    one, two = (settings_with({"rollout.placement": "process", "replicas.count": count}) for count in (1, 2))
    assert replica_pool(one) is None
    pool = replica_pool(two)
    assert pool is not None
    assert (pool.size, pool.gpus) == (2, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert replica_pool(two) is None


def test_the_plan_says_whether_this_machine_has_what_the_ranks_ask_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    settings = settings_with({"policy.path": tmp_path, "parallel.ranks": 2, "cluster.placement": "process"})
    plan = describe_plan(settings, invented_inputs(train=1))
    assert "and 1 GPU, room for 1 of 2 ranks, so a run here would be refused" in plan
