"""Answers to validation and test prompts, in both trainers and from any engine."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_core import Prompt, Trajectory
from rl_core.data import NO_VERSION
from rl_metrics.run_files import GenerationSample
from rl_rollout import GroupResult
from rl_rollout.prompts import PromptTokenizer
from rl_trainer_parts.rollouts.image_texts import decode_shown, prompt_and_response

PREDICTION = "pred"
"""Extra of a reward with the response's extracted answer; verl's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of one session; a prompt with several sessions has several answers.

    Attributes:
        prompt: The prompt.
        trajectory: The response; of several, the last, which holds the answer that is scored. Its session_index
            identifies the session. Only the prompt if the session failed.
        failure: Why the session failed; its reward does not count. None if it succeeded.
        source: The process that answered, such as "rollouter".
    """

    prompt: Prompt
    trajectory: Trajectory
    failure: str | None
    source: str

    @property
    def reward(self) -> float:
        """The reward; NaN if there is none."""
        reward = None if self.failure is not None else self.trajectory.reward
        return math.nan if reward is None else reward

    @property
    def components(self) -> Mapping[str, float]:
        """The reward's components by name."""
        return self.trajectory.reward_components if self.failure is None else {}

    @property
    def prediction(self) -> str | None:
        """The extracted answer for majority votes; None if unknown."""
        prediction = self.trajectory.extras.get(PREDICTION) if self.failure is None else None
        return str(prediction) if isinstance(prediction, str | int | float) else None


def answers_of(groups: Iterable[GroupResult], *, source: str) -> list[Answer]:
    """One answer per session, in order.

    Args:
        groups: Sessions of each prompt.
        source: The process that answered.
    """
    return [
        Answer(
            prompt=group.prompt,
            trajectory=session.trajectories[-1] if session.trajectories else _nothing(group.prompt, index),
            failure=session.failure,
            source=source,
        )
        for group in groups
        for index, session in enumerate(group.sessions)
    ]


def first_answers(answers: Iterable[Answer]) -> list[Answer]:
    """The first answer to each prompt, in the prompts' order."""
    first: dict[str, Answer] = {}
    for answer in answers:
        first.setdefault(answer.prompt.uid, answer)
    return list(first.values())


def generation_samples(answers: Sequence[Answer], tokenizer: PromptTokenizer) -> list[GenerationSample]:
    """Answers as readable text.

    Args:
        answers: The answers.
        tokenizer: The policy's tokenizer.
    """
    rows = [answer.trajectory for answer in answers]
    sides = [part for row in rows for part in prompt_and_response(row.input_ids, row.images, row.num_prompt_tokens)]
    texts = decode_shown(tokenizer, sides, skip_special_tokens=True)
    inputs, outputs = texts[::2], texts[1::2]
    return [_sample(*one) for one in zip(answers, inputs, outputs, strict=True)]


def _sample(answer: Answer, given: str, output: str) -> GenerationSample:
    versions = answer.trajectory.policy_versions
    versions = versions[versions != NO_VERSION]
    return GenerationSample(
        prompt_uid=answer.prompt.uid,
        input=given,
        output=output,
        score=answer.reward,
        ground_truth=answer.prompt.ground_truth,
        policy_version=(int(versions.min()), int(versions.max())) if len(versions) else (NO_VERSION, NO_VERSION),
        source=answer.source,
        failure=answer.failure,
        components=dict(answer.components),
        data_source=answer.prompt.data_source,
        finish=answer.trajectory.finish_reason,
        images=tuple(span.digest for span in answer.trajectory.images),
    )


def _nothing(prompt: Prompt, session_index: int) -> Trajectory:
    """A trajectory of only the prompt, for a failed session."""
    num_tokens = len(prompt.input_ids)
    return Trajectory(
        prompt_uid=prompt.uid,
        session_index=session_index,
        input_ids=prompt.input_ids,
        loss_mask=np.zeros(num_tokens, dtype=np.bool_),
        rollout_logprobs=np.zeros(num_tokens, dtype=np.float32),
        policy_versions=np.full(num_tokens, NO_VERSION, dtype=np.int32),
        images=prompt.images,
    )
