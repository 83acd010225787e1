"""Session rules: the reward of a session with several trajectories, and which of them get the advantage.

A rule forms *units*, the items that an advantage estimator compares within the group of a prompt, and sets the share of
a unit's advantage that each of its trajectories gets.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rl_core.record_fields import record
from rl_core.registry import Registry
from rl_distill.objectives.shapes import check_rows


@record
class SessionRows:
    """Inputs of a session rule: the trajectories of a global batch.

    Attributes:
        rewards: [N] float reward of each trajectory.
        session: [N] int64 session index from 0, unique over all groups.
        is_last: [N] bool, True for the last trajectory of each session.
    """

    rewards: Tensor
    session: Tensor
    is_last: Tensor


@record
class SessionCredit:
    """Result of a session rule.

    Attributes:
        unit: [N] int64 unit index of each row, from 0 without gaps; the rows of a unit are compared as one item.
        rewards: [N] float reward of each row's unit.
        share: [N] float factor that multiplies the unit's advantage for each row.
    """

    unit: Tensor
    rewards: Tensor
    share: Tensor

    def __post_init__(self) -> None:
        """Check the shapes."""
        check_rows({name: getattr(self, name) for name in ("unit", "rewards", "share")})


SessionRule = Callable[[SessionRows], SessionCredit]
"""SessionRows -> SessionCredit."""


def last(rows: SessionRows) -> SessionCredit:
    """Use the last trajectory's reward; all trajectories of the session get the advantage."""
    of_sessions = rows.rewards.new_zeros(_num_sessions(rows))
    of_sessions[rows.session[rows.is_last]] = rows.rewards[rows.is_last]
    return SessionCredit(unit=rows.session, rewards=of_sessions[rows.session], share=torch.ones_like(rows.rewards))


def last_only(rows: SessionRows) -> SessionCredit:
    """Use the last trajectory's reward; only this trajectory gets the advantage, the others get 0."""
    credit = last(rows)
    return SessionCredit(unit=credit.unit, rewards=credit.rewards, share=rows.is_last.to(rows.rewards.dtype))


def mean(rows: SessionRows) -> SessionCredit:
    """Use the mean of the trajectories' rewards; all trajectories of the session get the advantage."""
    counts = torch.bincount(rows.session)
    sums = rows.rewards.new_zeros(len(counts), dtype=torch.float64)
    means = sums.index_add(0, rows.session, rows.rewards.double()) / counts
    return SessionCredit(
        unit=rows.session,
        rewards=means.to(rows.rewards.dtype)[rows.session],
        share=torch.ones_like(rows.rewards),
    )


def each(rows: SessionRows) -> SessionCredit:
    """Treat every trajectory as its own session, with its own reward and advantage."""
    unit = torch.arange(len(rows.rewards), device=rows.rewards.device)
    return SessionCredit(unit=unit, rewards=rows.rewards, share=torch.ones_like(rows.rewards))


SESSION_RULES: Registry[SessionRule] = Registry(
    "session rule",
    {"last": last, "last_only": last_only, "mean": mean, "each": each},
    group="rl_distill.session_rules",
)


def _num_sessions(rows: SessionRows) -> int:
    return int(rows.session.max()) + 1 if len(rows.session) else 0
