"""Functions that add training columns to the global batch, before it is split."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from rl_core.data import Batch, Column, ColumnSpec, Ragged, column_spec, declare_column
from rl_core.errors import DataError
from rl_core.record_fields import NonNegativeFloat, converts_arguments
from rl_distill.objectives.aggregation import AGGREGATIONS, Horizon, token_weights
from rl_distill.objectives.batch_advantages import COMPONENT
from rl_distill.objectives.correction import CorrectionLevel, WeightCap, WeightFloor, importance_weights, weight_metrics
from rl_distill.objectives.covariance_policy_loss import TokenSelection
from rl_distill.objectives.kl import KL_ESTIMATORS
from rl_distill.objectives.registry import ADVANTAGES, function_with_options
from rl_distill.objectives.rejection import Bound, rejection_mask
from rl_distill.objectives.rewarded_rows import EXTRA_REWARDS, SESSION_RULES, RewardedRows

SampledLogprobs = Literal["old_logprobs", "rollout_logprobs"]
"""Column with the sampling policy's logprobs: the learner's before the update, or the engine's."""


@converts_arguments
def with_advantages(
    batch: Batch, *, advantage: str = "grpo", options: Mapping[str, Any] | None = None, session_rule: str = "last"
) -> Batch:
    """Add the column `advantages`, and `returns` if the estimator computes them.

    Args:
        batch: The global batch with `reward` and `loss_mask`; its keys define the groups. Optional columns:
            `token_rewards` for every estimator, `values` for gae, `reward_baseline` for remax, `reward/NAME` for gdpo,
            `old_logprobs` and `sum_pi_squared` for optimal_token_baseline.
        advantage: Name in `ADVANTAGES`.
        options: Options of the estimator.
        session_rule: Name in `SESSION_RULES`, for sessions with several trajectories.

    Raises:
        SettingsError: The advantage, an option or the session rule is unknown.
        DataError: A reward or a column that the estimator needs is missing.
    """
    by_token = {name: column_spec(name).is_ragged for name in sorted(batch.names) if _is_of_numbers(batch[name])}
    rows = RewardedRows(
        rewards=batch.tensor("reward"),
        group=torch.from_numpy(batch.group_index()),
        session=torch.tensor([key.session_index for key in batch.keys], dtype=torch.int64),
        output=torch.tensor([key.output_index for key in batch.keys], dtype=torch.int64),
        loss_mask=batch.tensor("loss_mask"),
        offsets=_offsets(batch),
        columns={name: batch.tensor(name) for name, is_token in by_token.items() if is_token},
        row_columns={name: batch.tensor(name) for name, is_token in by_token.items() if not is_token},
        session_rule=SESSION_RULES.get(session_rule),
    )
    columns = function_with_options(ADVANTAGES, advantage, options or {})(rows)
    return batch.with_columns({name: _ragged(batch, values) for name, values in columns.items()})


@converts_arguments
def with_reward_components(batch: Batch, components: Sequence[Mapping[str, float]]) -> Batch:
    """Add a row column `reward/NAME` for each reward component; GDPO needs them.

    Args:
        batch: Any batch.
        components: Reward components of each row; all rows have the same names.

    Raises:
        DataError: The number of components is not the number of rows, or the rows have different names.
    """
    if len(components) != len(batch):
        raise DataError(f"components must have one entry per row ({len(batch)} rows); found {len(components)}.")
    names = sorted({name for row in components for name in row})
    for index, row in enumerate(components):
        lacking = sorted(set(names) - row.keys())
        if lacking:
            raise DataError(
                f"row {index} lacks the reward component {lacking[0]!r}, which other rows have; the reward function "
                f"must return {', '.join(names)} for every trajectory."
            )
    component_columns(names)
    values = {name: np.asarray([row[name] for row in components], dtype=np.float32) for name in names}
    return batch.with_columns({COMPONENT + name: column for name, column in values.items()})


def component_columns(names: Sequence[str]) -> frozenset[str]:
    """Declare the columns of reward components, and return their names."""
    for name in names:
        declare_column(
            COMPONENT + name,
            ColumnSpec(dtype="float32", is_ragged=False, meaning="One named component of the reward."),
        )
    return frozenset(COMPONENT + name for name in names)


@converts_arguments
def with_kl_in_reward(
    batch: Batch,
    *,
    coefficient: NonNegativeFloat,
    estimator: str = "k1",
    policy_logprobs: SampledLogprobs = "old_logprobs",
) -> Batch:
    """Add `token_rewards`, a penalty for the KL to the reference at each sampled token; advantages include it.

    Args:
        batch: The global batch with `reference_logprobs` and the sampling policy's logprobs.
        coefficient: Weight of the penalty.
        estimator: Name in `KL_ESTIMATORS`.
        policy_logprobs: Column with the sampling policy's logprobs.

    Raises:
        SettingsError: The estimator is unknown, or the coefficient is below 0.
        DataError: A column is missing.
    """
    kl = _reference_kl(batch, estimator=estimator, policy_logprobs=policy_logprobs)
    return batch.with_columns({EXTRA_REWARDS: _ragged(batch, -coefficient * kl)})


@converts_arguments
def mean_reference_kl(
    batch: Batch, *, estimator: str = "k3", policy_logprobs: SampledLogprobs = "old_logprobs"
) -> float:
    """Return the mean KL of the sampling policy to the reference over trained tokens, in nats; NaN without any."""
    kl = _reference_kl(batch, estimator=estimator, policy_logprobs=policy_logprobs)
    return float(kl[batch.tensor("loss_mask")].double().mean())


