"""Teachers without a model, and rows to score, for tests of routing, order, time and death."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_core import Batch, InProcessQueue, Prompt, TaskSpec, Trajectory
from rl_core.data.row_keys import RowKey
from rl_core.errors import EngineDiedError
from rl_distill.teacher.options import DistillationOptions, TeacherOptions
from rl_distill.teacher.protocol import TeacherTraits
from rl_distill.teacher.scores import TeacherRow, TeacherScores
from rl_distill.teacher.service import teacher_task

VOCAB_SIZE = 16


def honest_scores(
    row: TeacherRow, *, top_k: int, hidden_size: int | None = None, logprob: float = -0.5
) -> TeacherScores:
    """Return valid scores: the token has `logprob`, the most likely tokens are ids 0..K-1 with -1, -2, ..."""
    length = len(row.input_ids)
    ids = np.tile(np.arange(-1, top_k, dtype=np.int32), (length, 1))
    ids[:, 0] = row.input_ids
    logprobs = np.tile(-np.arange(top_k + 1, dtype=np.float32) - 1, (length, 1))
    logprobs[:, 0] = logprob
    same = ids[:, 1:] == ids[:, :1]
    logprobs[:, 0] = np.where(same.any(axis=1), (logprobs[:, 1:] * same).sum(axis=1), logprob)
    ids[0], logprobs[0] = -1, 0
    hidden = None if hidden_size is None else np.ones((length, hidden_size), dtype=np.float32)
    return TeacherScores(logprobs=logprobs, token_ids=ids, hidden=hidden)


@dataclass
class FakeReplica:
    """A `TeacherReplica` with given scores; `dies_at` counts calls of `score`, including the proof."""

    logprob: float = -0.5
    hidden_size: int | None = None
    max_tokens: int = 100
    vocab_size: int = VOCAB_SIZE
    most_top_k: int = VOCAB_SIZE
    at_once: int = 1
    can_sleep: bool = True
    dies_at: int | None = None
    forgets_asleep: bool = False
    change: Callable[[TeacherRow, TeacherScores], TeacherScores] = lambda _, scores: scores
    before: Callable[[Sequence[TeacherRow]], Any] | None = None
    start_error: BaseException | None = None
    events: list[str] = field(default_factory=list)
    scored: list[RowKey] = field(default_factory=list)
    num_calls: int = 0
    is_dead: bool = False

    @property
    def traits(self) -> TeacherTraits:
        return TeacherTraits(vocab_size=self.vocab_size, hidden_size=self.hidden_size, max_tokens=self.max_tokens)

    async def start(self) -> None:
        self.events.append("start")
        if self.start_error is not None:
            raise self.start_error

    async def score(self, sequences: Sequence[TeacherRow], *, top_k: int, with_hidden: bool) -> list[TeacherScores]:
        self.num_calls += 1
        is_probe = sequences[0].key.prompt_uid == "probe"
        if not is_probe and self.before is not None:
            await self.before(sequences)
        if self.is_dead or self.num_calls == self.dies_at:
            self.is_dead = True
            raise EngineDiedError("the fake was killed by signal 9")
        hidden_size = self.hidden_size if with_hidden else None
        scores = [honest_scores(row, top_k=top_k, hidden_size=hidden_size, logprob=self.logprob) for row in sequences]
        if is_probe:
            return scores
        self.scored += [row.key for row in sequences]
        return [self.change(row, one) for row, one in zip(sequences, scores, strict=True)]

    async def wake(self) -> None:
        self.events.append("wake")

    async def sleep(self) -> None:
        self.events.append("sleep")
        if self.forgets_asleep:
            self.logprob = -9.0

    async def close(self) -> None:
        self.events.append("close")


def make_prompt(uid: str, source: str = "default", **columns: Any) -> Prompt:
    return Prompt(uid=uid, input_ids=np.asarray([1, 2], dtype=np.int32), data_source=source, columns=columns)


def make_trajectory(uid: str, session: int, output: int = 0, *, length: int = 5) -> Trajectory:
    mask = np.arange(length) >= 2
    return Trajectory(
        prompt_uid=uid,
        session_index=session,
        output_index=output,
        input_ids=np.arange(1, length + 1, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -1, 0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        reward=0.0,
    )


def make_queue(*, with_hidden: bool = False) -> InProcessQueue:
    """Return a queue with the teachers' task, and one that needs their columns."""
    task = teacher_task(with_hidden=with_hidden)
    return InProcessQueue([task, TaskSpec(name="train", needs=task.needs | task.gives, order="issue")])


def make_options(sources: dict[str, Sequence[str]], **options: Any) -> DistillationOptions:
    """Return options with teachers by name and their sources; loss k1 needs one value per token."""
    teachers = {name: TeacherOptions(model="x", data_sources=tuple(own)) for name, own in sources.items()}
    return DistillationOptions(teachers=teachers, **{"loss": "k1", **options})


def put(queue: InProcessQueue, *trajectories: Trajectory) -> None:
    queue.put_batch(Batch.from_trajectories(trajectories))


async def reached(event: threading.Event | asyncio.Event) -> None:
    """Wait for an event, at most 10 s."""
    if isinstance(event, asyncio.Event):
        await asyncio.wait_for(event.wait(), 10)
    else:
        await asyncio.to_thread(event.wait, 10)
