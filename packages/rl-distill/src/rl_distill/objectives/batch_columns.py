"""Batches with the columns that a learner trains on, computed over the whole global batch before it is cut."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch

from rl_core.data import Batch, Column, ColumnSpec, Ragged, column_spec, declare_column
from rl_core.errors import DataError
from rl_core.record_fields import converts_arguments
from rl_distill.objectives.aggregation import AGGREGATIONS, Horizon, token_weights
from rl_distill.objectives.correction import CorrectionLevel, WeightCap, WeightFloor, banded_weights, truncated_weights
from rl_distill.objectives.kl import KL_ESTIMATORS
from rl_distill.objectives.option_rules import checked, number
from rl_distill.objectives.registry import ADVANTAGES, function_with_options
from rl_distill.objectives.rejection import Bound, rejection_mask
from rl_distill.objectives.rewarded_rows import EXTRA_REWARDS, RewardedRows
from rl_distill.objectives.selection import TokenSelection
from rl_distill.objectives.sessions import SESSION_RULES
from rl_distill.objectives.weight_metrics import weight_metrics
from rl_distill.objectives.whitened_advantages import COMPONENT

SampledLogprobs = Literal["old_logprobs", "rollout_logprobs"]
"""Column of the sampling policy's logprobs: the learner's before the update, or the engine's."""


@converts_arguments
def with_advantages(
    batch: Batch, *, advantage: str = "grpo", options: Mapping[str, Any] | None = None, session_rule: str = "last"
) -> Batch:
    """Add `advantages` (and `returns`, where the estimator gives them).

    Args:
        batch: The global batch with `reward` and `loss_mask`; groups are those of its keys. Used where they are there:
            `token_rewards` by every estimator, `values` by gae, `reward_baseline` by remax, `reward/NAME` by gdpo.
        advantage: Name in the registry of advantages.
        options: Options of the estimator.
        session_rule: Name in the registry of session rules, for sessions that gave several trajectories.

    Raises:
        SettingsError: Unknown advantage, option or session rule.
        DataError: A reward, or a column that the estimator needs, is missing.
    """
    mask = batch.ragged("loss_mask")
    by_token = {name: column_spec(name).is_ragged for name in sorted(batch.names) if _is_of_numbers(batch[name])}
    rows = RewardedRows(
        rewards=batch.tensor("reward"),
        group=torch.from_numpy(batch.group_index()),
        session=torch.tensor([key.session_index for key in batch.keys], dtype=torch.int64),
        output=torch.tensor([key.output_index for key in batch.keys], dtype=torch.int64),
        loss_mask=batch.tensor("loss_mask"),
        offsets=torch.from_numpy(mask.offsets),
        columns={name: batch.tensor(name) for name, is_token in by_token.items() if is_token},
        row_columns={name: batch.tensor(name) for name, is_token in by_token.items() if not is_token},
        session_rule=SESSION_RULES.get(session_rule),
    )
    columns = function_with_options(ADVANTAGES, advantage, options or {})(rows)
    return batch.with_columns({name: _ragged_like(mask, values) for name, values in columns.items()})


@converts_arguments
def with_reward_components(batch: Batch, components: Sequence[Mapping[str, float]]) -> Batch:
    """Add a row column `reward/NAME` for each named component of the reward, as GDPO compares them.

    Args:
        batch: Any batch.
        components: Components of each row; all rows have the same names.

    Raises:
        DataError: Not as many as rows, or the rows differ in their names.
    """
    if len(components) != len(batch):
        raise DataError(f"components must have one entry for each of {len(batch)} rows; found {len(components)}.")
    names = sorted({name for row in components for name in row})
    for index, row in enumerate(components):
        lacking = sorted(set(names) - row.keys())
        if lacking:
            raise DataError(
                f"row {index} lacks the reward component {lacking[0]!r}, which others have; the reward function must "
                f"return {', '.join(names)} for every trajectory."
            )
    component_columns(names)
    values = {name: np.asarray([row[name] for row in components], dtype=np.float32) for name in names}
    return batch.with_columns({COMPONENT + name: column for name, column in values.items()})


def component_columns(names: Sequence[str]) -> frozenset[str]:
    """The columns of components of the reward, which are declared by this."""
    for name in names:
        declare_column(
            COMPONENT + name,
            ColumnSpec(dtype="float32", is_ragged=False, meaning="One named component of the reward."),
        )
    return frozenset(COMPONENT + name for name in names)


@checked
def with_kl_in_reward(
    batch: Batch,
    *,
    coefficient: Annotated[float, number(at_least=0.0)],
    estimator: str = "k1",
    policy_logprobs: SampledLogprobs = "old_logprobs",
) -> Batch:
    """Add `token_rewards`: the KL of each sampled token to the reference as a penalty, which advantages then count in.

    Args:
        batch: The global batch with `reference_logprobs` and the sampling policy's.
        coefficient: Weight of the penalty.
        estimator: Name in the registry of KL estimators.
        policy_logprobs: Column of the sampling policy's logprobs.

    Raises:
        SettingsError: Unknown estimator, or a coefficient below 0.
        DataError: A column is missing.
    """
    kl = _reference_kl(batch, estimator=estimator, policy_logprobs=policy_logprobs)
    return batch.with_columns({EXTRA_REWARDS: _ragged_like(batch.ragged("loss_mask"), -coefficient * kl)})


