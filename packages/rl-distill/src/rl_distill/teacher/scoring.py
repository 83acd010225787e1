"""Checked scores of one teacher: cached or computed, and translated if its tokens differ from the student's."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rl_core.data import FloatArray
from rl_distill.teacher.aligned import TeacherAligner
from rl_distill.teacher.replicas import ReplicatedTeacher
from rl_distill.teacher.score_cache import ScoreCache
from rl_distill.teacher.scores import ScoreShape, TeacherRow, TeacherScores, check_scores, empty_scores
from rl_distill.teacher.step_report import Tally


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
        self, rows: Sequence[TeacherRow], logprobs: Sequence[FloatArray], *, shape: ScoreShape, tally: Tally
    ) -> list[TeacherScores]:
        """Return checked and masked scores of trajectories; fully masked trajectories are not sent to the teacher.

        Args:
            rows: The student's trajectories.
            logprobs: [T] student logprobs of each trajectory; only used by an aligner.
            shape: Expected shape of the scores.
            tally: Counts the trajectories.

        Raises:
            TeacherError: The teacher returned invalid scores.
            EngineDiedError: The teacher's replica died.
        """
        trained = [at for at, row in enumerate(rows) if row.loss_mask.any()]
        if self.aligner is None:
            scores = await self._own_scores([rows[at] for at in trained], shape=shape, tally=tally)
        else:
            scores = await self._aligned_scores(
                self.aligner, [rows[at] for at in trained], [logprobs[at] for at in trained], shape=shape, tally=tally
            )
        found = dict(zip(trained, scores, strict=True))
        return [found.get(at) or empty_scores(row, shape) for at, row in enumerate(rows)]

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
