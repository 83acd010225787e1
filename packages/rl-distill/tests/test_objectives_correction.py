import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import SettingsError, ShapeError
from rl_distill.objectives import mismatch_metrics, mismatch_sums, truncated_weights

LOG = math.log
# Rows: [masked, 1.5, 0.5] and [4]; then one without a trained token.
RATIOS = torch.tensor([math.nan, LOG(1.5), LOG(0.5), LOG(4.0), math.inf], dtype=torch.float64)
MASK = torch.tensor([False, True, True, True, False])
OFFSETS = torch.tensor([0, 3, 4, 5])


@pytest.mark.parametrize(
    ("level", "cap", "expected"),
    [
        ("token", 2.0, [0, 1.5, 0.5, 2.0, 0]),
        ("sequence", 2.0, [0, 0.75, 0.75, 2.0, 0]),
        ("token", 9.0, [0, 1.5, 0.5, 4.0, 0]),
    ],
)
def test_literals(level, cap, expected):
    assert truncated_weights(RATIOS, MASK, OFFSETS, level=level, cap=cap).tolist() == pytest.approx(expected, rel=1e-12)


def test_weights_carry_no_gradient():
    log_ratio = torch.zeros(5, requires_grad=True)
    assert not truncated_weights(log_ratio, MASK, OFFSETS, level="token").requires_grad


def test_far_ratios_stay_finite():
    log_ratio = torch.full((5,), 1e4)
    assert truncated_weights(log_ratio, MASK, OFFSETS, level="sequence", cap=math.inf).isfinite().all()


@pytest.mark.parametrize("options", [{"level": "row"}, {"level": "token", "cap": 0.0}])
def test_impossible_settings_are_refused(options):
    with pytest.raises(SettingsError, match='level "token" or "sequence" and cap > 0'):
        truncated_weights(RATIOS, MASK, OFFSETS, **options)


def test_shapes_are_checked():
    with pytest.raises(ShapeError):
        truncated_weights(RATIOS[:-1], MASK, OFFSETS, level="token")


def test_mismatch_literals():
    old = torch.tensor([math.nan, -1.0, -2.0, -1.0, 7.0], dtype=torch.float64)
    rollout = torch.tensor([0.0, -1.5, -2.0, -0.5, math.nan], dtype=torch.float64)
    found = {name: float(value) for name, value in mismatch_metrics(old, rollout, MASK, OFFSETS).items()}
    # Trajectories: learner -1.5 and -1, engine -1.75 and -0.5; the third trains nothing and counts nowhere.
    differences = [1.5 - 1.75, 1.0 - 0.5]
    assert found == pytest.approx(
        {
            "training/rollout_probs_diff_mean": (math.exp(-1) - math.exp(-1.5) + math.exp(-0.5) - math.exp(-1)) / 3,
            "rollout_corr/kl": (-0.5 + 0.0 + 0.5) / 3,
            "rollout_corr/k3_kl": (math.exp(0.5) - 1.5 + 0 + math.exp(-0.5) - 0.5) / 3,
            "rollout_corr/chi2_token": (math.e + 1 + 1 / math.e) / 3 - 1,
            "rollout_corr/chi2_seq": (math.e + 1 / math.e) / 2 - 1,
            "rollout_corr/training_ppl": (math.exp(1.5) + math.exp(1.0)) / 2,
            "rollout_corr/training_log_ppl": 1.25,
            "rollout_corr/rollout_ppl": (math.exp(1.75) + math.exp(0.5)) / 2,
            "rollout_corr/rollout_log_ppl": 1.125,
            "rollout_corr/log_ppl_diff": 0.125,
            "rollout_corr/log_ppl_abs_diff": 0.375,
            "rollout_corr/ppl_ratio": sum(map(math.exp, differences)) / 2,
            "rollout_corr/log_ppl_diff_max": 0.5,
            "rollout_corr/log_ppl_diff_min": -0.25,
        },
        rel=1e-12,
        abs=1e-12,
    )


def test_nothing_to_train_is_nan_and_sums_stay_zero():
    mask = torch.zeros(5, dtype=torch.bool)
    assert all(torch.isnan(value) for value in mismatch_metrics(RATIOS, RATIOS, mask, OFFSETS).values())
    assert all(
        float(total) == float(weight) == 0.0 for total, weight in mismatch_sums(RATIOS, RATIOS, mask, OFFSETS).values()
    )


@settings(deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=10), st.floats(0.1, 5))
def test_weights_are_within_the_cap_and_equal_for_one_token_rows(log_ratios, cap):
    log_ratio = torch.tensor(log_ratios, dtype=torch.float64)
    mask = torch.ones(len(log_ratios), dtype=torch.bool)
    offsets = torch.arange(len(log_ratios) + 1)
    by_token = truncated_weights(log_ratio, mask, offsets, level="token", cap=cap)
    assert float(by_token.max()) <= cap
    torch.testing.assert_close(truncated_weights(log_ratio, mask, offsets, level="sequence", cap=cap), by_token)
