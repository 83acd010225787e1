"""Inputs of advantage estimators, by session or by token, and the rules for sessions with several trajectories.

A session rule forms *units*, the items that an advantage estimator compares within the group of a prompt, and sets the
share of a unit's advantage that each of its trajectories gets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rl_core.errors import DataError
from rl_core.record_fields import record
from rl_core.registry import Registry
from rl_distill.objectives.ragged import row_counts, row_sums, spread_rows
from rl_distill.objectives.shapes import check_mask, check_offsets, check_rows, check_tokens


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
    of_sessions = rows.rewards.new_zeros(int(rows.session.max()) + 1 if len(rows.session) else 0)
    of_sessions[rows.session[rows.is_last]] = rows.rewards[rows.is_last]
    return SessionCredit(unit=rows.session, rewards=of_sessions[rows.session], share=torch.ones_like(rows.rewards))


def last_only(rows: SessionRows) -> SessionCredit:
    """Use the last trajectory's reward; only this trajectory gets the advantage, the others get 0."""
    return replace(last(rows), share=rows.is_last.to(rows.rewards.dtype))


def mean(rows: SessionRows) -> SessionCredit:
    """Use the mean of the trajectories' rewards; all trajectories of the session get the advantage."""
    counts = torch.bincount(rows.session)
    sums = rows.rewards.new_zeros(len(counts), dtype=torch.float64)
    means = (sums.index_add(0, rows.session, rows.rewards.double()) / counts).to(rows.rewards.dtype)
    return SessionCredit(unit=rows.session, rewards=means[rows.session], share=torch.ones_like(rows.rewards))


def each(rows: SessionRows) -> SessionCredit:
    """Treat every trajectory as its own session, with its own reward and advantage."""
    unit = torch.arange(len(rows.rewards), device=rows.rewards.device)
    return SessionCredit(unit=unit, rewards=rows.rewards, share=torch.ones_like(rows.rewards))


SESSION_RULES: Registry[SessionRule] = Registry(
    "session rule",
    {"last": last, "last_only": last_only, "mean": mean, "each": each},
    group="rl_distill.session_rules",
)


EXTRA_REWARDS = "token_rewards"
"""Token column of rewards that are added to the trajectory's reward, such as a KL penalty."""

SessionEstimate = Callable[[Tensor, Tensor], Tensor]
"""(rewards [S], group [S] int64) of sessions -> advantages [S]."""


@record
class RewardedRows:
    """Inputs of advantage estimators: the packed trajectories of a global batch.

    Attributes:
        rewards: [N] float rewards, finite.
        group: [N] int64 prompt index of each trajectory.
        session: [N] int64 session index of each trajectory within its group.
        output: [N] int64 position of each trajectory in its session.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 row offsets of the token tensors.
        columns: Further token columns [T] by name, e.g. a critic's `values`, or `token_rewards`.
        row_columns: Further row columns [N] by name, e.g. `reward_baseline` or `reward/COMPONENT`.
        session_rule: Rule for sessions with several trajectories, see `SESSION_RULES`.
    """

    rewards: Tensor
    group: Tensor
    session: Tensor
    output: Tensor
    loss_mask: Tensor
    offsets: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    row_columns: Mapping[str, Tensor] = field(default_factory=dict)
    session_rule: SessionRule = last

    def __post_init__(self) -> None:
        """Check shapes, and that every reward is finite."""
        rows = {name: getattr(self, name) for name in ("rewards", "group", "session", "output")}
        check_rows({**rows, **self.row_columns})
        check_rows({"offsets[:-1]": self.offsets[:-1], "rewards": self.rewards})
        num_tokens = check_tokens({"loss_mask": self.loss_mask, **self.columns})
        check_mask(self.loss_mask)
        check_offsets(self.offsets, num_tokens=num_tokens)
        missing = torch.nonzero(~self.rewards.isfinite()).flatten().tolist()
        if missing:
            raise DataError(
                f"rewards must be finite; rows {missing[:8]} of {len(self.rewards)} are not. Score every trajectory, "
                "or drop those whose session failed."
            )

    def column(self, name: str) -> Tensor:
        """Return a token column [T], 0 where masked.

        Raises:
            DataError: The column is missing.
        """
        values = _needed(name, self.columns)
        return torch.where(self.loss_mask, values, torch.zeros_like(values))

    def row_column(self, name: str) -> Tensor:
        """Return a row column [N].

        Raises:
            DataError: The column is missing or not finite.
        """
        values = _needed(name, self.row_columns)
        if not bool(values.isfinite().all()):
            raise DataError(f"column {name!r} must be finite; some rows are not. Provide a value for every trajectory.")
        return values

    def total_rewards(self) -> Tensor:
        """Return [N] rewards plus the sum of each trajectory's `token_rewards`."""
        if EXTRA_REWARDS not in self.columns:
            return self.rewards
        added = row_sums(self.column(EXTRA_REWARDS).double(), self.offsets)
        return (self.rewards.double() + added).to(self.rewards.dtype)

    def credit(self, rewards: Tensor) -> SessionCredit:
        """Apply the session rule to rewards [N]."""
        pairs = torch.stack([self.group, self.session], dim=1)
        sessions, session_of_row = torch.unique(pairs, dim=0, return_inverse=True)
        by_output = torch.argsort(self.output, stable=True)
        rank = torch.empty_like(by_output)
        rank[by_output] = torch.arange(len(by_output), device=by_output.device)
        last_rank = torch.zeros(len(sessions), dtype=torch.int64, device=rank.device)
        last_rank = last_rank.scatter_reduce(0, session_of_row, rank, "amax")
        is_last = last_rank[session_of_row] == rank
        return self.session_rule(SessionRows(rewards=rewards, session=session_of_row, is_last=is_last))


