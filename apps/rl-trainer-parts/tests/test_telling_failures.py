"""Failed sessions, and sessions whose failed reward counts as 0, are counted, reported and recorded."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rl_core import Prompt
from rl_rollout import GroupResult
from rl_rollout.engines import Generation
from rl_rollout.loops import SessionResult
from rl_rollout.loops.single_turn import trajectory_of, with_reward
from rl_rollout.rewards import RewardOptions, RewardPart, build_scorer
from rl_rollout.rewards.scorer import reward_input
from rl_trainer_parts.reporting.failed_sessions import FailedSessions, failures_line
from rl_trainer_parts.rollouts.answers import answers_of
from rl_trainer_parts.settings.schema import MetricSettings

BAD, ZERO = f"{__file__}:raises", RewardOptions(function="exact_match")
PROMPT = Prompt(uid="p0", input_ids=np.array([7, 8], dtype=np.int32))


class SettingsOf:
    """The settings that recording reads."""

    metrics = MetricSettings(log_rollouts=8)


def scored(options: RewardOptions) -> SessionResult:
    """Return a session scored with these reward options."""
    ids = np.array([1, 2, 3], dtype=np.int32)
    generation = Generation(
        token_ids=ids,
        logprobs=np.zeros(3, dtype=np.float32),
        policy_versions=np.full(3, 5, dtype=np.int32),
        finish_reason="stop",
    )
    (one,) = asyncio.run(build_scorer(options).score([reward_input(PROMPT, text="abc", ids=ids)]))
    return with_reward([trajectory_of(PROMPT, generation, session_index=0, generate_s=0.1)], one)


def among(*sessions: SessionResult) -> FailedSessions:
    return FailedSessions.among(answers_of([GroupResult(prompt=PROMPT, sessions=sessions)], source="here"))


def event_of(found: FailedSessions) -> dict[str, Any]:
    said: list[dict[str, Any]] = []
    found.tell(lambda event, **fields: said.append(fields), step=3, during="training")
    return said[0]


def raises(given: object) -> float:
    return float(str(given)[0:0])


@pytest.mark.parametrize("on_failure", ["drop", "zero"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_reward_that_raises_is_told_wherever_it_stands(on_failure: str, in_parts: bool) -> None:
    if in_parts:
        part = RewardPart(function=BAD, on_failure="zero" if on_failure == "zero" else "fail", name="mine")  # type: ignore[arg-type]
        options = RewardOptions(parts=(part,))
    else:
        options = RewardOptions(function=BAD, on_failure=on_failure)  # type: ignore[arg-type]
    found = among(scored(options))
    assert found.num_rewards == 1
    said = failures_line(event_of(found))
    if on_failure == "zero":
        assert said.startswith("step 3: the rewards of 1 of 1 sessions failed and count as 0. The first: ")
        assert found.drafts(SettingsOf(), step=3) == []  # type: ignore[arg-type]
    else:
        assert said.startswith("step 3: 1 of 1 sessions failed, 1 of them in their reward; they are left out. The fir")
        ((_, row),) = found.drafts(SettingsOf(), step=3)  # type: ignore[arg-type]
        assert (row.step, row.policy_version, row.columns["token_ids"]) == (3, 5, (1, 2, 3))
        assert row.failure is not None
        assert row.failure in said
    assert "raised ValueError: could not convert string to float: '' (test_telling_failures.py, line " in said


def test_a_session_that_left_nothing_is_written_down_too() -> None:
    found = among(SessionResult(failure="the environment's step raised KeyError: 'board'"), scored(ZERO))
    assert (found.num_rewards, len(found.failed), found.num_sessions) == (0, 1, 2)
    ((prompt, row),) = found.drafts(SettingsOf(), step=1)  # type: ignore[arg-type]
    assert (prompt, row.tokens, row.failure) == ((7, 8), (), "the environment's step raised KeyError: 'board'")
    assert failures_line(event_of(found)) == (
        "step 3: 1 of 2 sessions failed; they are left out. The first: the environment's step raised KeyError: 'board'"
    )


def test_nothing_is_told_where_none_failed() -> None:
    found = among(scored(ZERO))
    found.tell(lambda *_, **__: pytest.fail("there are no failures"), during="training")
    assert found.drafts(SettingsOf(), step=1) == []  # type: ignore[arg-type]