@checked
def mean_reference_kl(
    batch: Batch, *, estimator: str = "k3", policy_logprobs: SampledLogprobs = "old_logprobs"
) -> float:
    """Mean KL of the sampling policy to the reference over trained tokens, in nats; NaN when nothing trains."""
    kl = _reference_kl(batch, estimator=estimator, policy_logprobs=policy_logprobs)
    return float(kl[batch.tensor("loss_mask")].double().mean())


@converts_arguments
def with_token_selection(
    batch: Batch, *, select: TokenSelection, policy_logprobs: SampledLogprobs = "old_logprobs"
) -> Batch:
    """Add `token_selection`, the tokens that a policy loss treats apart.

    Args:
        batch: The global batch with `advantages` and the sampling policy's logprobs.
        select: Of a `BoundPolicyLoss`.
        policy_logprobs: Column of the sampling policy's logprobs.
    """
    selected = select(batch.tensor(policy_logprobs), batch.tensor("advantages"), batch.tensor("loss_mask"))
    mask = batch.ragged("loss_mask")
    return batch.with_columns({"token_selection": Ragged(selected.numpy(), mask.offsets)})


@checked
def with_loss_weights(batch: Batch, *, aggregation: str = "token-mean", horizon: Horizon = None) -> Batch:
    """Add `loss_weights`; arguments as `token_weights`, the aggregation by name.

    Raises:
        SettingsError: Unknown aggregation, or it needs a horizon.
    """
    mask = batch.ragged("loss_mask")
    weights = token_weights(
        batch.tensor("loss_mask"),
        torch.from_numpy(mask.offsets),
        row_weights=AGGREGATIONS.get(aggregation),
        horizon=horizon,
    )
    return batch.with_columns({"loss_weights": _ragged_like(mask, weights)})


@checked
def with_correction_weights(
    batch: Batch, *, level: CorrectionLevel, cap: WeightCap = 2.0, floor: WeightFloor | None = None
) -> Batch:
    """Add `correction_weights` of `old_logprobs` over `rollout_logprobs`.

    Args:
        batch: The global batch with both.
        level: "token" or "sequence".
        cap: Largest weight: larger ones are set to it, or with a floor to 0.
        floor: Smallest weight, smaller ones are set to 0 (`banded_weights`); None truncates from above alone.

    Raises:
        SettingsError: Unknown level, or impossible bounds.
    """
    mask = batch.ragged("loss_mask")
    ratios = (_log_ratio(batch), batch.tensor("loss_mask"), torch.from_numpy(mask.offsets))
    if floor is None:
        weights = truncated_weights(*ratios, level=level, cap=cap)
    else:
        weights = banded_weights(*ratios, level=level, band=(floor, cap))
    return batch.with_columns({"correction_weights": _ragged_like(mask, weights)})


@checked
def correction_weight_metrics(
    batch: Batch, *, level: CorrectionLevel, cap: WeightCap = 2.0, floor: WeightFloor | None = None
) -> dict[str, float]:
    """`rollout_corr/rollout_is_*` of the batch's `correction_weights`; arguments as `with_correction_weights`."""
    offsets = torch.from_numpy(batch.ragged("loss_mask").offsets)
    metrics = weight_metrics(
        batch.tensor("correction_weights"),
        _log_ratio(batch),
        batch.tensor("loss_mask"),
        offsets,
        level=level,
        cap=cap,
        floor=floor,
    )
    return {name: float(value) for name, value in metrics.items()}


@converts_arguments
def with_rejection(batch: Batch, *, bounds: Mapping[str, Bound]) -> tuple[Batch, dict[str, float]]:
    """Take the tokens on which engine and learner differ too much out of `loss_mask`.

    Do it after the advantages and before the loss weights: a rejected token was sampled, but does not train.

    Args:
        batch: The global batch with `old_logprobs` and `rollout_logprobs`.
        bounds: Bound of each criterion by name.

    Returns:
        The batch with a smaller `loss_mask`, and the metrics of `rejection_mask`.

    Raises:
        SettingsError: Unknown criterion, or an impossible bound.
    """
    mask = batch.ragged("loss_mask")
    keep, metrics = rejection_mask(
        _log_ratio(batch),
        batch.tensor("loss_mask"),
        torch.from_numpy(mask.offsets),
        bounds=bounds,
    )
    rejected = batch.with_columns({"loss_mask": Ragged(keep.numpy(), mask.offsets)})
    return rejected, {name: float(value) for name, value in metrics.items()}


def _log_ratio(batch: Batch) -> torch.Tensor:
    return batch.tensor("old_logprobs") - batch.tensor("rollout_logprobs")


def _reference_kl(batch: Batch, *, estimator: str, policy_logprobs: SampledLogprobs) -> torch.Tensor:
    """[T] estimates, 0 where masked."""
    kl = KL_ESTIMATORS.get(estimator)(batch.tensor(policy_logprobs), batch.tensor("reference_logprobs"))
    return torch.where(batch.tensor("loss_mask"), kl, torch.zeros_like(kl))


def _is_of_numbers(column: Column) -> bool:
    """True where a column has one number a token or row, as advantages know them."""
    return not column.element_shape if isinstance(column, Ragged) else column.ndim == 1


def _ragged_like(mask: Ragged, values: torch.Tensor) -> Ragged:
    return Ragged(values, mask.offsets)  # converted where it becomes a column
