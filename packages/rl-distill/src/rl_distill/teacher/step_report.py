"""Reports on the teachers' work and time."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_distill.teacher.replicas import ReplicatedTeacher
from rl_distill.teacher.scores import TeacherRow


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


@dataclass(slots=True)
class Tally:
    """Counters of one teacher during a step."""

    began: float
    busy_s: float
    num_restarts: int
    num_trajectories: int = 0
    num_tokens: int = 0
    num_stored: int = 0

    @classmethod
    def begin(cls, teacher: ReplicatedTeacher) -> "Tally":
        """Start counting."""
        return cls(began=time.monotonic(), busy_s=teacher.busy_s, num_restarts=teacher.num_restarts)

    def count(self, rows: Sequence[TeacherRow], *, num_stored: int) -> None:
        """Count scored trajectories and cached ones."""
        self.num_trajectories += len(rows)
        self.num_tokens += sum(len(row.input_ids) for row in rows)
        self.num_stored += num_stored

    def take(self, teacher: ReplicatedTeacher) -> TeacherReport:
        """Return the report since the last call, and reset the counters."""
        report, fresh = self.end(teacher), Tally.begin(teacher)
        self.began, self.busy_s, self.num_restarts = fresh.began, fresh.busy_s, fresh.num_restarts
        self.num_trajectories = self.num_tokens = self.num_stored = 0
        return report

    def end(self, teacher: ReplicatedTeacher) -> TeacherReport:
        """Return the final report."""
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
