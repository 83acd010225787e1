"""Sampling of answers to problems, and validation metrics."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl_core import Prompt
from rl_core.testing import make_prompt, make_trajectory
from rl_metrics.validation.summary import headline
from rl_rollout.engines.protocol import GenerateRequest
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.loops.single_turn import SingleTurnLoop
from rl_rollout.rewards.scorer import RewardScorer
from rl_rollout.rollout import GroupResult, Rollout
from rl_trainer_parts.rollouts.answers import Answer
from rl_trainer_parts.rollouts.evaluation import (
    answer_problems,
    measured,
    summarize_answers,
    validation_sampling,
    with_results,
)
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings


def settings_with(**prompts: Any) -> Settings:
    return build_settings(
        {
            "policy": {"path": "policy"},
            "prompts": {"train": "train.jsonl", **prompts},
            "rollout": {"max_response_tokens": 7, "temperature": 0.9},
            "run": {"seed": 5},
        }
    )


def answer(
    uid: str,
    reward: float | None,
    *,
    sample: int = 0,
    failure: str | None = None,
    pred: Any = None,
    **components: float,
) -> Answer:
    row = replace(make_trajectory(uid, sample), reward=reward, reward_components=components, extras={"pred": pred})
    return Answer(prompt=replace(make_prompt(uid), data_source="sums"), trajectory=row, failure=failure, source="test")


def test_answers_of_several_samples_are_voted_on() -> None:
    metrics = summarize_answers(
        [
            answer("a", 1.0, sample=0, pred="95"),
            answer("a", 1.0, sample=1, pred="95"),
            answer("a", 0.0, sample=2, pred=9),
            answer("a", 0.0, sample=3),
            answer("b", None),
        ]
    )
    assert metrics["val-core/sums/reward/mean@4"] == 0.5
    assert metrics["val-core/sums/reward/pass@4"] == 1.0
    assert metrics["val-aux/sums/reward/pass@2"] == pytest.approx(1 - 1 / 6)
    assert metrics["val-aux/sums/reward/std@4"] == 0.5
    assert metrics["val-core/sums/reward/best@4/mean"] == pytest.approx(1 - 0.5**4)
    assert metrics["val-aux/sums/reward/worst@4/mean"] == pytest.approx(0.5**4)
    assert metrics["val-core/sums/reward/maj@4/mean"] > 0.5
    assert metrics["val-aux/sums/reward/num_missing"] == 1.0
    assert headline(metrics) == 0.5


def test_what_a_failed_session_gave_counts_nowhere() -> None:
    failed = answer("a", 1.0, sample=1, failure="no verdict", pred="1", acc=1.0)
    metrics = summarize_answers([answer("a", 0.0, acc=0.0), failed])
    assert metrics["val-core/sums/acc/mean@1"] == 0.0
    assert metrics["val-aux/sums/acc/num_missing"] == metrics["val-aux/sums/reward/num_missing"] == 1.0
    assert metrics["val-aux/sums/num_responses"] == 2.0


def test_components_count_where_they_are() -> None:
    metrics = summarize_answers([answer("a", 2.0, acc=1.0), answer("b", 0.0)])
    assert metrics["val-core/sums/acc/mean@1"] == 1.0
    assert metrics["val-aux/sums/reward/mean@1"] == 1.0
    assert not any("maj@" in name for name in metrics)


def test_a_component_called_reward_does_not_replace_the_reward() -> None:
    one = answer("a", -9.0)
    one = replace(one, trajectory=replace(one.trajectory, reward_components={"reward": 1.0}))
    metrics = summarize_answers([one])
    assert metrics["val-core/sums/reward/mean@1"] == -9.0
    assert metrics["val-aux/sums/reward/reward/mean@1"] == 1.0


def test_a_result_is_named_after_what_was_measured() -> None:
    settings = settings_with()
    judged, bonus = ({f"val-core/sums/{name}/mean@1": 0.5, "test/score": 0.25} for name in ("acc", "reward"))
    assert measured(settings, judged) == {"accuracy": 0.5}
    assert measured(settings, bonus) == {"mean_reward": 0.5}
    matched = replace(settings.reward, function="exact_match")
    assert measured(settings.model_copy(update={"reward": matched}), bonus) == {"accuracy": 0.5}
    assert with_results(settings, {"test_score_first": 0.0}, bonus) == {
        "validation_mean_reward_first": 0.5,
        "validation_mean_reward_last": 0.5,
        "test_score_first": 0.0,
        "test_score_last": 0.25,
    }


def test_the_settings_say_how_problems_are_answered() -> None:
    assert (validation_sampling(settings_with()).temperature, validation_sampling(settings_with()).max_tokens) == (0, 7)
    assert validation_sampling(settings_with(validation_temperature=0.6)).temperature == 0.6


def asked(settings: Settings, *uids: str) -> tuple[list[GroupResult], dict[tuple[int, ...], Any]]:
    """Return the problems' sessions, and by prompt the seeds and temperatures of the engine's requests."""
    seen: dict[tuple[int, ...], Any] = {}

    async def say(request: GenerateRequest, index: int) -> list[int]:
        sampling = request.samplings[index]
        seen.setdefault(tuple(request.input_ids.tolist()), []).append((sampling.seed, sampling.temperature))
        return [3, 4 + index]

    async def ask() -> list[GroupResult]:
        engine = ScriptedEngine(say)
        await engine.start()
        scorer = RewardScorer(lambda sample: 1.0)
        rollout = Rollout(engine, SingleTurnLoop(), scorer=scorer, decode=lambda rows: ["" for _ in rows])
        problems = [Prompt(uid=uid, input_ids=np.asarray([1, ord(uid)], dtype=np.int32)) for uid in uids]
        return await answer_problems(settings, rollout, problems)

    return asyncio.run(ask()), seen


def test_samples_of_a_problem_differ_and_are_the_same_at_each_validation() -> None:
    settings = settings_with(validation_samples=3, validation_temperature=0.5)
    groups, seen = asked(settings, "p", "q")
    assert [len(group.sessions) for group in groups] == [3, 3]
    for draws in seen.values():
        assert len({seed for seed, _ in draws}) == 3
        assert {temperature for _, temperature in draws} == {0.5}
    _, again = asked(settings, "q", "p")
    assert again == seen


def test_one_greedy_response_has_no_seed() -> None:
    groups, seen = asked(settings_with(), "p")
    assert [len(group.sessions) for group in groups] == [1]
    assert list(seen.values()) == [[(None, 0.0)]]
