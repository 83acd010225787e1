"""What of a step's batch trains: sessions that a limit ended, and the columns of the optimal token baseline."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import example_module, make_tiny_policy
from transformers import AutoModelForCausalLM

from rl_core import Batch, Trajectory
from rl_distill import LearnerOptions
from rl_distill.megatron.learner import MegatronLearner
from rl_metrics.reductions import Recorder
from rl_trainer_parts.learning.step import prepare_batch, update, with_late_columns, with_update
from rl_trainer_parts.reporting.step_metrics import summarize_step
from rl_trainer_parts.settings.sources import build_settings

MASKED = {"rollout": {"mask_truncated": True, "max_response_tokens": 4}, "algorithm": {"advantage": "dr_grpo"}}


def trajectory(session: int, output: int = 0, *, reward: float, is_cut: bool = False) -> Trajectory:
    """Return two turns with a tool's reply between them; a limit may have cut the second one."""
    mask = np.array([False, True, False, True, True])
    return Trajectory(
        prompt_uid="p",
        session_index=session,
        output_index=output,
        input_ids=np.arange(5, dtype=np.int32) + 3 * session,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason="length" if is_cut else "stop",
        reward=reward,
    )


def parts_with(sections: dict[str, Any], policy: Any = None, path: Path = Path("p")) -> Any:
    values = {
        "policy": {"path": path},
        "prompts": {"train": Path("t")},
        "reward": {"function": "exact_match"},
    }
    learners = SimpleNamespace(policy=policy, reference=None, critic=None, self_teacher=None)
    skipped = SimpleNamespace(check=lambda *_, **__: None)
    return SimpleNamespace(settings=build_settings(values | sections), learners=learners, skipped=skipped)


@pytest.mark.parametrize("correction", [{}, {"weights": "token", "reject": {"token_k1": 2.0}}])
def test_a_response_cut_in_a_later_turn_counts_and_does_not_train(correction: dict[str, Any]) -> None:
    rows = Batch.from_trajectories(
        [
            trajectory(0, reward=1.0),
            trajectory(1, reward=0.0, is_cut=True),
            trajectory(2, 0, reward=0.5, is_cut=True),
            trajectory(2, 1, reward=0.5),
        ]
    )
    rows = rows.with_columns({"old_logprobs": rows.ragged("rollout_logprobs")})
    algorithm = {**MASKED["algorithm"], "old_logprobs": "recompute"}
    parts, recorder = parts_with({**MASKED, "algorithm": algorithm, "correction": correction}), Recorder(strict=True)
    prepared = prepare_batch(parts, rows, recorder, kl_coefficient=0.0)
    assert [row.sum() for row in prepared.ragged("loss_mask")] == [3, 0, 3, 3]
    assert [row[1] for row in prepared.ragged("advantages")] == [0.5, -0.5, 0.0, 0.0]
    assert recorder.reduce()["response/masked_ratio"] == 0.25
    shown = with_update(prepared, {}, loss_mask=rows.ragged("loss_mask"))
    metrics = summarize_step(parts.settings, shown, version=0, step_s=1.0)
    assert metrics["critic/score/mean"] == metrics["critic/rewards/mean"] == 0.5
    assert metrics["response_length/mean"] == 4
    assert (metrics["response/aborted_ratio"], metrics["response_length/clip_ratio"]) == (0.0, 0.5)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_tiny_policy(folder, example_module("prepare").make_tokenizer())
    return folder


@pytest.fixture(scope="module")
def learner(policy: Path) -> MegatronLearner:
    return MegatronLearner(policy, LearnerOptions(learning_rate=0.1, weight_decay=0.1, num_threads=1))


def test_a_step_whose_responses_are_all_cut_leaves_the_weights(learner: MegatronLearner) -> None:
    cut = Batch.from_trajectories([trajectory(index, reward=index, is_cut=True) for index in range(2)])
    whole = Batch.from_trajectories([trajectory(index, reward=index) for index in range(2)])
    parts = parts_with(MASKED, learner)

    def weights_after(rows: Batch) -> bytes:
        prepared = prepare_batch(parts, rows, Recorder(), kl_coefficient=0.0)
        trained = update(parts, prepared, Recorder(strict=True), step=0, kl_coefficient=0.0)
        assert bool(trained) == (rows is whole)
        return b"".join(tensor.numpy().tobytes() for tensor in learner.export_weights().values())

    before = weights_after(whole)  # the optimizer has momentum from here on
    step = learner.step
    assert weights_after(cut) == before
    assert learner.step == step
    assert weights_after(whole) != before


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sums_of_squared_probabilities_are_those_of_the_models_distribution(policy: Path, temperature: float) -> None:
    learner = MegatronLearner(policy, LearnerOptions(num_threads=1))
    algorithm = {"advantage": "optimal_token_baseline", "old_logprobs": "recompute"}
    sections = {"algorithm": algorithm, "rollout": {"temperature": temperature}}
    rows = Batch.from_trajectories([trajectory(index, reward=index) for index in range(3)])
    found = with_late_columns(parts_with(sections, learner, policy), rows, Recorder(strict=True))
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, trust_remote_code=False)
    for ids, squares in zip(rows.ragged("input_ids"), found.ragged("sum_pi_squared"), strict=True):
        logits = model(torch.from_numpy(ids).long()[None]).logits[0, :-1] / temperature
        expected = logits.softmax(-1).square().sum(-1)
        torch.testing.assert_close(torch.tensor(squares[1:]), expected, rtol=1e-5, atol=1e-6)
