import math
import statistics

import numpy as np
import pytest
import torch

from rl_core.errors import SettingsError, ShapeError
from rl_distill.objectives import REJECTION_CRITERIA
from rl_distill.objectives.rejection import rejection_limits, rejection_mask

LOG = math.log
# old / rollout ratios of the rows: [masked, 2, 1], [1/2], and a row without trained tokens.
LOG_RATIOS = torch.tensor([math.nan, LOG(2), 0.0, -LOG(2), math.inf], dtype=torch.float64)
MASK = torch.tensor([False, True, True, True, False])
OFFSETS = torch.tensor([0, 3, 4, 5])
K3_OF_2 = 2 - 1 - LOG(2)


def test_all_criteria_must_pass_and_masked_tokens_stay_so():
    mask, metrics = rejection_mask(
        LOG_RATIOS, MASK, OFFSETS, bounds={"token_k3": K3_OF_2 - 1e-9, "seq_sum_k1": (0.4, 1.5)}
    )
    assert mask.tolist() == [False, False, True, False, False]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].item() == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"].item() == 1.0
    assert metrics["rollout_corr/rollout_rs_token_k3_masked_fraction"].item() == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_rs_token_k3_seq_masked_fraction"].item() == 0.5


ROWS = {
    "three rows": [[math.nan, LOG(2), 0.0], [-LOG(2)], [math.nan], [LOG(4), -LOG(4), 0.1, math.nan]],
    "two rows": [[LOG(2), 0.1], [-0.3]],
    "one row": [[LOG(2), -LOG(2), 0.3]],
}
"""log(old / rollout) of trajectories; NaN at tokens that do not train."""
ESTIMATES = {"k1": lambda x: -x, "k2": lambda x: 0.5 * x * x, "k3": lambda x: math.expm1(x) - x}
LEVELS = {"seq_sum": sum, "seq_mean": statistics.fmean, "seq_max": max}


def by_hand(name, rows, low, high):
    """Return which trained tokens pass, and the metrics, from each token's statistic and each trajectory's."""
    level, k = name.rsplit("_", 1)
    estimates = [[ESTIMATES[k](x) for x in row if not math.isnan(x)] for row in rows]
    estimates = [row for row in estimates if row]
    of_rows = [LEVELS.get(level, statistics.fmean)(row) for row in estimates]
    of_tokens = [
        one if level == "token" else of_row for of_row, row in zip(of_rows, estimates, strict=True) for one in row
    ]
    judged, passes = of_tokens if level == "token" else of_rows, [low <= one <= high for one in of_tokens]
    lowest = low if k == "k1" else 0.0
    places = iter(passes)
    share = lambda of, is_in: sum(map(is_in, of)) / len(of)
    metrics = {
        "mean": statistics.fmean(of_tokens),
        "max": max(judged),
        "min": min(judged),
        "fraction_high": share(judged, lambda one: one > high),
        "fraction_low": share(judged, lambda one: one < low),
        "std": statistics.pstdev([min(max(one, lowest), high) for one in of_tokens]),
        "seq_mean": statistics.fmean(of_rows),
        "seq_std": statistics.stdev(of_rows) if len(of_rows) > 1 else 0.0,
        "seq_max": max(of_rows),
        "seq_min": min(of_rows),
        "seq_max_deviation": max(map(abs, of_rows)),
        "seq_fraction_high": share(of_rows, lambda one: one > high),
        "masked_fraction": share(passes, lambda one: not one),
        "seq_masked_fraction": share([[next(places) for _ in row] for row in estimates], lambda row: not all(row)),
    }
    return passes, metrics | ({"seq_fraction_low": share(of_rows, lambda one: one < low)} if k == "k1" else {})


