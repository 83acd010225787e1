"""Advantages from rewards that are compared within the group of one prompt.

Source: GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1; Dr. GRPO, Liu et al. 2025, arXiv:2503.20783.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_core.errors import DataError
from rl_distill.objectives.ragged import spread_rows
from rl_distill.objectives.shapes import check_mask, check_offsets, check_rows, check_tokens

SessionEstimate = Callable[[Tensor, Tensor], Tensor]
"""(rewards [S], group [S] int64) of sessions -> [S] advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedRows:
    """What advantages are made from: the trajectories of a global batch, packed.

    Attributes:
        rewards: [N] float, finite.
        group: [N] int64, equal for the trajectories of one prompt.
        session: [N] int64, equal within a group for the trajectories of one session.
        output: [N] int64, orders the trajectories of a session.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 rows of the token tensors.
        columns: [T] further token columns by name, such as a critic's values.
    """

    rewards: Tensor
    group: Tensor
    session: Tensor
    output: Tensor
    loss_mask: Tensor
    offsets: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check shapes, and that every reward is there."""
        check_rows({name: getattr(self, name) for name in ("rewards", "group", "session", "output")})
        check_rows({"offsets[:-1]": self.offsets[:-1], "rewards": self.rewards})
        num_tokens = check_tokens({"loss_mask": self.loss_mask, **self.columns})
        check_mask(self.loss_mask)
        check_offsets(self.offsets, num_tokens=num_tokens)
        missing = torch.nonzero(~self.rewards.isfinite()).flatten().tolist()
        if missing:
            raise DataError(
                f"rewards must be finite; rows {missing[:8]} of {len(self.rewards)} are not. "
                "Score every trajectory, or drop those whose session failed."
            )


AdvantageEstimator = Callable[..., Mapping[str, Tensor]]
"""(RewardedRows, **options) -> token columns [T] by name: `advantages`, and `returns` where a critic trains. 0 where
masked."""


def grpo(rows: RewardedRows, *, eps: float = 1e-6) -> dict[str, Tensor]:
    """GRPO: `grpo_advantages` of each session, on all of its trained tokens."""
    return {"advantages": session_advantages(rows, lambda rewards, group: grpo_advantages(rewards, group, eps=eps))}


def dr_grpo(rows: RewardedRows) -> dict[str, Tensor]:
    """Dr. GRPO: `dr_grpo_advantages` of each session, on all of its trained tokens."""
    return {"advantages": session_advantages(rows, dr_grpo_advantages)}


def grpo_advantages(rewards: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Rewards centered within their group, divided by its standard deviation.

    Args:
        rewards: [S] float, one for each session.
        group: [S] int64 prompt of each session; groups may differ in size.
        eps: Added to the standard deviation, which is the unbiased one.

    Returns:
        [S] advantages in the rewards' dtype. A group with equal rewards, or with one session, gets zeros.

    Raises:
        ShapeError: The two are not [S].
    """
    centered, index = _centered(rewards, group)
    sizes = torch.bincount(index)
    squares = centered.new_zeros(len(sizes)).index_add(0, index, centered.square())
    deviations = (squares / (sizes - 1).clamp(min=1)).sqrt()
    scale = torch.where(deviations > 0, deviations + eps, 1.0)
    return (centered / scale[index]).to(rewards.dtype)


def dr_grpo_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """Rewards centered within their group; arguments and result as `grpo_advantages`."""
    return _centered(rewards, group)[0].to(rewards.dtype)


def session_advantages(rows: RewardedRows, estimate: SessionEstimate) -> Tensor:
    """Advantages of sessions, spread to the trained tokens of all their trajectories.

    A session's reward is that of its last trajectory. A session that gave none is absent from its group.

    Returns:
        [T] in the rewards' dtype, 0 where masked.
    """
    sessions = torch.stack([rows.group, rows.session], dim=1)
    pairs, session_of_row = torch.unique(sessions, dim=0, return_inverse=True)
    by_output = torch.argsort(rows.output, stable=True)
    rank = torch.empty_like(by_output)
    rank[by_output] = torch.arange(len(by_output), device=by_output.device)
    last_rank = torch.zeros(len(pairs), dtype=torch.int64, device=rank.device)
    last_rank = last_rank.scatter_reduce(0, session_of_row, rank, "amax")
    of_sessions = estimate(rows.rewards[by_output[last_rank]], pairs[:, 0])
    of_tokens = spread_rows(of_sessions[session_of_row], rows.offsets, num_tokens=len(rows.loss_mask))
    return torch.where(rows.loss_mask, of_tokens, torch.zeros_like(of_tokens))


def _centered(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """[S] float64 rewards less their group's mean, and [S] dense group index."""
    check_rows({"rewards": rewards, "group": group})
    _, index = torch.unique(group, return_inverse=True)
    values, sizes = rewards.double(), torch.bincount(index)
    zeros = values.new_zeros(len(sizes))
    means = zeros.index_add(0, index, values) / sizes
    lowest = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, index, values, "amax", include_self=False)
    # The mean of equal rewards may differ from them by rounding, which eps alone would blow up.
    is_equal = (lowest == highest)[index]
    return torch.where(is_equal, torch.zeros_like(values), values - means[index]), index
