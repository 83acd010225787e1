import math

import numpy as np
import pytest
import torch

from rl_core.errors import SettingsError
from rl_distill.objectives import REJECTION_CRITERIA
from rl_distill.objectives.rejection import rejection_limits, rejection_mask

LOG = math.log
# old / rollout ratios of the rows: [masked, 2, 1], [1/2], and a row without trained tokens.
LOG_RATIOS = torch.tensor([math.nan, LOG(2), 0.0, -LOG(2), math.inf], dtype=torch.float64)
MASK = torch.tensor([False, True, True, True, False])
OFFSETS = torch.tensor([0, 3, 4, 5])
K3_OF_2 = 2 - 1 - LOG(2)
K3_OF_HALF = 0.5 - 1 + LOG(2)


def kept(name, bound):
    mask, _ = rejection_mask(LOG_RATIOS, MASK, OFFSETS, bounds={name: bound})
    return mask[MASK].tolist()


@pytest.mark.parametrize(
    ("name", "bound", "expected"),
    [
        ("token_k1", 1.5, [False, True, False]),
        ("token_k1", (0.4, 1.5), [True, True, False]),  # the rollout / old ratios are 1/2, 1 and 2
        ("token_k2", LOG(2) ** 2 / 2 - 1e-9, [False, True, False]),
        ("token_k3", K3_OF_2 - 1e-9, [False, True, True]),
        ("seq_sum_k1", (0.4, 1.5), [True, True, False]),
        ("seq_sum_k2", LOG(2) ** 2 / 2 + 1e-9, [True, True, True]),
        ("seq_sum_k3", K3_OF_HALF + 1e-9, [False, False, True]),
        ("seq_mean_k1", 1.5, [True, True, False]),  # the means are -log(2) / 2 and log 2
        ("seq_mean_k2", LOG(2) ** 2 / 4 + 1e-9, [True, True, False]),
        ("seq_mean_k3", K3_OF_2 / 2 + 1e-9, [True, True, False]),
        ("seq_max_k2", LOG(2) ** 2 / 2 - 1e-9, [False, False, False]),
        ("seq_max_k3", K3_OF_HALF + 1e-9, [False, False, True]),
    ],
)
def test_kept_rows_equal_literals(name, bound, expected):
    assert kept(name, bound) == expected


def test_every_criterion_has_a_literal():
    marks = test_kept_rows_equal_literals.pytestmark
    assert {case[0] for case in marks[0].args[1]} == set(REJECTION_CRITERIA.names())


def test_all_criteria_must_pass_and_masked_tokens_stay_so():
    mask, metrics = rejection_mask(
        LOG_RATIOS, MASK, OFFSETS, bounds={"token_k3": K3_OF_2 - 1e-9, "seq_sum_k1": (0.4, 1.5)}
    )
    assert mask.tolist() == [False, False, True, False, False]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].item() == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"].item() == 1.0
    assert metrics["rollout_corr/rollout_rs_token_k3_masked_fraction"].item() == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_rs_token_k3_seq_masked_fraction"].item() == 0.5


def test_metrics_of_a_trajectorys_criterion():
    _, metrics = rejection_mask(LOG_RATIOS, MASK, OFFSETS, bounds={"seq_sum_k1": (0.4, 1.5)})
    found = {name.removeprefix("rollout_corr/rollout_rs_seq_sum_k1_"): float(value) for name, value in metrics.items()}
    expected = {"max": LOG(2), "min": -LOG(2), "mean": -LOG(2) / 3, "fraction_high": 0.5, "fraction_low": 0.0}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_nothing_to_train_has_no_metrics():
    mask, metrics = rejection_mask(LOG_RATIOS, torch.zeros_like(MASK), OFFSETS, bounds={"token_k1": 2.0})
    assert not mask.any()
    assert metrics == {}


def test_bounds_may_be_numbers_of_numpy():
    assert rejection_limits(np.float32(2.0), is_signed=False) == (-math.inf, 2.0)
    assert rejection_limits((np.float64(0.5), np.int64(2)), is_signed=True) == (LOG(0.5), LOG(2))


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
    ],
)
def test_impossible_bounds_are_refused(bounds, message):
    with pytest.raises(SettingsError, match=message):
        rejection_mask(LOG_RATIOS, MASK, OFFSETS, bounds=bounds)
