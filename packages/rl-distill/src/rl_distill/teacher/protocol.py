"""What the service knows of teachers, of stored scores, and of teachers with another tokenizer."""

from collections.abc import Sequence
from typing import Protocol

from rl_distill.teacher.scores import TeacherRow, TeacherScores


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


class Teacher(Protocol):
    """A teacher as the service sees it; used by one event loop."""

    @property
    def name(self) -> str:
        """In settings, metrics and errors."""
        ...

    @property
    def num_replicas(self) -> int:
        """Copies that score side by side."""
        ...

    @property
    def at_once(self) -> int:
        """Calls of `score` that make sense at once."""
        ...

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
    def num_restarts(self) -> int:
        """Replicas that were started again so far."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds in which replicas scored so far, summed over them."""
        ...

    async def start(self) -> None:
        """Load the model.

        Raises:
            TeacherError: It cannot, or cannot give what is asked for.
            DeadlineError: It took too long.
        """
        ...

    async def score(self, rows: Sequence[TeacherRow]) -> list[TeacherScores]:
        """Scores of trajectories, in order, unchecked.

        Raises:
            EngineDiedError: The replica that scored them died; another one may score them.
            TeacherError: It cannot score them, or no replica is left.
            DeadlineError: It took too long.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again, and prove that it serves: a replica that gives other scores than before is restarted.

        Raises:
            DeadlineError: It took too long.
        """
        ...

    async def sleep(self) -> None:
        """Free memory until `wake`, where it can."""
        ...

    async def close(self) -> None:
        """End every replica. Can be called twice."""
        ...


class ScoreCache(Protocol):
    """Stored scores of one teacher, checked and masked; its methods may be slow, and run in a thread."""

    def lookup(self, rows: Sequence[TeacherRow]) -> list[TeacherScores | None]:
        """What is stored of each trajectory."""
        ...

    def store(self, rows: Sequence[TeacherRow], scores: Sequence[TeacherScores]) -> None:
        """Keep the scores of trajectories."""
        ...

    def flush(self) -> None:
        """Write what is not written yet."""
        ...
