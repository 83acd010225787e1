import math

import pytest
import torch

from rl_distill.objectives.correction import importance_weights, weight_metrics

LOG = math.log
LOG_RATIOS = torch.tensor([math.nan, LOG(4), LOG(0.25), LOG(1), math.inf], dtype=torch.float64)
MASK = torch.tensor([False, True, True, True, False])
OFFSETS = torch.tensor([0, 3, 4, 5])


def metrics_of(*, level, cap, floor=None):
    if floor is None:
        weights = importance_weights(LOG_RATIOS, MASK, OFFSETS, level=level, cap=cap)
    else:
        weights = importance_weights(LOG_RATIOS, MASK, OFFSETS, level=level, floor=floor, cap=cap)
    found = weight_metrics(weights, LOG_RATIOS, MASK, OFFSETS, level=level, cap=cap, floor=floor)
    return {name.removeprefix("rollout_corr/rollout_is_"): float(value) for name, value in found.items()}


def test_token_weights_are_summarized():
    # Weights 2, 0.25 and 1; the second trajectory has only the 1, the third has none.
    found = metrics_of(level="token", cap=2.0)
    mean = 3.25 / 3
    assert found == pytest.approx(
        {
            "mean": mean,
            "std": math.sqrt((4 + 0.0625 + 1) / 3 - mean**2),
            "max": 2.0,
            "min": 0.25,
            "eff_sample_size": mean**2 / ((4 + 0.0625 + 1) / 3),
            "ratio_fraction_high": 1 / 3,
            "ratio_fraction_low": 1 / 3,
            "seq_mean": (1.125 + 1) / 2,
            "seq_std": 0.125 / math.sqrt(2),
            "seq_max": 1.125,
            "seq_min": 1.0,
            "seq_max_deviation": 0.125,
            "seq_fraction_high": 0.5,
            "seq_fraction_low": 0.0,
        }
    )


def test_sequence_weights_are_summarized():
    found = metrics_of(level="sequence", cap=2.0)
    assert found["mean"] == found["max"] == found["min"] == found["eff_sample_size"] == pytest.approx(1.0)


def test_weights_outside_a_band_are_counted():
    found = metrics_of(level="token", cap=2.0, floor=0.5)
    assert found["oob_ratio"] == pytest.approx(2 / 3)
    assert found["eff_sample_size"] == pytest.approx(1 / 3)
    none_left = metrics_of(level="token", cap=0.6, floor=0.5)
    assert none_left["eff_sample_size"] == none_left["mean"] == 0.0


def test_nothing_to_train_has_none():
    none = torch.zeros_like(MASK)
    assert weight_metrics(LOG_RATIOS, LOG_RATIOS, none, OFFSETS, level="token") == {}
