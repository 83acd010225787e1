"""Checked scores of one teacher: cached or computed, and translated if its tokens differ from the student's."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_core.data import FloatArray
from rl_distill.teacher.aligned import TeacherAligner
from rl_distill.teacher.replicas import ReplicatedTeacher
from rl_distill.teacher.score_cache import ScoreCache
from rl_distill.teacher.scores import ScoreShape, TeacherRow, TeacherScores, check_scores, empty_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherReport:
    """One teacher's work in a step, from its first issued prompt until all trajectories are scored.

    Attributes:
        score_s: Seconds of scoring, summed over replicas.
        idle_share: Share of the replicas' time in which they were idle, in [0, 1].
        num_trajectories: Number of scored trajectories.
        num_tokens: Number of tokens in scored trajectories, including prompts.
        num_stored: Number of trajectories whose scores were cached.
        num_restarts: Number of replica restarts.
    """

    score_s: float
    idle_share: float
    num_trajectories: int
    num_tokens: int
    num_stored: int
    num_restarts: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens scored per second and replica; 0 if nothing was scored."""
        return self.num_tokens / self.score_s if self.score_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReport:
    """Work of all teachers in a step.

    Attributes:
        waited_s: Seconds from the last rollout until every trajectory was scored.
        teachers: Report of each teacher by name.
    """

    waited_s: float
    teachers: Mapping[str, TeacherReport]

    def metrics(self) -> dict[str, float]:
        """Each teacher's work, by metric name."""
        metrics: dict[str, float] = {}
        for name, of_teacher in self.teachers.items():
            values = {
                "score_s": of_teacher.score_s,
                "idle_share": of_teacher.idle_share,
                "trajectories": of_teacher.num_trajectories,
                "tokens_per_s": of_teacher.tokens_per_s,
                "restarts": of_teacher.num_restarts,
                "cache_hits": of_teacher.num_stored,
            }
            metrics |= {f"teacher/{name}/{metric}": value for metric, value in values.items()}
        return metrics


class Tally:
    """Counters of one teacher during a step."""

    def __init__(self, teacher: ReplicatedTeacher) -> None:
        """Start counting."""
        self._teacher = teacher
        self._reset()

    def _reset(self) -> None:
        self._began, self._busy_s, self._num_restarts = (
            time.monotonic(),
            self._teacher.busy_s,
            self._teacher.num_restarts,
        )
        self._num_trajectories = self._num_tokens = self._num_stored = 0

    def count(self, rows: Sequence[TeacherRow], *, num_stored: int) -> None:
        """Count scored trajectories and cached ones."""
        self._num_trajectories += len(rows)
        self._num_tokens += sum(len(row.input_ids) for row in rows)
        self._num_stored += num_stored

    def take(self) -> TeacherReport:
        """Return the report since the start or the last call, and reset the counters."""
        busy_s = self._teacher.busy_s - self._busy_s
        elapsed_s = (time.monotonic() - self._began) * self._teacher.num_replicas
        report = TeacherReport(
            score_s=busy_s,
            idle_share=min(max(1 - busy_s / elapsed_s, 0.0), 1.0) if elapsed_s > 0 else 0.0,
            num_trajectories=self._num_trajectories,
            num_tokens=self._num_tokens,
            num_stored=self._num_stored,
            num_restarts=self._teacher.num_restarts - self._num_restarts,
        )
        self._reset()
        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeacher:
    """A teacher with its cache and aligner.

    Attributes:
        teacher: The teacher.
        index: Index of the teacher in the column `teacher_index`.
        cache: Cache of its scores, in its own tokens; None without a cache.
        aligner: Translates tokens; None if the teacher has the student's tokens.
    """

    teacher: ReplicatedTeacher
    index: int
    cache: ScoreCache | None = None
    aligner: TeacherAligner | None = None

    async def scores(
        self, rows: Sequence[TeacherRow], logprobs: Sequence[FloatArray] | None, *, shape: ScoreShape, tally: Tally
    ) -> list[TeacherScores]:
        """Return checked and masked scores of trajectories; fully masked trajectories are not sent to the teacher.

        Args:
            rows: The student's trajectories.
            logprobs: [T] student logprobs of each trajectory, for an aligner; None without an aligner.
            shape: Expected shape of the scores.
            tally: Counts the trajectories.

        Raises:
            TeacherError: The teacher returned invalid scores.
            EngineDiedError: The teacher's replica died.
        """
        trained = [at for at, row in enumerate(rows) if row.loss_mask.any()]
        own = [rows[at] for at in trained]
        if self.aligner is None or logprobs is None:
            scores = await self._own_scores(own, shape=shape, tally=tally)
        else:
            own_logprobs = [logprobs[at] for at in trained]
            scores = await self._aligned_scores(self.aligner, own, own_logprobs, shape=shape, tally=tally)
        of_row = dict(zip(trained, scores, strict=True))
        return [of_row.get(at) or empty_scores(row, shape) for at, row in enumerate(rows)]

    async def _aligned_scores(
        self,
        aligner: TeacherAligner,
        rows: Sequence[TeacherRow],
        logprobs: Sequence[FloatArray],
        *,
        shape: ScoreShape,
        tally: Tally,
    ) -> list[TeacherScores]:
        """Score and check the text in the teacher's tokens, then translate the scores to the student's tokens."""
        own = ScoreShape(top_k=shape.top_k, vocab_size=self.teacher.vocab_size)
        translations = await asyncio.to_thread(lambda: [aligner.to_teacher(row) for row in rows])
        asked = [one.row for one in translations if one.row.loss_mask.any()]
        scores = iter(await self._own_scores(asked, shape=own, tally=tally))
        of_all = [next(scores) if one.row.loss_mask.any() else empty_scores(one.row, own) for one in translations]
        return [
            aligner.to_student(one, row, translation, rollout_logprobs=values)
            for one, row, translation, values in zip(of_all, rows, translations, logprobs, strict=True)
        ]

    async def _own_scores(self, rows: Sequence[TeacherRow], *, shape: ScoreShape, tally: Tally) -> list[TeacherScores]:
        """Return cached scores and, for the rest, the teacher's, which are then cached."""
        name, cache = self.teacher.name, self.cache
        stored: Sequence[TeacherScores | None] = [None] * len(rows)
        if cache is not None:
            stored = await asyncio.to_thread(cache.lookup, rows)
        missing = [row for row, one in zip(rows, stored, strict=True) if one is None]
        fresh = await self.teacher.score(missing) if missing else []
        fresh = [check_scores(one, row, teacher=name, shape=shape) for one, row in zip(fresh, missing, strict=True)]
        if cache is not None and missing:
            await asyncio.to_thread(cache.store, missing, fresh)
        tally.count(missing, num_stored=len(rows) - len(missing))
        rest = iter(fresh)
        return [
            next(rest) if one is None else check_scores(one, row, teacher=f"{name} (stored)", shape=shape)
            for one, row in zip(stored, rows, strict=True)
        ]