AdvantageEstimator = Callable[..., Mapping[str, Tensor]]
"""(RewardedRows, **options) -> token columns [T] by name, 0 where masked.

The columns are `advantages`, and `returns` if a critic is trained.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The items compared within a group: sessions, unless the session rule defines others.

    Attributes:
        rewards: [U] float rewards.
        group: [U] int64 prompt indices.
        num_tokens: [U] int64 numbers of trained tokens.
        of_row: [N] int64 unit index of each row.
        share: [N] float factor that multiplies the unit's advantage for each row.
    """

    rewards: Tensor
    group: Tensor
    num_tokens: Tensor
    of_row: Tensor
    share: Tensor


def units_of(rows: RewardedRows, rewards: Tensor | None = None) -> Units:
    """Return the units of a batch; the session rule determines their rewards.

    Args:
        rows: The batch.
        rewards: [N] float; None uses `total_rewards`.
    """
    credit = rows.credit(rows.total_rewards() if rewards is None else rewards)
    num_units = int(credit.unit.max()) + 1 if len(credit.unit) else 0
    of_rows = row_counts(rows.loss_mask, rows.offsets)
    return Units(
        rewards=credit.rewards.new_zeros(num_units).scatter(0, credit.unit, credit.rewards),
        group=rows.group.new_zeros(num_units).scatter(0, credit.unit, rows.group),
        num_tokens=of_rows.new_zeros(num_units).index_add(0, credit.unit, of_rows),
        of_row=credit.unit,
        share=credit.share,
    )


def spread_units(rows: RewardedRows, units: Units, advantages: Tensor) -> Tensor:
    """Spread advantages of units [U] to the trained tokens [T] of their trajectories; 0 where masked."""
    of_tokens = spread_rows(advantages[units.of_row] * units.share, rows.offsets, num_tokens=len(rows.loss_mask))
    return torch.where(rows.loss_mask, of_tokens, torch.zeros_like(of_tokens))


def session_advantages(rows: RewardedRows, estimate: SessionEstimate) -> Tensor:
    """Compute advantages of sessions, and spread them to the trained tokens of their trajectories.

    By default, a session's reward is that of its last trajectory, and all of its trajectories get the advantage. A
    session without trajectories is absent from its group.

    Returns:
        [T] in the rewards' dtype, 0 where masked.
    """
    units = units_of(rows)
    return spread_units(rows, units, estimate(units.rewards, units.group))


def episodes_of(rows: RewardedRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the trained tokens only, with each trajectory as an episode that ends with its session's reward.

    Returns:
        [M] float64 rewards: `token_rewards`, plus the session's reward at each trajectory's last trained token; [N + 1]
        int64 row offsets of the trained tokens; [M] float64 share of the session's advantage that each token gets.
    """
    credit = rows.credit(rows.rewards)
    counts = row_counts(rows.loss_mask, rows.offsets)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    num_tokens = int(offsets[-1])
    rewards = torch.zeros(num_tokens, dtype=torch.float64, device=offsets.device)
    if EXTRA_REWARDS in rows.columns:
        rewards = rows.column(EXTRA_REWARDS)[rows.loss_mask].double()
    has_tokens = counts > 0
    last_token = offsets[1:][has_tokens] - 1
    rewards = rewards.index_add(0, last_token, credit.rewards[has_tokens].double())
    return rewards, offsets, spread_rows(credit.share.double(), offsets, num_tokens=num_tokens)


def unmasked(values: Tensor, rows: RewardedRows) -> Tensor:
    """Return values of the trained tokens [M] as [T] in the rewards' dtype, 0 where masked."""
    empty = torch.zeros(len(rows.loss_mask), dtype=rows.rewards.dtype, device=values.device)
    return empty.masked_scatter(rows.loss_mask, values.to(rows.rewards.dtype))


def _needed(name: str, columns: Mapping[str, Tensor]) -> Tensor:
    if name not in columns:
        raise DataError(
            f"the advantage needs the column {name!r}; the batch has {', '.join(sorted(columns)) or 'none'}. Add the "
            f"column {name!r} first."
        )
    return columns[name]
