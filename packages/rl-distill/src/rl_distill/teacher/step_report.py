"""What teachers did, and what it cost."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_distill.teacher.replicas import ReplicatedTeacher
from rl_distill.teacher.scores import TeacherRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherReport:
    """One teacher, from the first issue of a step until nothing was left.

    Attributes:
        score_s: Seconds in which its replicas scored, summed over them.
        idle_share: Share of the time in which they did not.
        num_trajectories: That it scored.
        num_tokens: Of these, prompts included.
        num_stored: Trajectories whose scores were stored already.
        num_restarts: Replicas that were started again.
    """

    score_s: float
    idle_share: float
    num_trajectories: int
    num_tokens: int
    num_stored: int
    num_restarts: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens by the second of one replica; 0 where nothing was scored."""
        return self.num_tokens / self.score_s if self.score_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReport:
    """All teachers of a step.

    Attributes:
        waited_s: Seconds from the last rollout until every trajectory had its scores.
        teachers: By name.
    """

    waited_s: float
    teachers: Mapping[str, TeacherReport]


@dataclass(slots=True)
class Tally:
    """Counts of one teacher while a step runs."""

    began: float
    busy_s: float
    num_restarts: int
    num_trajectories: int = 0
    num_tokens: int = 0
    num_stored: int = 0

    @classmethod
    def begin(cls, teacher: ReplicatedTeacher) -> "Tally":
        """Count from now on."""
        return cls(began=time.monotonic(), busy_s=teacher.busy_s, num_restarts=teacher.num_restarts)

    def count(self, rows: Sequence[TeacherRow], *, num_stored: int) -> None:
        """These rows were scored, and so many were stored."""
        self.num_trajectories += len(rows)
        self.num_tokens += sum(len(row.input_ids) for row in rows)
        self.num_stored += num_stored

    def take(self, teacher: ReplicatedTeacher) -> TeacherReport:
        """What came of it since the last time; it counts on from zero."""
        report, fresh = self.end(teacher), Tally.begin(teacher)
        self.began, self.busy_s, self.num_restarts = fresh.began, fresh.busy_s, fresh.num_restarts
        self.num_trajectories = self.num_tokens = self.num_stored = 0
        return report

    def end(self, teacher: ReplicatedTeacher) -> TeacherReport:
        """What came of it."""
        busy_s = teacher.busy_s - self.busy_s
        elapsed_s = (time.monotonic() - self.began) * teacher.num_replicas
        return TeacherReport(
            score_s=busy_s,
            idle_share=min(max(1 - busy_s / elapsed_s, 0.0), 1.0) if elapsed_s > 0 else 0.0,
            num_trajectories=self.num_trajectories,
            num_tokens=self.num_tokens,
            num_stored=self.num_stored,
            num_restarts=teacher.num_restarts - self.num_restarts,
        )