@pytest.mark.parametrize("name", REJECTION_CRITERIA.names())
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_mask_and_metrics_are_those_of_the_definitions(name, rows):
    log_ratio = torch.tensor([one for row in rows for one in row], dtype=torch.float64)
    mask, offsets = ~log_ratio.isnan(), torch.tensor([0, *map(len, rows)]).cumsum(0)
    bounds = {"k1": [(0.5, 2.0), (0.8, 1.1), (1.0, 1.0)], "k2": [0.5 * LOG(2) ** 2, 0.01], "k3": [0.3, 1e-4]}
    chosen = bounds[name[-2:]]
    assert chosen
    for bound in chosen:  # ratios of 2 and 1/2 are on the first bound, and pass
        low, high = map(LOG, bound) if isinstance(bound, tuple) else (-math.inf, bound)
        passes, expected = by_hand(name, rows, low, high)
        kept, metrics = rejection_mask(log_ratio, mask, offsets, bounds={name: bound})
        assert kept[mask].tolist() == passes
        assert not kept[~mask].any()
        prefix = f"rollout_corr/rollout_rs_{name}_"
        assert {key.removeprefix(prefix): float(value) for key, value in metrics.items() if key.startswith(prefix)} == (
            pytest.approx(expected, rel=1e-6, abs=1e-9)
        )
        assert float(metrics["rollout_corr/rollout_rs_masked_fraction"]) == pytest.approx(expected["masked_fraction"])


def test_tensors_that_do_not_fit_are_refused():
    for mask, offsets in ((MASK.float(), OFFSETS), (MASK[1:], OFFSETS), (MASK, OFFSETS + 1), (MASK, OFFSETS[:-1])):
        with pytest.raises(ShapeError, match=r"loss_mask must have|offsets must run"):
            rejection_mask(LOG_RATIOS, mask, offsets, bounds={"token_k2": 1.0})


def test_a_far_ratio_has_a_finite_statistic():
    far = torch.tensor([-5e3, 5e3], dtype=torch.float64)
    mask, offsets = torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    _, metrics = rejection_mask(far, mask, offsets, bounds={"token_k1": 2.0, "token_k3": 2.0})
    assert float(metrics["rollout_corr/rollout_rs_token_k1_max"]) == 20.0
    assert float(metrics["rollout_corr/rollout_rs_token_k3_max"]) == pytest.approx(math.expm1(20) - 20)


def test_nothing_to_train_has_no_metrics():
    mask, metrics = rejection_mask(LOG_RATIOS, torch.zeros_like(MASK), OFFSETS, bounds={"token_k1": 2.0})
    assert not mask.any()
    assert metrics == {}


def test_bounds_may_be_numbers_of_numpy():
    assert rejection_limits(np.float32(2.0), is_signed=False) == (-math.inf, 2.0)
    assert rejection_limits((np.float64(0.5), np.int64(2)), is_signed=True) == (LOG(0.5), LOG(2))


@pytest.mark.parametrize(
    ("bound", "limits"),
    [(1.0, (0.0, 0.0)), (4, (-LOG(4), LOG(4))), ((3.0, 3.0), (LOG(3), LOG(3))), ([0.1, 0.2], (LOG(0.1), LOG(0.2)))],
)
def test_a_bound_of_a_signed_criterion_is_of_the_ratio(bound, limits):
    assert rejection_limits(bound, is_signed=True) == pytest.approx(limits)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"token_k1": True}, "0 < low <= high"),
        ({"token_k4": 1.0}, "unknown rejection criterion 'token_k4'. Did you mean 'token_k"),
        ({"seq_max_k1": 1.5}, "unknown rejection criterion"),
        ({"token_k1": 0.5}, "one number x >= 1 for .1 / x, x.; found 0.5"),
        ({"token_k1": (2.0, 1.0)}, "0 < low <= high"),
        ({"token_k1": -1.0}, "0 < low <= high"),
        ({"token_k2": (0.1, 0.2)}, "one number above 0"),
        ({"token_k2": 0.0}, "one number above 0"),
        ({"token_k2": math.nan}, "one number above 0"),
        ({"token_k2": "0.1"}, "one number above 0; found '0.1'"),
        ({"token_k1": "2"}, "0 < low <= high"),
        ({"token_k1": (0.5, 1.0, 2.0)}, "0 < low <= high"),
        ({"token_k1": (0.5, math.nan)}, "0 < low <= high"),
        ({"token_k1": math.inf}, "0 < low <= high"),
        ({"token_k1": (0.5, math.inf)}, "0 < low <= high"),
        ({"token_k1": (True, 2.0)}, "0 < low <= high"),
        ({"token_k1": ("a", 2.0)}, "0 < low <= high"),
        ({"token_k1": (0.0, 2.0)}, "0 < low <= high"),
        ({"token_k1": (0.5,)}, "one number x >= 1"),
    ],
)
def test_impossible_bounds_are_refused(bounds, message):
    with pytest.raises(SettingsError, match=message):
        rejection_mask(LOG_RATIOS, MASK, OFFSETS, bounds=bounds)
