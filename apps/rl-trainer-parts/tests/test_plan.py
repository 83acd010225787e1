"""The plan of `train --dry-run`, with arithmetic to check by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from invented_inputs import invented_inputs

from rl_rollout.engines import EngineChoice
from rl_trainer_parts.checks.algorithm import aggregation_notes
from rl_trainer_parts.commands.plan import describe_plan
from rl_trainer_parts.learning import engine_choice
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
NORMS = 2 * (2 * 1024 + 2 * 128) + 1024
ATTENTION, FEED_FORWARD, EMBEDDING = 2 * 3 * 1024**2, 2 * 12 * 1024**2, 1024**2
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "norm_topk_prob": True,
}
OF_EXPERTS, ROUTERS = 2 * 16 * 3 * 1024**2, 2 * 16 * 1024
MIB, INPUTS = 2**20, invented_inputs(train=30)


def make_model(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return make_model(tmp_path / "policy")


def plan_settings(policy: Path, **changes: dict[str, object]) -> Settings:
    values: dict[str, dict[str, object]] = {
        "policy": {"path": policy},
        "prompts": {"train": "train.jsonl", "max_tokens": 100},
        "reward": {"function": "exact_match"},
        "rollout": {"engine": "vllm", "prompts_per_step": 6, "group_size": 4, "max_response_tokens": 28},
        "optimizer": {"micro_batch_tokens": 1000},
        "trainer": {"steps": 10, "minibatches": 2, "validate_every": 5, "checkpoint_every": 3},
    }
    return build_settings({**values, **{name: {**values.get(name, {}), **change} for name, change in changes.items()}})


def test_plan_shows_the_arithmetic_of_batches(policy: Path) -> None:
    text = describe_plan(plan_settings(policy), invented_inputs(train=30, validation=7, test=8))
    assert "6 prompts x 4 sessions = 24 trajectories" in text
    assert "2 optimizer updates, at most 4 micro-batches in total" in text  # 24 * 128 / 1000 = 3.07, rounded up
    assert "100 + 28 = 128 a trajectory" in text
    assert "10 steps, 240 trajectories, 2.00 epochs" in text
    assert "30 to train on, 8 to test at the start and the end" in text
    assert "7 for validation every 5 steps" in text
    assert "responses to each" not in text
    several = plan_settings(policy, prompts={"validation_samples": 8, "validation_temperature": 0.6})
    assert "8 responses to each of these" in describe_plan(several, invented_inputs(train=30, validation=7, test=8))
    assert "checkpoints/step_N every 3 steps and at the end, the newest 2 kept" in text
    assert "Writes to runs/run/" in text


def test_a_model_that_ranks_cannot_divide(tmp_path: Path) -> None:
    sizes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "tie_word_embeddings": False}
    settings = {"optimizer": {"dtype": "bfloat16"}, "cluster": {"placement": "process"}}
    mistral = make_model(tmp_path / "mistral", **sizes)
    parameters = ATTENTION + FEED_FORWARD + 2 * EMBEDDING + 5 * 1024

    def lines(**parallel: object) -> list[str]:
        return describe_plan(plan_settings(mistral, **settings, parallel=parallel), INPUTS).splitlines()

    def mib(*size: float) -> list[str]:
        return [f"{one * parameters / MIB:.2f} MiB" for one in size]

    total, weights, gradients = mib(18, 2, 4)
    whole = f"             whole on each rank: {weights} of weights and {gradients} of gradients"
    alone = lines(ranks=1)
    start = alone.index(f"  learner    {total} (weights, gradients, optimizer)")
    assert alone[start + 1] == whole
    assert "activations on a GPU" not in "\n".join(alone)
    (divided,) = mib(6 + 12 / 4)
    four = lines(ranks=4)
    start = four.index(f"  learner    {total} on each of 4 ranks (weights, gradients, optimizer)")
    hint = f"             parallel.distributed_optimizer = true would divide the rest, to {divided} on each rank"
    assert four[start + 1 : start + 3] == [whole, hint]
    four = lines(ranks=4, distributed_optimizer=True)
    start = four.index(f"  learner    {divided} on each of 4 ranks (weights, gradients, optimizer)")
    assert four[start + 1] == whole
    assert "would divide" not in "\n".join(four)


def test_plan_shows_roles_and_their_memory(policy: Path) -> None:
    plain = describe_plan(plan_settings(policy), INPUTS)
    count = ATTENTION + FEED_FORWARD + EMBEDDING + NORMS
    assert f"Memory, without activations, for {count:,} parameters\n" in plain
    assert f"  learner    {16 * count / MIB:.2f} MiB (weights, gradients, optimizer)\n" in plain
    assert f"  engine     {4 * count / MIB:.2f} MiB weights" in plain
    assert "reference" not in plain
    assert "vllm, float32, in the learner's process; loop single_turn" in plain
    changes = {"algorithm": {"kl_coefficient": 0.01}, "rollout": {"placement": "process"}}
    changed = describe_plan(plan_settings(policy, **changes, vllm={"dtype": "float16"}), INPUTS)
    assert "vllm, float16" in changed
    assert "frozen copy of the policy (KL coefficient 0.01)" in changed
    assert "in a process of its own" in changed


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_the_plan_says_which_engine_was_chosen_and_why(
    policy: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = EngineChoice(name=name, reason="vLLM was asked")
    monkeypatch.setattr(engine_choice, "choose_engine", lambda folder, dtype: chosen)
    lines = describe_plan(plan_settings(policy, rollout={"engine": "auto"}), INPUTS).splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith(f"  engine     {name}, float32"))
    assert lines[at + 1].strip() == "rollout.engine = auto: vLLM was asked"
    assert "auto: " not in describe_plan(plan_settings(policy, rollout={"engine": name}), INPUTS)
    joined = {"placement": "ray", "ray_address": "10.0.0.1:6379"}
    assert engine_choice.engine_name(plan_settings(policy, rollout={"engine": "auto"}, cluster=joined)) == "vllm"


def test_plan_shows_the_objective(policy: Path) -> None:
    plain = describe_plan(plan_settings(policy), INPUTS)
    assert "  policy     advantage grpo; loss ppo_clip, clip 0.2 below and 0.2 above\n" in plain
    assert "against the logprobs of the engine\n" in plain
    assert "  average    token-mean\n  KL         none\n" in plain
    chosen = {"policy_loss": "gspo", "clip_high": 0.001, "aggregation": "seq-mean-token-mean", "kl_coefficient": 0.1}
    settings = plan_settings(
        policy,
        algorithm={**chosen, "kl_target": 0.02, "old_logprobs": "recompute"},
        correction={"weights": "token", "reject": {"token_k3": 0.1}},
    )
    text = describe_plan(settings, INPUTS)
    assert "loss gspo, clip 0.0003 below and 0.001 above\n" in text
    assert "against the logprobs of the learner before the update\n" in text
    assert "  KL         k3 in the loss, coefficient 0.1, adapted to 0.02 nats a token\n" in text
    assert "  correction weights per token, at most 2\n  rejection  by token_k3\n" in text
    assert "clip" not in describe_plan(plan_settings(policy, algorithm={"policy_loss": "gpg"}), INPUTS)


def test_greedy_sessions_and_truncated_ones_are_said(policy: Path) -> None:
    plain = describe_plan(plan_settings(policy), INPUTS)
    changes = {"algorithm": {"advantage": "remax"}, "rollout": {"mask_truncated": True, "group_size": 1}}
    text = describe_plan(plan_settings(policy, **changes), INPUTS)
    for line in ("and a greedy session for each prompt", "token-mean, without sessions that a limit ended"):
        assert line in text
        assert line not in plain
    assert "6 prompts x 1 session = 6 trajectories" in text


@pytest.mark.parametrize("loss", ["gspo", "geo_mean"])
def test_a_loss_of_whole_responses_averages_over_responses(policy: Path, loss: str) -> None:
    (note,) = aggregation_notes(plan_settings(policy, algorithm={"policy_loss": loss}))
    assert 'algorithm.aggregation = "token-mean" weights longer responses more' in note
    as_in_paper = {"policy_loss": loss, "aggregation": "seq-mean-token-mean"}
    assert list(aggregation_notes(plan_settings(policy, algorithm=as_in_paper))) == []
    assert list(aggregation_notes(plan_settings(policy))) == []


def test_plan_shows_ranks_and_critic(policy: Path) -> None:
    changes = {
        "parallel": {"ranks": 4, "tensor": 2},
        "cluster": {"placement": "process", "cpus_per_rank": 0.5},
        "algorithm": {"advantage": "gae"},
        "trainer": {"epochs": 3},
    }
    text = describe_plan(plan_settings(policy, **changes), INPUTS)
    assert "4 ranks in processes: tensor 2, data 2" in text
    assert "reserved for each: 0.5 CPUs and 0 GPUs" in text
    assert "critic     the policy's layers with a value head of zeros; learning rate 1e-05" in text
    assert "in 6 optimizer updates, " in text
    memory = 16 * ((ATTENTION + FEED_FORWARD + EMBEDDING) // 2 + NORMS) / MIB
    assert f"  learner    {memory:.2f} MiB on each of 4 ranks (weights, gradients, optimizer)" in text
    value_head = 16 * 1024 / MIB
    assert f"  critic     {memory + value_head:.2f} MiB on each of 4 ranks, like the learner, for " in text


def test_memory_of_a_step_on_a_gpu_is_said_where_it_is_known(policy: Path) -> None:
    said = "for a step on a GPU with full micro-batches"
    assert said in describe_plan(plan_settings(policy, optimizer={"dtype": "bfloat16"}), INPUTS)
    for other in ({"dtype": "float32"}, {"dtype": "bfloat16", "kernels": "plain"}):
        assert said not in describe_plan(plan_settings(policy, optimizer=other), INPUTS)


def test_plan_shows_a_mixture_of_every_kind(tmp_path: Path) -> None:
    policy, dense = make_model(tmp_path / "mixture", **EXPERTS), make_model(tmp_path / "dense")
    changes = {
        "parallel": {"ranks": 4, "pipeline": 2, "expert": 2},
        "optimizer": {"dtype": "bfloat16"},
        "cluster": {"placement": "process"},
        "algorithm": {"advantage": "gae", "kl_coefficient": 0.1},
        "distillation": {"teachers": {"large": {"model": policy, "engine": "megatron", "tensor": 2}}},
    }
    lines = describe_plan(plan_settings(policy, **changes), INPUTS).splitlines()
    rest = ATTENTION + EMBEDDING + NORMS + ROUTERS
    count, active = rest + OF_EXPERTS, rest + OF_EXPERTS // 8
    said = f"for {count:,} parameters, {active:,} of them active"
    assert f"Memory, without activations, {said}" in lines
    last = OF_EXPERTS // 2 // 2 + (ATTENTION + ROUTERS + NORMS - 1024) // 2 + 1024 + EMBEDDING
    for name, weights, bytes_each in (("learner", last, 18), ("reference", last, 2)):
        (line,) = [line for line in lines if line.startswith(f"  {name}") and "MiB" in line]
        assert f" {bytes_each * weights / MIB:.2f} MiB on the fullest of 4 ranks " in line
    (critic,) = [line for line in lines if line.startswith("  critic") and "MiB" in line]
    assert critic.endswith(said)
    (teacher,) = [line for line in lines if line.startswith("  teacher") and "MiB" in line]
    assert teacher == f"  teacher    large: 1 x {4 * count / MIB:.2f} MiB weights, {said}"
    text = describe_plan(plan_settings(dense, distillation=changes["distillation"]), INPUTS)
    assert "active" not in next(line for line in text.splitlines() if line.startswith("Memory"))
    assert teacher in text
