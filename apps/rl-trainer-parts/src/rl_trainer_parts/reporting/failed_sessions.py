"""Failed sessions, and sessions whose failed reward counts as 0: counted, reported once a step, partly recorded."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_core import Batch
from rl_trainer_parts.reporting.rollout_rows import RolloutDraft, draft_rows
from rl_trainer_parts.rollouts.answers import Answer
from rl_trainer_parts.rollouts.setup import rollout_extras
from rl_trainer_parts.settings.schema import Settings

EVENT = "sessions_failed"

MAX_WRITTEN = 4
"""Maximum number of failed sessions recorded per step."""

OF_A_REWARD = re.compile(r"(part '.*' of the reward: )*reward function ", re.DOTALL)
"""Pattern of a failure reason that comes from the reward."""

REWARD_FAILURE = "reward_failure"
"""Extra that marks a reward of 0 after a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSessions:
    """Failures in a set of sessions.

    Attributes:
        failed: Answers of failed sessions.
        zeroed: Answers whose reward, or a part of it, failed and counts as 0, with the reason.
        num_sessions: Number of all sessions.
    """

    failed: Sequence[Answer]
    zeroed: Sequence[tuple[Answer, str]]
    num_sessions: int

    @classmethod
    def among(cls, answers: Sequence[Answer]) -> "FailedSessions":
        """Find them."""
        return cls(
            failed=[one for one in answers if one.failure is not None],
            zeroed=[
                (one, reason)
                for one in answers
                if one.failure is None and (reason := next(_reward_failures(one.trajectory.extras), None))
            ],
            num_sessions=len(answers),
        )

    @property
    def num_rewards(self) -> int:
        """Number of sessions without a usable reward."""
        return sum(OF_A_REWARD.match(one.failure or "") is not None for one in self.failed) + len(self.zeroed)

    def tell(self, say: Callable[..., None], *, during: str, **fields: Any) -> None:
        """Log the event if there are failures.

        Args:
            say: Logs an event.
            during: What the sessions were for, such as "training".
            fields: Further fields of the event.
        """
        reasons = [(one, one.failure) for one in self.failed] + [*self.zeroed]
        if reasons:
            first, error = reasons[0]
            say(
                EVENT,
                **fields,
                level="warning",
                during=during,
                num_failed=len(self.failed),
                num_zeroed=len(self.zeroed),
                num_rewards=self.num_rewards,
                num_sessions=self.num_sessions,
                prompt_uid=first.prompt.uid,
                session_index=first.trajectory.session_index,
                error=error,
            )

    def drafts(self, settings: Settings, *, step: int) -> list[RolloutDraft]:
        """Some failed sessions, as records for rollouts.jsonl.

        Args:
            settings: The run's settings.
            step: The step they belong to, from 1.
        """
        written: list[Answer] = []
        left = settings.metrics.log_rollout_tokens
        for one in self.failed[: min(MAX_WRITTEN, settings.metrics.log_rollouts)]:
            left -= one.trajectory.num_response_tokens
            if not written or left >= 0:
                written.append(one)
        if not written:
            return []
        batch = Batch.from_trajectories([one.trajectory for one in written])
        batch = batch.with_extras([rollout_extras(one.prompt, one.trajectory) for one in written])
        return [
            (ids, replace(row, failure=one.failure, policy_version=int(max((0, *row.columns["versions"])))))
            for (ids, row), one in zip(draft_rows(batch, step=step, version=0), written, strict=True)
        ]


def failures_line(event: Mapping[str, Any]) -> str:
    """The event as a line of text."""
    failed, zeroed, total = event["num_failed"], event["num_zeroed"], event["num_sessions"]
    said = []
    if failed:
        of_rewards = event["num_rewards"] - zeroed
        said.append(
            f"{failed} of {total} sessions failed"
            + (f", {of_rewards} of them in their reward" if of_rewards else "")
            + ("; they are left out" if event["during"] == "training" else "")
        )
    if zeroed:
        said.append(f"the rewards of {zeroed} of {total} sessions failed and count as 0")
    during = "" if event["during"] == "training" else f" ({event['during']})"
    return f"step {event['step']}{during}: {'; '.join(said)}. The first: {event['error']}"


def _reward_failures(extras: Mapping[str, Any]) -> Iterator[str]:
    """Why a session's reward, or a part of it, counts as 0."""
    for one in (extras, *extras.values()):
        if isinstance(one, Mapping) and REWARD_FAILURE in one:
            yield str(one[REWARD_FAILURE])
