"""Protocol of a teacher's replicas, and the requests to teachers."""

from collections.abc import Sequence
from typing import Protocol

from rl_core.record_fields import record, settings_record
from rl_distill.teacher.scores import TeacherRow, TeacherScores


@settings_record
class TeacherPlan:
    """Requests to a teacher, and their deadlines.

    Attributes:
        name: Name of the teacher.
        num_replicas: Number of replicas.
        top_k: Number of most likely tokens to return in addition to the sampled one.
        with_hidden: Also return hidden states.
        restarts: Maximum restarts of each replica.
        dtype: Computation dtype.
        sleeps: Free the replica's memory after use, if it can.
        deadline_s: Maximum seconds for a request's scores.
        start_deadline_s: Maximum seconds for a replica to start or wake.
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
    """Properties that all replicas of a teacher share.

    Attributes:
        vocab_size: Exclusive upper bound of token ids.
        hidden_size: Width of the hidden states; None without them.
        max_tokens: Maximum trajectory length in tokens.
    """

    vocab_size: int
    hidden_size: int | None
    max_tokens: int


class TeacherReplica(Protocol):
    """One copy of a teacher's model; used from one event loop.

    Any call raises EngineDiedError if the replica is dead; no call works after that. A replica may also have `async def
    gpu_use(self) -> list[GpuUse]` (`rl_core.gpus`), the use of each of its GPUs since the last call.
    """

    @property
    def traits(self) -> TeacherTraits:
        """Properties of the model, known after `start`."""
        ...

    @property
    def most_top_k(self) -> int:
        """Maximum `top_k`."""
        ...

    @property
    def at_once(self) -> int:
        """Number of concurrent calls of `score` that keep the replica busy."""
        ...

    @property
    def can_sleep(self) -> bool:
        """Whether `sleep` frees memory."""
        ...

    async def start(self) -> None:
        """Load the model; slow."""
        ...

    async def score(self, sequences: Sequence[TeacherRow], *, top_k: int, with_hidden: bool) -> list[TeacherScores]:
        """Score every token of trajectories; the scores are returned in order, unchecked."""
        ...

    async def wake(self) -> None:
        """Restore the freed memory; no effect if awake."""
        ...

    async def sleep(self) -> None:
        """Free memory until `wake`."""
        ...

    async def close(self) -> None:
        """Stop the replica and everything it started. Can be called twice."""
        ...
