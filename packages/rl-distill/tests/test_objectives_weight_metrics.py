import math
import statistics

import pytest
import torch

from rl_distill.objectives.correction import importance_weights, weight_metrics

LOG = math.log
ROWS = {
    "four rows": [[math.nan, LOG(4), LOG(0.25)], [0.0], [math.nan], [LOG(2), LOG(0.5), LOG(1.5), LOG(0.3)]],
    "two rows": [[LOG(2), LOG(0.5)], [LOG(1.5)]],
    "one row": [[LOG(3), LOG(1.5)]],
}
"""log(old / rollout) of trajectories; NaN at tokens that do not train."""
LOG_RATIOS = torch.tensor([one for row in ROWS["four rows"] for one in row], dtype=torch.float64)
OFFSETS = torch.tensor([0, 3, 4, 5, 9])


def by_definition(rows, *, level, cap, floor):
    """Return the metrics of weights, from each trained token's ratio and weight."""
    rows = [[one for one in row if not math.isnan(one)] for row in rows]
    rows = [[math.exp(sum(row) if level == "sequence" else one) for one in row] for row in rows if row]
    weigh = lambda ratio: min(ratio, cap) if floor is None else ratio if floor <= ratio <= cap else 0.0
    ratios = [ratio for row in rows for ratio in row]
    weights = [weigh(ratio) for ratio in ratios]
    of_rows, ratio_of_rows = ([statistics.fmean(map(use, row)) for row in rows] for use in (weigh, float))
    judged = ratio_of_rows if level == "sequence" else ratios
    low = 1 / cap if floor is None else floor
    share = lambda of, is_in: sum(map(is_in, of)) / len(of)
    squares = statistics.fmean(weight**2 for weight in weights)
    found = {
        "mean": statistics.fmean(weights),
        "std": statistics.pstdev(weights),
        "max": max(weights),
        "min": min(weights),
        "eff_sample_size": statistics.fmean(weights) ** 2 / squares if squares else 0.0,
        "ratio_fraction_high": share(judged, lambda one: one > cap),
        "ratio_fraction_low": share(judged, lambda one: one < low),
        "seq_mean": statistics.fmean(of_rows),
        "seq_std": statistics.stdev(of_rows) if len(of_rows) > 1 else 0.0,
        "seq_max": max(of_rows),
        "seq_min": min(of_rows),
        "seq_max_deviation": max(abs(one - 1) for one in of_rows),
        "seq_fraction_high": share(ratio_of_rows, lambda one: one > cap),
        "seq_fraction_low": share(ratio_of_rows, lambda one: one < low),
    }
    return found | ({} if floor is None else {"oob_ratio": share(ratios, lambda one: not floor <= one <= cap)})


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("cap", "floor"), [(2.0, None), (1.2, None), (2.0, 0.5), (2.0, 0.1), (0.6, 0.55)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_metrics_are_those_of_the_definitions(rows, level, cap, floor):
    log_ratio = torch.tensor([one for row in rows for one in row], dtype=torch.float64)
    log_ratio += 1e-12 * log_ratio.sign()  # no rounding at the bounds
    mask, offsets = ~log_ratio.isnan(), torch.tensor([0, *map(len, rows)]).cumsum(0)
    bounds = {"level": level, "cap": cap, "floor": floor}
    weights = importance_weights(log_ratio, mask, offsets, **bounds)
    found = weight_metrics(weights, log_ratio, mask, offsets, **bounds)
    rows = [[one + 1e-12 * ((one > 0) - (one < 0)) for one in row] for row in rows]
    assert {name.removeprefix("rollout_corr/rollout_is_"): float(value) for name, value in found.items()} == (
        pytest.approx(by_definition(rows, **bounds), rel=1e-9, abs=1e-9)
    )


def test_a_ratio_on_a_bound_is_within_it():
    log_ratio, mask, offsets = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    for bounds in ({"cap": 1.0}, {"cap": 1.0, "floor": 0.5}, {"cap": 2.0, "floor": 1.0}):
        weights = importance_weights(log_ratio, mask, offsets, level="token", **bounds)
        assert weights.tolist() == [1.0, 1.0]
        found = weight_metrics(weights, log_ratio, mask, offsets, level="token", **bounds)
        outside = ("ratio_fraction_high", "ratio_fraction_low", "seq_fraction_high", "seq_fraction_low")
        assert [float(found[f"rollout_corr/rollout_is_{name}"]) for name in outside] == [0.0] * 4
        assert float(found.get("rollout_corr/rollout_is_oob_ratio", 0.0)) == 0.0


def test_bounds_that_are_left_out_are_a_cap_of_two():
    log_ratio, mask, offsets = torch.tensor([1.0, -0.1]), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    weights = importance_weights(log_ratio, mask, offsets, level="token")
    assert weights.tolist() == pytest.approx([2.0, math.exp(-0.1)])
    found, named = (weight_metrics(weights, log_ratio, mask, offsets, level="token", **one) for one in ({}, {"cap": 2}))
    assert found == named
    assert float(found["rollout_corr/rollout_is_ratio_fraction_high"]) == 0.5


def test_nothing_to_train_has_none():
    none = torch.zeros(len(LOG_RATIOS), dtype=torch.bool)
    assert weight_metrics(LOG_RATIOS, LOG_RATIOS, none, OFFSETS, level="token") == {}
