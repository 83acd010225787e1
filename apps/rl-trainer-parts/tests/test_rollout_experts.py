"""The experts of a mixture's rollouts and the nuclei of truncated distributions, from the engine to the learner."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from invented_inputs import invented_inputs

from rl_core import InProcessQueue
from rl_core.errors import DataError
from rl_core.testing import make_prompts, make_trajectory
from rl_core.weights import BFLOAT16_TOLERANCES, REROUTED_TOLERANCES, ProofTolerances
from rl_trainer_parts.commands.plan import describe_plan
from rl_trainer_parts.learning.mixtures import expert_shape, replays
from rl_trainer_parts.learning.step import for_critic
from rl_trainer_parts.rollouts.engines import engine_options
from rl_trainer_parts.rollouts.setup import proof_tolerances, put_trajectories, queue_tasks, sampling_params
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
DENSE = {**MIXTURE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
TRUNCATED = {"top_p": 0.9, "top_k": 3}


def settings_of(folder: Path, config: dict[str, object] = MIXTURE, **changes: dict[str, object]) -> Settings:
    (folder / "config.json").write_text(json.dumps(config))
    values: dict[str, dict[str, object]] = {
        "policy": {"path": folder},
        "prompts": {"train": "train.jsonl", "max_tokens": 100},
        "rollout": {"engine": "vllm", "prompts_per_step": 6, "group_size": 4, "max_response_tokens": 28},
    }
    return build_settings({**values, **{name: {**values.get(name, {}), **change} for name, change in changes.items()}})


def test_the_learner_gets_what_was_told_and_minus_one_for_the_rest(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    (prompt, other) = prompts = make_prompts(2)
    told = np.arange(30, dtype=np.int16).reshape(5, 3, 2)
    with closing(InProcessQueue(queue_tasks(settings, order="issue"))) as queue:
        queue.issue(prompts, num_sessions=1)
        put_trajectories(queue, settings, [(prompt, make_trajectory("p0", 0, routed_experts=told))])
        put_trajectories(queue, settings, [(other, make_trajectory("p1", 0))])
        column = queue.lease("train", groups=2, deadline_s=60).batch.ragged("routed_experts")
    assert column[0].tolist() == told.tolist()
    assert column[1].tolist() == np.full((5, 3, 2), -1).tolist()


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (DENSE, {}),
        (MIXTURE, {"vllm": {"capture_experts": False}}),
        (MIXTURE, {"policy": {"backend": "transformers"}}),
        (MIXTURE, {"rollout": {"engine": "transformers"}}),
    ],
)
def test_where_nobody_tells_or_replays_them_there_is_no_column(
    tmp_path: Path, config: dict[str, object], changes: dict[str, dict[str, object]]
) -> None:
    settings = settings_of(tmp_path, config, **changes)
    assert expert_shape(settings) is None
    told = make_trajectory("p0", 0, routed_experts=np.zeros((5, 3, 2), np.int16))
    with closing(InProcessQueue(queue_tasks(settings, order="issue"))) as queue:
        queue.issue(make_prompts(1), num_sessions=1)
        put_trajectories(queue, settings, [(make_prompts(1)[0], told)])
        assert "routed_experts" not in queue.lease("train", groups=1, deadline_s=60).batch
    if "policy" in changes:
        assert not engine_options(settings).capture_experts


def test_the_plan_has_their_bytes(tmp_path: Path) -> None:
    inputs = invented_inputs(train=30)
    changes = {"rollout": {"prompts_per_step": 4096, "group_size": 256, "max_response_tokens": 156}}
    text = describe_plan(settings_of(tmp_path, **changes), inputs)
    assert "experts    12 bytes a token, in the engine and in trajectories: at most 3.00 GiB a step" in text
    assert "experts" not in describe_plan(settings_of(tmp_path, DENSE), inputs)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vllm": {"capture_experts": False}}, "vllm.capture_experts = false"),
        (
            {"rollout": {"engine": "transformers"}},
            'rollout.engine = "transformers" does not report routing; "vllm" does',
        ),
    ],
)
def test_the_plan_says_that_and_why_a_mixture_trains_without_replay(
    tmp_path: Path, changes: dict[str, dict[str, object]], why: str
) -> None:
    inputs = invented_inputs(train=30)
    without, proven = "a mixture without replay", "only the mean of the canary's differences is compared: 0.2 nats"
    text = describe_plan(settings_of(tmp_path, **changes), inputs)
    assert without in text
    assert why in text
    vllm = {"dtype": "bfloat16", **changes.get("vllm", {})}
    assert proven in describe_plan(settings_of(tmp_path, **{**changes, "vllm": vllm}), inputs)
    assert "which the learner replays" in describe_plan(settings_of(tmp_path), inputs)
    dense = describe_plan(settings_of(tmp_path, DENSE, **changes), inputs)
    assert "replay" not in dense


def test_the_plan_says_that_a_class_of_transformers_does_not_replay(tmp_path: Path) -> None:
    inputs, why = invented_inputs(train=30), "transformers' class cannot be given the engine's experts"
    mixtral = {**MIXTURE, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    for config, changes in ((mixtral, {}), (MIXTURE, {"policy": {"backend": "transformers"}})):
        settings = settings_of(tmp_path, config, **changes)
        assert why in describe_plan(settings, inputs)
        assert expert_shape(settings) is None
        assert not engine_options(settings).capture_experts
    dense = {name: value for name, value in DENSE.items() if "expert" not in name}
    assert why not in describe_plan(settings_of(tmp_path, dense, policy={"backend": "transformers"}), inputs)


def test_a_canary_proves_a_bfloat16_mixture_where_the_learner_replays(tmp_path: Path) -> None:
    coarse = {"dtype": "bfloat16"}
    settings = settings_of(tmp_path, vllm=coarse)
    assert replays(settings)
    assert proof_tolerances(settings) == BFLOAT16_TOLERANCES
    untold = settings_of(tmp_path, vllm={**coarse, "capture_experts": False})
    assert not replays(untold)
    assert proof_tolerances(untold) == REROUTED_TOLERANCES
    assert proof_tolerances(settings_of(tmp_path, DENSE, vllm=coarse)) == BFLOAT16_TOLERANCES
    told_so = settings_of(tmp_path, vllm={**coarse, "capture_experts": False}, trainer={"proof_tolerance": 2.0})
    assert proof_tolerances(told_so).canary == 2.0
    assert proof_tolerances(settings_of(tmp_path, vllm={"capture_experts": False})) == ProofTolerances()


def test_a_mixture_of_transformers_class_is_not_replayed(tmp_path: Path) -> None:
    mixtral = {
        **{name: size for name, size in DENSE.items() if "size" in name or name.startswith("num_")},
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
    }
    settings = settings_of(tmp_path, mixtral, vllm={"dtype": "bfloat16"})
    assert proof_tolerances(settings) == REROUTED_TOLERANCES
    plan = describe_plan(settings, invented_inputs(train=3))
    assert "transformers' class cannot be given the engine's experts" in plan


def test_the_learner_gets_nuclei_and_the_critic_does_not(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, DENSE, rollout=TRUNCATED)
    assert sampling_params(settings).max_nucleus == 6
    nuclei = np.arange(30, dtype=np.int32).reshape(5, 6)
    prompts = make_prompts(2)
    untrained = make_trajectory("p1", 0, loss_mask=np.zeros(5, np.bool_))
    with closing(InProcessQueue(queue_tasks(settings, order="issue"))) as queue:
        queue.issue(prompts, num_sessions=1)
        put_trajectories(queue, settings, [(prompts[0], make_trajectory("p0", 0, nucleus_ids=nuclei))])
        put_trajectories(queue, settings, [(prompts[1], untrained)])
        batch = queue.lease("train", groups=2, deadline_s=60).batch
    assert batch.ragged("nucleus_ids")[0].tolist() == nuclei.tolist()
    assert batch.ragged("nucleus_ids")[1].tolist() == np.full((5, 6), -1).tolist()
    assert for_critic(batch).names == batch.names - {"nucleus_ids"}


def test_trajectories_without_nuclei_are_refused(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, DENSE, rollout=TRUNCATED)
    (prompt,) = make_prompts(1)
    with closing(InProcessQueue(queue_tasks(settings, order="issue"))) as queue:
        queue.issue([prompt], num_sessions=1)
        with pytest.raises(DataError, match=r"nucleus_ids; prompt p0, session 0 has none.*'single_turn'"):
            put_trajectories(queue, settings, [(prompt, make_trajectory("p0", 0))])


def test_whole_distributions_have_no_column(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, DENSE)
    assert sampling_params(settings).max_nucleus is None
    row = make_trajectory("p0", 0, nucleus_ids=np.zeros((5, 6), np.int32))
    with closing(InProcessQueue(queue_tasks(settings, order="issue"))) as queue:
        queue.issue(make_prompts(1), num_sessions=1)
        put_trajectories(queue, settings, [(make_prompts(1)[0], row)])
        assert "nucleus_ids" not in queue.lease("train", groups=1, deadline_s=60).batch


def test_the_plan_has_the_bytes_of_nuclei(tmp_path: Path) -> None:
    inputs = invented_inputs(train=30)
    text = describe_plan(settings_of(tmp_path, DENSE, rollout=TRUNCATED), inputs)
    assert "nuclei     24 bytes a token" in text
    assert "nuclei" not in describe_plan(settings_of(tmp_path, DENSE), inputs)
