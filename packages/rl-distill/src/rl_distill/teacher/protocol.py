"""What teachers are asked for, and what they know of their replicas."""

from collections.abc import Sequence
from typing import Protocol

from rl_core.record_fields import record, settings_record
from rl_distill.teacher.scores import TeacherRow, TeacherScores


@settings_record
class TeacherPlan:
    """What a teacher is asked for, and how long it may take.

    Attributes:
        name: Of the teacher.
        num_replicas: How many there are.
        top_k: Likeliest tokens to give beside the sampled one.
        with_hidden: Give hidden states too.
        restarts: How often each replica may be started again.
        dtype: What it computes in.
        sleeps: Whether it frees its memory after use, where it can.
        deadline_s: Longest wait for scores.
        start_deadline_s: Longest wait for a replica to start, or to wake.
    """

    name: str
    num_replicas: int = 1
    top_k: int = 0
    with_hidden: bool = False
    restarts: int = 3
    dtype: str = "float32"
    sleeps: bool = True
    deadline_s: float = 3600.0
    start_deadline_s: float = 900.0


@record
class TeacherTraits:
    """What every replica of a teacher is.

    Attributes:
        vocab_size: Its token ids are below this.
        hidden_size: Width of its hidden states; None where it gives none.
        max_tokens: Longest trajectory that it scores.
    """

    vocab_size: int
    hidden_size: int | None
    max_tokens: int


class TeacherReplica(Protocol):
    """One copy of a teacher's model; used by one event loop.

    It raises EngineDiedError when it is gone, in whatever call notices, and serves no more after that.
    """

    @property
    def max_tokens(self) -> int:
        """Longest trajectory that it scores."""
        ...

    @property
    def vocab_size(self) -> int:
        """Its token ids are below this."""
        ...

    @property
    def hidden_size(self) -> int | None:
        """Width of its hidden states; None where it gives none."""
        ...

    @property
    def most_top_k(self) -> int:
        """Largest `top_k` that it gives."""
        ...

    @property
    def at_once(self) -> int:
        """Calls of `score` that it works on at once with gain."""
        ...

    @property
    def can_sleep(self) -> bool:
        """Whether `sleep` frees memory."""
        ...

    async def start(self) -> None:
        """Load the model; slow."""
        ...

    async def score(self, sequences: Sequence[TeacherRow], *, top_k: int, with_hidden: bool) -> list[TeacherScores]:
        """Scores of trajectories, in order: every token of them, unchecked."""
        ...

    async def wake(self) -> None:
        """Take the memory again; nothing when awake."""
        ...

    async def sleep(self) -> None:
        """Free memory until `wake`."""
        ...

    async def close(self) -> None:
        """End it, and whatever it started. Can be called twice."""
        ...
