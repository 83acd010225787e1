"""Session rules: what a session is worth that gave several trajectories, and which of them learn from it.

A rule makes *units*, the items that an advantage estimator compares within the group of a prompt, and says with which
share a unit's advantage goes to each of its trajectories.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rl_core.record_fields import record
from rl_core.registry import Registry
from rl_distill.objectives.shapes import check_rows


@record
class SessionRows:
    """What a rule is told: the trajectories of a global batch.

    Attributes:
        rewards: [N] float, each trajectory's own.
        session: [N] int64 from 0, different for each session of each group.
        is_last: [N] bool, True for the last trajectory of each session.
    """

    rewards: Tensor
    session: Tensor
    is_last: Tensor


@record
class SessionCredit:
    """What a rule gives.

    Attributes:
        unit: [N] int64 from 0 without gaps; rows of one unit are compared with others as one item.
        rewards: [N] float, reward of each row's unit: the same for all rows of a unit.
        share: [N] float, what the unit's advantage is multiplied by for each row.
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
    """A session is worth what its last trajectory is; all of its trajectories get the advantage."""
    of_sessions = rows.rewards.new_zeros(_num_sessions(rows))
    of_sessions[rows.session[rows.is_last]] = rows.rewards[rows.is_last]
    return SessionCredit(unit=rows.session, rewards=of_sessions[rows.session], share=torch.ones_like(rows.rewards))


def last_only(rows: SessionRows) -> SessionCredit:
    """A session is worth what its last trajectory is; that one alone gets the advantage, the others 0."""
    credit = last(rows)
    return SessionCredit(unit=credit.unit, rewards=credit.rewards, share=rows.is_last.to(rows.rewards.dtype))


def mean(rows: SessionRows) -> SessionCredit:
    """A session is worth the mean of its trajectories' rewards; all of them get the advantage."""
    counts = torch.bincount(rows.session)
    sums = rows.rewards.new_zeros(len(counts), dtype=torch.float64)
    means = sums.index_add(0, rows.session, rows.rewards.double()) / counts
    return SessionCredit(
        unit=rows.session,
        rewards=means.to(rows.rewards.dtype)[rows.session],
        share=torch.ones_like(rows.rewards),
    )


def each(rows: SessionRows) -> SessionCredit:
    """Every trajectory counts as a session of its own, with its own reward and advantage."""
    unit = torch.arange(len(rows.rewards), device=rows.rewards.device)
    return SessionCredit(unit=unit, rewards=rows.rewards, share=torch.ones_like(rows.rewards))


SESSION_RULES: Registry[SessionRule] = Registry(
    "session rule",
    {"last": last, "last_only": last_only, "mean": mean, "each": each},
    group="rl_distill.session_rules",
)


def _num_sessions(rows: SessionRows) -> int:
    return int(rows.session.max()) + 1 if len(rows.session) else 0
