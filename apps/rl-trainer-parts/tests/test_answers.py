"""Answers to problems, and their readable form."""

import math
from typing import Any

import numpy as np
import pytest

from rl_core import Prompt
from rl_core.data.records import NO_VERSION
from rl_core.testing import make_prompt, make_trajectory
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rollout import GroupResult
from rl_trainer_parts.rollouts.answers import answers_of, first_answers, generation_samples

PROMPT = Prompt(uid="p", input_ids=np.asarray([1, 2], dtype=np.int32), ground_truth={"value": 95, "is_whole": True})
FAILED = SessionResult(failure="the engine fell")


class Numbers:
    """A tokenizer whose tokens are numbers."""

    def decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]:
        return [" ".join(str(int(token)) for token in sequence) for sequence in sequences]


def session(index: int, *, failure: str | None = None, **fields: Any) -> SessionResult:
    return SessionResult(trajectories=(make_trajectory("p", index, **fields),), failure=failure)


def group(*sessions: SessionResult, prompt: Prompt = PROMPT) -> GroupResult:
    return GroupResult(prompt=prompt, sessions=sessions)


@pytest.mark.parametrize(
    ("extras", "expected"),
    [({"pred": "42"}, "42"), ({"pred": 42}, "42"), ({"pred": None}, None), ({"pred": ["42"]}, None), ({}, None)],
)
def test_a_prediction_is_text_or_a_number(extras: dict[str, Any], expected: str | None) -> None:
    (answer,) = answers_of([group(session(0, extras=extras))], source="engine")
    assert answer.prediction == expected


def test_each_session_is_an_answer() -> None:
    found = answers_of(
        [
            group(session(0, reward=0.25, extras={"pred": 7}), FAILED, session(2, reward_components={"acc": 1.0})),
            group(FAILED, prompt=make_prompt("q")),
        ],
        source="rollouter",
    )
    assert [(one.prompt.uid, one.trajectory.session_index, one.failure) for one in found] == [
        ("p", 0, None),
        ("p", 1, "the engine fell"),
        ("p", 2, None),
        ("q", 0, "the engine fell"),
    ]
    assert [one.reward for one in found] == [0.25, pytest.approx(math.nan, nan_ok=True), 1.0, found[3].reward]
    assert math.isnan(found[3].reward)
    assert [one.prediction for one in found] == ["7", None, None, None]
    assert found[2].components == {"acc": 1.0}
    assert found[1].trajectory.input_ids.tolist() == [1, 2], "the prompt alone"
    assert {one.source for one in found} == {"rollouter"}


def test_what_a_failed_session_had_is_kept_without_its_worth() -> None:
    (found,) = answers_of(
        [group(session(0, failure="audit", reward=1.0, reward_components={"acc": 1.0}, extras={"pred": "1"}))],
        source="x",
    )
    assert math.isnan(found.reward)
    assert (found.components, found.prediction) == ({}, None)
    assert len(found.trajectory.input_ids) == 5


def test_the_first_answer_to_each_problem_is_shown() -> None:
    versions = np.asarray([NO_VERSION, NO_VERSION, 3, 4, 4], dtype=np.int32)
    answers = answers_of(
        [
            group(session(0, reward=0.5, policy_versions=versions, reward_components={"acc": 0.0}), session(1)),
            group(FAILED, session(1), prompt=make_prompt("q")),
        ],
        source="rollouter",
    )
    assert first_answers(answers) == [answers[0], answers[2]]
    shown, failed = generation_samples(first_answers(answers), Numbers())  # type: ignore[arg-type]
    assert (shown.prompt_uid, shown.input, shown.output, shown.score) == ("p", "1 2", "0 0 0", 0.5)
    assert (shown.ground_truth, shown.policy_version, shown.source) == (PROMPT.ground_truth, (3, 4), "rollouter")
    assert (shown.components, shown.failure) == ({"acc": 0.0}, None)
    assert (failed.prompt_uid, failed.output, failed.failure) == ("q", "", "the engine fell")
    assert failed.policy_version == (NO_VERSION, NO_VERSION)
    assert math.isnan(failed.score)
    assert failed.ground_truth is None


def test_nothing_asked_gives_nothing() -> None:
    assert answers_of([], source="x") == []
    assert generation_samples([], Numbers()) == []  # type: ignore[arg-type]


def test_a_session_of_several_trajectories_is_one_answer_the_last() -> None:
    last = make_trajectory("p", 0, output_index=1, reward=9.0, extras={"pred": 7})
    (found,) = answers_of([group(SessionResult(trajectories=(make_trajectory("p", 0), last)))], source="x")
    assert (found.trajectory.output_index, found.reward, found.prediction) == (1, 9.0, "7")
