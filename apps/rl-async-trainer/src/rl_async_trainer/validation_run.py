"""Validation while training goes on: answers travel by the queue's validation partition, whoever gave them."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from rl_core import Batch, Prompt, TaskSpec, TransferQueue
from rl_core.errors import AlreadySettledError
from rl_core.records import NO_VERSION, Trajectory
from rl_rollout.rollout import Rollout
from rl_trainer.answers import PREDICTION, Answer, answers_of
from rl_trainer.evaluation import answer_problems
from rl_trainer.settings import Settings

PARTITION = "validation"
TASK = "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationBatch:
    """Problems that are asked together.

    Attributes:
        split: "validation" or "test".
        step: Steps done.
        number: Which batch of that validation, from 0.
        prompts: The problems.
    """

    split: str
    step: int
    number: int
    prompts: tuple[Prompt, ...]

    def queue_uid(self, prompt: Prompt) -> str:
        """What a problem is called in the queue, where each validation asks it anew."""
        return f"{self.split}/{self.step}/{prompt.uid}"


def validation_task() -> TaskSpec:
    """The one task of the validation partition."""
    needs = frozenset({"input_ids", "loss_mask", "rollout_logprobs", "policy_versions"})
    return TaskSpec(name=TASK, needs=needs, partition=PARTITION)


def split_batches(split: str, step: int, prompts: Sequence[Prompt], *, size: int | None) -> list[ValidationBatch]:
    """Problems in batches of so many, the last with the rest."""
    size = size or max(len(prompts), 1)
    return [
        ValidationBatch(split=split, step=step, number=start // size, prompts=tuple(prompts[start : start + size]))
        for start in range(0, len(prompts), size)
    ]


async def put_validation(
    queue: TransferQueue, batch: ValidationBatch, rollout: Rollout, *, settings: Settings, source: str
) -> None:
    """Answer a batch, and put every answer into the validation partition, failures with their reasons.

    Args:
        queue: Of the run.
        batch: The problems, whose prompts the controller has issued.
        rollout: Answers them.
        settings: Of the run.
        source: Who answers.
    """
    groups = await answer_problems(settings, rollout, batch.prompts)
    answers = answers_of(groups, source=source)
    if not answers:
        return
    given = Batch.from_trajectories([_row(answer, batch.queue_uid(answer.prompt)) for answer in answers])
    unscored = given.only(given.names - {"reward"})  # it would have half of the digits, and no failures
    with suppress(AlreadySettledError):  # by a process that died before it said so
        await asyncio.to_thread(queue.put_batch, unscored)


def collect_validation(queue: TransferQueue, batches: Sequence[ValidationBatch], *, deadline_s: float) -> list[Answer]:
    """Every answer of all batches, those to a problem together, in the order of asking.

    Args:
        queue: Of the run.
        batches: Of one validation.
        deadline_s: Longest wait for answers.
    """
    asked = {batch.queue_uid(prompt): prompt for batch in batches for prompt in batch.prompts}
    if not asked:
        return []
    lease = queue.lease(TASK, prompts=list(asked), deadline_s=deadline_s)
    answers = _answers_in(lease.batch, asked)
    queue.release(lease)
    queue.finish(TASK, list(asked))  # by name: the lease may have ended with a keeper that died
    queue.forget_finished(partition=PARTITION)
    return answers


def version_metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """Which policy versions answered."""
    versions = [answer.trajectory.policy_versions for answer in answers]
    sampled = np.concatenate(versions) if versions else np.empty(0, dtype=np.int32)
    sampled = sampled[sampled != NO_VERSION]
    if not len(sampled):
        return {}
    return {
        "validation/policy_version/min": float(sampled.min()),
        "validation/policy_version/max": float(sampled.max()),
    }


def _row(answer: Answer, queue_uid: str) -> Trajectory:
    """An answer as the queue takes it."""
    extras = {
        PREDICTION: answer.prediction,
        "source": answer.source,
        "failure": answer.failure,
        "reward": None if math.isnan(answer.reward) else answer.reward,
        "components": dict(answer.components),
    }
    return replace(answer.trajectory, prompt_uid=queue_uid, output_index=0, extras=extras)


def _answers_in(rows: Batch, asked: Mapping[str, Prompt]) -> list[Answer]:
    """What `_row` made rows of."""
    columns = (rows.ragged(name) for name in ("input_ids", "loss_mask", "rollout_logprobs", "policy_versions"))
    answers = []
    for key, extra, ids, mask, logprobs, versions in zip(rows.keys, rows.extras, *columns, strict=True):
        trajectory = Trajectory(
            prompt_uid=asked[key.prompt_uid].uid,
            session_index=key.session_index,
            input_ids=ids,
            loss_mask=mask,
            rollout_logprobs=logprobs,
            policy_versions=versions,
            reward=extra["reward"],
            reward_components=extra["components"],
            extras={PREDICTION: extra[PREDICTION]},
        )
        prompt, failure = asked[key.prompt_uid], extra["failure"]
        answers.append(Answer(prompt=prompt, trajectory=trajectory, failure=failure, source=extra["source"]))
    return answers
