"""Scores sessions again with the weights that sampled them, to prove that the engine used the stored context."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import structlog

from rl_core.data import FloatArray, Trajectory
from rl_core.errors import DataError, RLError
from rl_core.record_fields import record
from rl_rollout.engines.protocol import RolloutEngine, SamplingParams

log = structlog.get_logger(__name__)

ServedVersion = Callable[[], int | None]
"""Returns the version that all engines serve, or None during a weight update."""

SUMMED = ("num_sessions", "num_skipped", "num_tokens", "sum_diff")
ROUNDING_TOKENS = 8
"""Number of extra tokens with zero difference in a turn's mean, because one bfloat16 token may differ much."""


@record
class Rescored:
    """The result of scoring sessions again.

    Attributes:
        num_sessions: Number of scored sessions.
        num_skipped: Number of sessions not scored because the weights changed while they were sampled or scored.
        num_tokens: Number of compared trained tokens.
        sum_diff: Sum of the absolute logprob differences, in nats.
        max_diff: Maximum absolute logprob difference, in nats.
    """

    num_sessions: int = 0
    num_skipped: int = 0
    num_tokens: int = 0
    sum_diff: float = 0.0
    max_diff: float = 0.0

    @classmethod
    def total(cls, parts: Iterable["Rescored"]) -> "Rescored":
        """Combine several results."""
        total = cls()
        for part in parts:
            sums = {name: getattr(total, name) + getattr(part, name) for name in SUMMED}
            total = cls(**sums, max_diff=max(total.max_diff, part.max_diff))
        return total


class ScoreAudit:
    """Compares stored logprobs with those that the engine computes for the whole sequence."""

    def __init__(self, engine: RolloutEngine, served: ServedVersion | None, *, tolerance: float) -> None:
        """Store the parts. No request is sent yet.

        Args:
            engine: The engine that sampled the sessions.
            served: Returns the weight version that the engine serves. None if weights never change while sessions run.
            tolerance: See `AuditOptions`.
        """
        self._engine = engine
        self._tolerance = tolerance
        self._served = served
        self._said: set[str] = set()

    def can_compare(self, sampling: SamplingParams) -> bool:
        """Return True if `score` and this sampling report the same logprobs, those of the unmodified policy."""
        if sampling.temperature == 0:
            return False
        is_policy = (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, None)
        if not is_policy:
            self._say("temperature, top_p or top_k change the distribution, which `score` ignores")
        return is_policy

    async def check(self, trajectories: Sequence[Trajectory]) -> Rescored:
        """Score the trajectories of a session.

        Raises:
            DataError: A turn's mean difference is too large, so its context differed.
        """
        versions = {int(version) for row in trajectories for version in row.policy_versions[row.loss_mask]}
        skipped = Rescored(num_skipped=1)
        if len(versions) != 1 or not self._serves(versions):
            return skipped
        sequences = [row.input_ids[: np.flatnonzero(row.loss_mask).max(initial=0) + 1] for row in trajectories]
        images = [
            tuple(one for one in row.images if one.start < len(sequence))
            for row, sequence in zip(trajectories, sequences, strict=True)
        ]
        try:
            scores = await (
                self._engine.score(sequences, images=images) if any(images) else self._engine.score(sequences)
            )
        except (RLError, NotImplementedError, AttributeError) as error:
            self._say(f"the engine cannot score: {error}")
            return skipped
        if not self._serves(versions):
            return skipped
        pairs = zip(trajectories, scores, strict=True)
        compared = [_compared(row, one.token_logprobs, self._tolerance) for row, one in pairs]
        return Rescored.total([Rescored(num_sessions=1), *compared])

    def _serves(self, versions: set[int]) -> bool:
        return self._served is None or self._served() in versions

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.warning("sessions_not_scored_again", reason=reason)


def _compared(row: Trajectory, scores: FloatArray, limit: float) -> Rescored:
    """Return the logprob differences of a trajectory's trained tokens, per turn.

    Raises:
        DataError: A turn's differences are too large or not finite.
    """
    trained = np.flatnonzero(row.loss_mask)
    if not len(trained):
        return Rescored()
    differences = np.abs(scores[trained].astype(np.float64) - row.rollout_logprobs[trained])
    starts = np.flatnonzero(np.diff(trained, prepend=-2) > 1)
    sums = np.add.reduceat(differences, starts)
    sizes = np.diff(starts, append=len(trained))
    for turn in np.flatnonzero(~(sums / (sizes + ROUNDING_TOKENS) <= limit))[:1]:  # False for NaN
        first = trained[starts[turn]]
        raise DataError(
            f"prompt {row.prompt_uid}, session {row.session_index}, output {row.output_index}: scored again, the "
            f"{sizes[turn]} tokens from {first} on differ from their sampled logprobs by a mean of "
            f"{sums[turn] / sizes[turn]:.3g} nats (about {limit:g} is allowed), so the engine sampled them in a "
            "different context than the trajectory's."
        )
    return Rescored(num_tokens=len(trained), sum_diff=float(differences.sum()), max_diff=float(differences.max()))
