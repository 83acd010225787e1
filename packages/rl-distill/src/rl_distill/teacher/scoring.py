"""From trajectories to checked scores of one teacher: in its own tokens where it has others, stored or asked for."""

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
    """A teacher, and what stands between it and the queue.

    Attributes:
        teacher: Scores.
        index: Its number in `teacher_index`.
        cache: What it said before, in its own tokens.
        aligner: Where its tokens are not the student's.
    """

    teacher: ReplicatedTeacher
    index: int
    cache: ScoreCache | None = None
    aligner: TeacherAligner | None = None

    async def scores(
        self, rows: Sequence[TeacherRow], logprobs: Sequence[FloatArray], *, shape: ScoreShape, tally: Tally
    ) -> list[TeacherScores]:
        """Checked and masked scores of trajectories; fully masked ones are not scored.

        Args:
            rows: Trajectories of the student.
            logprobs: [T] of each, the student's own; used by an aligner alone.
            shape: What the scores must look like.
            tally: Counts them.

        Raises:
            TeacherError: The teacher gives what cannot be trained on.
            EngineDiedError: It died.
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
        """Scores of the same text in the teacher's tokens, checked there, put at the student's tokens."""
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
        """Stored scores, and those of the teacher, which are stored."""
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