@converts_arguments
def with_token_selection(
    batch: Batch, *, select: TokenSelection, policy_logprobs: SampledLogprobs = "old_logprobs"
) -> Batch:
    """Add `token_selection`, the tokens that a policy loss treats separately.

    Args:
        batch: The global batch with `advantages` and the sampling policy's logprobs.
        select: `BoundPolicyLoss.select`.
        policy_logprobs: Column with the sampling policy's logprobs.
    """
    selected = select(batch.tensor(policy_logprobs), batch.tensor("advantages"), batch.tensor("loss_mask"))
    return batch.with_columns({"token_selection": _ragged(batch, selected)})


@converts_arguments
def with_loss_weights(batch: Batch, *, aggregation: str = "token-mean", horizon: Horizon = None) -> Batch:
    """Add `loss_weights`; see `token_weights`.

    Raises:
        SettingsError: The aggregation is unknown or needs a horizon.
    """
    row_weights = AGGREGATIONS.get(aggregation)
    weights = token_weights(batch.tensor("loss_mask"), _offsets(batch), row_weights=row_weights, horizon=horizon)
    return batch.with_columns({"loss_weights": _ragged(batch, weights)})


@converts_arguments
def with_correction_weights(
    batch: Batch, *, level: CorrectionLevel, cap: WeightCap = 2.0, floor: WeightFloor | None = None
) -> Batch:
    """Add `correction_weights`, the importance weights of `old_logprobs` over `rollout_logprobs`.

    Args:
        batch: The global batch with both columns.
        level: "token", or "sequence" for one weight per trajectory.
        cap: Maximum weight. Larger weights become `cap`, or 0 if `floor` is set.
        floor: Minimum weight; smaller weights become 0. None only truncates from above.

    Raises:
        SettingsError: The level is unknown, or the bounds are invalid.
    """
    weights = importance_weights(*_log_ratios(batch), level=level, cap=cap, floor=floor)
    return batch.with_columns({"correction_weights": _ragged(batch, weights)})


@converts_arguments
def correction_weight_metrics(
    batch: Batch, *, level: CorrectionLevel, cap: WeightCap = 2.0, floor: WeightFloor | None = None
) -> dict[str, float]:
    """Return the metrics `rollout_corr/rollout_is_*` of `correction_weights`; see `with_correction_weights`."""
    weights = batch.tensor("correction_weights")
    metrics = weight_metrics(weights, *_log_ratios(batch), level=level, cap=cap, floor=floor)
    return {name: float(value) for name, value in metrics.items()}


@converts_arguments
def with_rejection(batch: Batch, *, bounds: Mapping[str, Bound]) -> tuple[Batch, dict[str, float]]:
    """Remove tokens from `loss_mask` where engine and learner differ too much.

    Call it after computing the advantages and before the loss weights: the advantages then still include rejected
    tokens, which do not train.

    Args:
        batch: The global batch with `old_logprobs` and `rollout_logprobs`.
        bounds: Bound of each criterion, by its name in `REJECTION_CRITERIA`.

    Returns:
        The batch with the reduced `loss_mask`, and the metrics of `rejection_mask`.

    Raises:
        SettingsError: A criterion is unknown, or a bound is invalid.
    """
    keep, metrics = rejection_mask(*_log_ratios(batch), bounds=bounds)
    rejected = batch.with_columns({"loss_mask": _ragged(batch, keep)})
    return rejected, {name: float(value) for name, value in metrics.items()}


@converts_arguments
def without_truncated(batch: Batch) -> tuple[Batch, float]:
    """Remove every token of the sessions that a limit ended from `loss_mask`.

    A session is truncated if its last trajectory is: at the token limit in any turn, or at the limit of turns or of the
    context. Call it after computing the advantages and before the loss weights: the rewards of truncated sessions still
    count in the advantages of others, as in TRL's `mask_truncated_completions`, and the loss averages over what trains.

    Args:
        batch: The global batch with `is_truncated`.

    Returns:
        The batch with the reduced `loss_mask`, and the share of trajectories that this removes.

    Source: overlong filtering of DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.4.
    """
    rows = np.stack([batch.keys.prompts, batch.keys.sessions], axis=1)
    _, session = np.unique(rows, axis=0, return_inverse=True)
    session = session.reshape(-1)
    is_cut = np.zeros(len(batch), dtype=np.bool_)
    in_order = np.argsort(batch.keys.outputs, kind="stable")
    is_cut[session[in_order]] = batch.dense("is_truncated")[in_order]  # the last one of a session stays
    mask = batch.ragged("loss_mask")
    kept = Ragged(mask.values & ~np.repeat(is_cut[session], mask.lengths), mask.offsets)
    return batch.with_columns({"loss_mask": kept}), float(is_cut[session].mean()) if len(batch) else 0.0


def _offsets(batch: Batch) -> torch.Tensor:
    return torch.from_numpy(batch.ragged("loss_mask").offsets)


def _log_ratios(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log ratios of the learner's to the engine's probabilities, the loss mask and the row offsets."""
    log_ratios = batch.tensor("old_logprobs") - batch.tensor("rollout_logprobs")
    return log_ratios, batch.tensor("loss_mask"), _offsets(batch)


def _reference_kl(batch: Batch, *, estimator: str, policy_logprobs: SampledLogprobs) -> torch.Tensor:
    """Return [T] KL estimates, 0 where masked."""
    kl = KL_ESTIMATORS.get(estimator)(batch.tensor(policy_logprobs), batch.tensor("reference_logprobs"))
    return torch.where(batch.tensor("loss_mask"), kl, torch.zeros_like(kl))


def _is_of_numbers(column: Column) -> bool:
    """Whether a column has one number per token or row."""
    return not column.element_shape if isinstance(column, Ragged) else column.ndim == 1


def _ragged(batch: Batch, values: torch.Tensor) -> Ragged:
    return Ragged(values, batch.ragged("loss_mask").offsets)  # cast to the column's dtype by `with_columns`
