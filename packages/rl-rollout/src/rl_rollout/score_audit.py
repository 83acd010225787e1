"""Scores sessions again with the weights that sampled them: proof that the engine saw the context that is kept."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import structlog

from rl_core.data import FloatArray, Trajectory
from rl_core.errors import DataError, RLError
from rl_core.record_fields import record
from rl_rollout.engines.protocol import RolloutEngine, SamplingParams

log = structlog.get_logger(__name__)

ServedVersion = Callable[[], int | None]
"""The version that all engines serve; None while they take another one."""

ROUNDING_TOKENS = 8
"""A turn's mean difference is taken as if so many tokens more agreed: in bfloat16 a single token may be far off."""


@record
class Rescored:
    """What came of scoring sessions again.

    Attributes:
        num_sessions: That were scored.
        num_skipped: That could not be: the weights were replaced while they were sampled or scored.
        num_tokens: Trained tokens that were compared.
        sum_diff: Sum of the absolute differences of their logprobs, in nats.
        max_diff: Largest of them.
    """

    num_sessions: int = 0
    num_skipped: int = 0
    num_tokens: int = 0
    sum_diff: float = 0.0
    max_diff: float = 0.0

    @classmethod
    def total(cls, parts: Iterable["Rescored"]) -> "Rescored":
        """All of them together."""
        all_parts = list(parts)
        return cls(
            num_sessions=sum(one.num_sessions for one in all_parts),
            num_skipped=sum(one.num_skipped for one in all_parts),
            num_tokens=sum(one.num_tokens for one in all_parts),
            sum_diff=sum(one.sum_diff for one in all_parts),
            max_diff=max((one.max_diff for one in all_parts), default=0.0),
        )


class ScoreAudit:
    """Compares kept logprobs with those that the engine gives to the whole sequence."""

    def __init__(self, engine: RolloutEngine, served: ServedVersion | None, *, tolerance: float) -> None:
        """Nothing is asked yet.

        Args:
            engine: Sampled the sessions.
            served: Tells which weights it serves; None where these do not change while sessions run.
            tolerance: See `AuditOptions`.
        """
        self._engine = engine
        self._tolerance = tolerance
        self._served = served
        self._said: set[str] = set()

    def can_compare(self, sampling: SamplingParams) -> bool:
        """Whether `score` tells the logprobs that such sampling keeps: those of the policy itself."""
        if sampling.temperature == 0:
            return False
        is_policy = (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, None)
        if not is_policy:
            self._say("temperature, top_p or top_k change the distribution, which score does not know")
        return is_policy

    async def check(self, trajectories: Sequence[Trajectory]) -> Rescored:
        """Score the trajectories of a session.

        Raises:
            DataError: A turn is too far off: its context was another one.
        """
        versions = {int(version) for row in trajectories for version in row.policy_versions[row.loss_mask]}
        skipped = Rescored(num_skipped=1)
        if len(versions) != 1 or not self._serves(versions):
            return skipped
        sequences = [row.input_ids[: np.flatnonzero(row.loss_mask).max(initial=0) + 1] for row in trajectories]
        try:
            scores = await self._engine.score(sequences)
        except (RLError, NotImplementedError, AttributeError) as error:
            self._say(f"the engine cannot score: {error}")
            return skipped
        if not self._serves(versions):
            return skipped
        found = [_compared(row, score, self._tolerance) for row, score in zip(trajectories, scores, strict=True)]
        return Rescored.total([Rescored(num_sessions=1), *found])

    def _serves(self, versions: set[int]) -> bool:
        return self._served is None or self._served() in versions

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.warning("sessions_not_scored_again", reason=reason)


def _compared(row: Trajectory, scores: FloatArray, limit: float) -> Rescored:
    """The differences of a trajectory's trained tokens, turn by turn.

    Raises:
        DataError: Those of a turn are too large, or no numbers.
    """
    trained = np.flatnonzero(row.loss_mask)
    if not len(trained):
        return Rescored()
    differences = np.abs(scores[trained].astype(np.float64) - row.rollout_logprobs[trained])
    starts = np.flatnonzero(np.diff(trained, prepend=-2) > 1)
    sums = np.add.reduceat(differences, starts)
    sizes = np.diff(starts, append=len(trained))
    for turn in np.flatnonzero(~(sums / (sizes + ROUNDING_TOKENS) <= limit))[:1]:  # never of NaN
        first = trained[starts[turn]]
        raise DataError(
            f"prompt {row.prompt_uid}, session {row.session_index}, output {row.output_index}: scored again, the "
            f"{sizes[turn]} tokens from {first} on differ from the logprobs that they were sampled with by "
            f"{sums[turn] / sizes[turn]:.3g} nats in the mean (about {limit:g} is allowed), so the engine sampled them "
            "in another context than the trajectory has."
        )
    return Rescored(num_tokens=len(trained), sum_diff=float(differences.sum()), max_diff=float(differences.max()))
