"""Batches with the columns that a learner trains on, computed over the whole global batch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rl_core.batch import Batch
from rl_core.columns import COLUMNS
from rl_core.ragged import Ragged
from rl_distill.objectives.advantages import RewardedRows
from rl_distill.objectives.aggregation import token_weights
from rl_distill.objectives.correction import CorrectionLevel, truncated_weights
from rl_distill.objectives.registry import ADVANTAGES, AGGREGATION, function_with_options


def with_advantages(batch: Batch, *, advantage: str = "grpo", options: Mapping[str, Any] | None = None) -> Batch:
    """Add `advantages` (and `returns`, where the estimator gives them).

    Args:
        batch: The global batch with `reward` and `loss_mask`; groups are those of its keys.
        advantage: Name in the registry of advantages.
        options: Options of the estimator.

    Raises:
        SettingsError: Unknown advantage or option.
        DataError: A reward is missing.
    """
    mask = batch.ragged("loss_mask")
    rows = RewardedRows(
        rewards=batch.tensor("reward"),
        group=torch.from_numpy(batch.group_index()),
        session=torch.tensor([key.session_index for key in batch.keys], dtype=torch.int64),
        output=torch.tensor([key.output_index for key in batch.keys], dtype=torch.int64),
        loss_mask=batch.tensor("loss_mask"),
        offsets=torch.from_numpy(mask.offsets),
        columns={name: batch.tensor(name) for name in sorted(batch.names) if COLUMNS[name].is_ragged},
    )
    columns = function_with_options(ADVANTAGES, advantage, options or {})(rows)
    return batch.with_columns({name: _ragged_like(mask, values) for name, values in columns.items()})


def with_loss_weights(batch: Batch, *, aggregation: str = "token-mean", horizon: int | None = None) -> Batch:
    """Add `loss_weights`; arguments as `token_weights`, the aggregation by name.

    Raises:
        SettingsError: Unknown aggregation, or it needs a horizon.
    """
    mask = batch.ragged("loss_mask")
    weights = token_weights(
        batch.tensor("loss_mask"),
        torch.from_numpy(mask.offsets),
        row_weights=AGGREGATION.get(aggregation),
        horizon=horizon,
    )
    return batch.with_columns({"loss_weights": _ragged_like(mask, weights)})


def with_correction_weights(batch: Batch, *, level: CorrectionLevel, cap: float = 2.0) -> Batch:
    """Add `correction_weights` of `old_logprobs` over `rollout_logprobs`; arguments as `truncated_weights`."""
    mask = batch.ragged("loss_mask")
    weights = truncated_weights(
        batch.tensor("old_logprobs") - batch.tensor("rollout_logprobs"),
        batch.tensor("loss_mask"),
        torch.from_numpy(mask.offsets),
        level=level,
        cap=cap,
    )
    return batch.with_columns({"correction_weights": _ragged_like(mask, weights)})


def _ragged_like(mask: Ragged, values: torch.Tensor) -> Ragged:
    return Ragged(values.numpy().astype(np.float32, copy=False), mask.offsets)
