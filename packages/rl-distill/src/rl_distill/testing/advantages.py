"""Checks of advantage estimators."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rl_distill.objectives.ragged import row_index
from rl_distill.objectives.rewarded_rows import AdvantageEstimator, RewardedRows
from rl_distill.testing.rules import POISONS, ConformanceError, compare_tensors, described, tokens_of, unchanged

GROUPS = (0, 0, 0, 0, 1, 1, 1, 2, 2, 2)
SESSIONS = (0, 1, 1, 2, 0, 1, 2, 0, 1, 2)
OUTPUTS = (0, 0, 1, 0, 0, 0, 0, 0, 0, 0)
LENGTHS = (4, 2, 3, 6, 3, 7, 2, 4, 2, 5)


def example_rows(*, seed: int = 0) -> RewardedRows:
    """Return random float64 rewards in three groups, one with a session of two trajectories.

    They have every column that the built-in estimators read.

    Args:
        seed: Seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    num_rows, num_tokens = len(LENGTHS), sum(LENGTHS)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    loss_mask = torch.rand(num_tokens, generator=generator) > 0.25
    loss_mask[offsets[:-1]] = False
    loss_mask[offsets[1:] - 1] = True
    return RewardedRows(
        rewards=normal(num_rows),
        group=torch.tensor(GROUPS),
        session=torch.tensor(SESSIONS),
        output=torch.tensor(OUTPUTS),
        loss_mask=loss_mask,
        offsets=offsets,
        columns={
            "values": normal(num_tokens),
            "token_rewards": 0.1 * normal(num_tokens),
            "old_logprobs": -normal(num_tokens).abs(),
            "sum_pi_squared": normal(num_tokens).abs().neg().exp(),
        },
        row_columns={
            "reward_baseline": normal(num_rows),
            "reward/first": normal(num_rows),
            "reward/second": normal(num_rows),
        },
    )


def check_advantage(estimator: AdvantageEstimator, *, is_batchwide: bool = False, seed: int = 0) -> None:
    """Check an advantage estimator.

    - It does not change its inputs.
    - It returns `advantages` and any other columns as finite [T] tensors in the rewards' dtype, 0 at masked tokens.
    - Masked tokens do not affect the result, even if they are NaN or infinite.
    - The result does not depend on the order of rows or the numbering of groups and sessions.
    - A group's rewards do not affect other groups.

    Args:
        estimator: Estimator with its options bound.
        is_batchwide: True for estimators that whiten over the batch; skips the check across groups.
        seed: Seed of the example rows.

    Raises:
        ConformanceError: The estimator breaks a rule.
    """
    rows = example_rows(seed=seed)
    estimator = _checked(estimator)
    expected = estimator(rows)
    _check_columns(expected, rows)
    _check_masked_tokens(estimator, rows, expected)
    _check_order(estimator, rows, expected)
    renamed = replace(rows, group=7 - 3 * rows.group, session=rows.session + 5, output=2 * rows.output)
    _compare(expected, estimator(renamed), "the numbering of groups and sessions must not matter")
    if not is_batchwide:
        _check_groups(estimator, rows, expected)


def _check_columns(found: Mapping[str, Tensor], rows: RewardedRows) -> None:
    if not isinstance(found, Mapping):
        raise ConformanceError(
            f"an estimator must return tensors [T] by column, {{'advantages': ...}}; found {described(found)}."
        )
    if "advantages" not in found:
        raise ConformanceError(f"an estimator must return 'advantages'; found {sorted(found)}.")
    for name, values in found.items():
        if not isinstance(values, Tensor):
            raise ConformanceError(f"{name} must be a tensor [T]; found {described(values)}.")
        if values.shape != rows.loss_mask.shape or values.dtype != rows.rewards.dtype:
            raise ConformanceError(
                f"{name} must be [T] in the rewards' dtype, {list(rows.loss_mask.shape)} {rows.rewards.dtype}; found "
                f"{list(values.shape)} {values.dtype}."
            )
        if not bool(values.isfinite().all()):
            raise ConformanceError(f"{name} must be finite.")
        if bool(values[~rows.loss_mask].any()):
            raise ConformanceError(f"{name} must be 0 at masked tokens.")


def _checked(estimator: AdvantageEstimator) -> AdvantageEstimator:
    """Return the estimator with a check at every call that its inputs are unchanged."""

    def call(rows: RewardedRows) -> Mapping[str, Tensor]:
        with unchanged(rows, who="the estimator"):
            return estimator(rows)

    return call


def _check_masked_tokens(estimator: AdvantageEstimator, rows: RewardedRows, expected: Mapping[str, Tensor]) -> None:
    for poison in POISONS:
        columns = {name: torch.where(rows.loss_mask, values, poison) for name, values in rows.columns.items()}
        found = estimator(replace(rows, columns=columns))
        _compare(expected, found, f"masked tokens must not affect the result; with {poison} there")


def _check_order(estimator: AdvantageEstimator, rows: RewardedRows, expected: Mapping[str, Tensor]) -> None:
    order = torch.arange(len(rows.rewards) - 1, -1, -1)
    tokens = tokens_of(rows.offsets, order.tolist())
    lengths = rows.offsets.diff()[order]
    found = estimator(
        replace(
            rows,
            **{name: getattr(rows, name)[order] for name in ("rewards", "group", "session", "output")},
            loss_mask=rows.loss_mask[tokens],
            offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            columns={name: values[tokens] for name, values in rows.columns.items()},
            row_columns={name: values[order] for name, values in rows.row_columns.items()},
        )
    )
    reordered = {name: values[tokens] for name, values in expected.items()}
    _compare(reordered, found, "the order of the rows must not matter")


def _check_groups(estimator: AdvantageEstimator, rows: RewardedRows, expected: Mapping[str, Tensor]) -> None:
    is_changed = rows.group == 1
    of_token = is_changed[row_index(rows.offsets, num_tokens=len(rows.loss_mask))]
    found = estimator(replace(rows, rewards=torch.where(is_changed, rows.rewards.square() + 3.0, rows.rewards)))
    kept = {name: torch.where(of_token, 0.0, values) for name, values in expected.items()}
    others = {name: torch.where(of_token, 0.0, values) for name, values in found.items()}
    _compare(
        kept, others, "a group's rewards must not affect others (for whitening over the batch, pass is_batchwide=True)"
    )


def _compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], rule: str) -> None:
    if expected.keys() != found.keys():
        raise ConformanceError(f"{rule}: columns {sorted(expected.keys() ^ found.keys())} differ between calls.")
    compare_tensors({name: (values, found[name]) for name, values in expected.items()}, rule)
