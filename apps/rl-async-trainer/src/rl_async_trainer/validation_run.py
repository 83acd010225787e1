"""Validation while training goes on: answers travel by the queue's validation partition, whoever gave them."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core import Batch, Prompt, TaskSpec, TransferQueue
from rl_core.errors import AlreadySettledError
from rl_core.records import NO_VERSION, Trajectory
from rl_metrics.generations import GenerationSample
from rl_rollout.prompts import PromptTokenizer
from rl_trainer.evaluation import Run, greedy, prediction_in, summarize_answers
from rl_trainer.settings import Settings

Array = NDArray[Any]

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
    needs = frozenset({"input_ids", "loss_mask", "policy_versions", "num_prompt_tokens"})
    return TaskSpec(name=TASK, needs=needs, partition=PARTITION)


def split_batches(split: str, step: int, prompts: Sequence[Prompt], *, size: int | None) -> list[ValidationBatch]:
    """Problems in batches of so many, the last with the rest."""
    size = size or max(len(prompts), 1)
    return [
        ValidationBatch(split=split, step=step, number=start // size, prompts=tuple(prompts[start : start + size]))
        for start in range(0, len(prompts), size)
    ]


async def put_validation(
    queue: TransferQueue, batch: ValidationBatch, run: Run, *, settings: Settings, source: str
) -> None:
    """Answer a batch greedily, and put every answer into the validation partition, failures with their reasons.

    Args:
        queue: Of the run.
        batch: The problems, whose prompts the controller has issued.
        run: Gives one session of each.
        settings: Of the run.
        source: Who answers.
    """
    groups = await run(batch.prompts, greedy(settings))
    rows = []
    for group in groups:
        uid = batch.queue_uid(group.prompt)
        session = group.sessions[0]
        given = session.trajectories[0] if session.trajectories else _nothing(group.prompt)
        extras = {
            **given.extras,
            "source": source,
            "failure": session.failure,
            "reward": given.reward if session.failure is None else None,
            "components": dict(given.reward_components) if session.failure is None else {},
        }
        rows.append(replace(given, prompt_uid=uid, session_index=0, output_index=0, extras=extras))
    given_rows = Batch.from_trajectories(rows)
    unscored = given_rows.only(given_rows.names - {"reward"})  # it would have half of the digits, and no failures
    with suppress(AlreadySettledError):  # by a process that died before it said so
        await asyncio.to_thread(queue.put_batch, unscored)


def collect_validation(
    queue: TransferQueue, batches: Sequence[ValidationBatch], tokenizer: PromptTokenizer, *, deadline_s: float
) -> tuple[dict[str, float], list[GenerationSample], list[int]]:
    """Every answer of all batches: validation metrics, samples for the trackers, and each sample's batch.

    Args:
        queue: Of the run.
        batches: Of one validation.
        tokenizer: Of the policy.
        deadline_s: Longest wait for answers.
    """
    asked = [(batch.queue_uid(prompt), prompt) for batch in batches for prompt in batch.prompts]
    numbers = [batch.number for batch in batches for _ in batch.prompts]
    if not asked:
        return {}, [], []
    lease = queue.lease(TASK, prompts=[uid for uid, _ in asked], deadline_s=deadline_s)
    rows, extras = lease.batch, lease.batch.extras
    rewards = np.asarray([np.nan if extra.get("reward") is None else extra["reward"] for extra in extras], np.float64)
    prompts = [prompt for _, prompt in asked]
    metrics = summarize_answers(
        prompts,
        list(rewards),
        [_components(extra) for extra in extras],
        predictions=[prediction_in(extra) if isinstance(extra, dict) else None for extra in extras],
    )
    versions = [row[row != NO_VERSION] for row in rows.ragged("policy_versions")]
    sampled = np.concatenate(versions) if versions else np.empty(0, dtype=np.int32)
    if len(sampled):
        metrics["validation/policy_version/min"] = float(sampled.min())
        metrics["validation/policy_version/max"] = float(sampled.max())
    samples = [
        _sample(prompt, ids, int(num_prompt), extra, float(reward), version, tokenizer)
        for prompt, ids, num_prompt, extra, reward, version in zip(
            prompts, rows.ragged("input_ids"), rows.dense("num_prompt_tokens"), extras, rewards, versions, strict=True
        )
    ]
    queue.release(lease)
    queue.finish(TASK, [uid for uid, _ in asked])  # by name: the lease may have ended with a keeper that died
    queue.forget_finished(partition=PARTITION)
    return metrics, samples, numbers


def _components(extra: object) -> dict[str, float]:
    found = extra.get("components") if isinstance(extra, dict) else None
    return found if isinstance(found, dict) else {}


def _sample(
    prompt: Prompt,
    ids: Array,
    num_prompt: int,
    extra: object,
    reward: float,
    versions: Array,
    tokenizer: PromptTokenizer,
) -> GenerationSample:
    fields = extra if isinstance(extra, dict) else {}
    shown, response = tokenizer.decode([ids[:num_prompt], ids[num_prompt:]])
    truth = prompt.ground_truth
    return GenerationSample(
        prompt_uid=prompt.uid,
        input=shown,
        output=response,
        score=reward,
        ground_truth=None if truth is None else str(truth),
        policy_version=(int(versions.min()), int(versions.max())) if len(versions) else (NO_VERSION, NO_VERSION),
        source=str(fields.get("source", "")),
        failure=fields.get("failure"),
        components=_components(extra),
    )


def _nothing(prompt: Prompt) -> Trajectory:
    """The prompt alone, where nothing was answered."""
    num_tokens = len(prompt.input_ids)
    return Trajectory(
        prompt_uid=prompt.uid,
        session_index=0,
        input_ids=prompt.input_ids,
        loss_mask=np.zeros(num_tokens, dtype=np.bool_),
        rollout_logprobs=np.zeros(num_tokens, dtype=np.float32),
        policy_versions=np.full(num_tokens, NO_VERSION, dtype=np.int32),
    )
