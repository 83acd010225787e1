import math

import pytest
import torch

from rl_distill.objectives.correction import mismatch_sums

LOG = math.log
# Rows: one masked and two trained tokens, one trained token, and a row without trained tokens.
RATIOS = torch.tensor([math.nan, LOG(1.5), LOG(0.5), LOG(4.0), math.inf], dtype=torch.float64)
MASK = torch.tensor([False, True, True, True, False])
OFFSETS = torch.tensor([0, 3, 4, 5])


def test_mismatch_sums_equal_literals():
    old = torch.tensor([math.nan, -1.0, -2.0, -1.0, 7.0], dtype=torch.float64)
    rollout = torch.tensor([0.0, -1.5, -2.0, -0.5, math.nan], dtype=torch.float64)
    sums = mismatch_sums(old, rollout, MASK, OFFSETS)
    found = {name: float(total / weight) for name, (total, weight) in sums.items()}
    # Means of the trajectories: learner -1.5 and -1, engine -1.75 and -0.5; the third is not trained and ignored.
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
        },
        rel=1e-12,
        abs=1e-12,
    )


def test_sums_of_nothing_to_train_are_zero():
    mask = torch.zeros(5, dtype=torch.bool)
    sums = mismatch_sums(RATIOS, RATIOS, mask, OFFSETS)
    assert {float(one) for pair in sums.values() for one in pair} == {0.0}
