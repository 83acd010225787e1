import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import SettingsError, ShapeError
from rl_distill.objectives.correction import importance_weights

LOG = math.log
# Rows: [masked, 1.5, 0.5], [4], and a row without trained tokens.
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
def test_importance_weights_equal_literals(level, cap, expected):
    assert importance_weights(RATIOS, MASK, OFFSETS, level=level, cap=cap).tolist() == pytest.approx(
        expected, rel=1e-12
    )


def test_weights_carry_no_gradient():
    log_ratio = torch.zeros(5, requires_grad=True)
    assert not importance_weights(log_ratio, MASK, OFFSETS, level="token").requires_grad


def test_far_ratios_stay_finite():
    log_ratio = torch.full((5,), 1e4)
    assert importance_weights(log_ratio, MASK, OFFSETS, level="sequence", cap=math.inf).isfinite().all()


@pytest.mark.parametrize(
    ("level", "floor", "cap", "expected"),
    [
        ("token", 0.5, 2.0, [0, 1.5, 0.5, 0, 0]),
        ("token", 0.6, 4.0, [0, 1.5, 0, 4.0, 0]),
        ("sequence", 0.5, 2.0, [0, 0.75, 0.75, 0, 0]),
    ],
)
def test_banded_weights_equal_literals(level, floor, cap, expected):
    found = importance_weights(RATIOS, MASK, OFFSETS, level=level, floor=floor, cap=cap)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "row"}, "level of importance_weights must be one of 'token', 'sequence'; found 'row'"),
        ({"level": "token", "cap": 0.0}, r"cap of importance_weights must be a number above 0; found 0.0"),
        ({"level": "token", "cap": "2"}, "found '2'"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        importance_weights(RATIOS, MASK, OFFSETS, **options)


@pytest.mark.parametrize(("floor", "cap"), [(0.0, 2.0), (2.0, 1.0), (math.nan, 1.0), (0.5, math.nan), ("0.5", 2.0)])
def test_impossible_bands_are_refused(floor, cap):
    with pytest.raises(SettingsError, match=r"floor <= cap|finite number above 0|a number above 0"):
        importance_weights(RATIOS, MASK, OFFSETS, level="token", floor=floor, cap=cap)


def test_shapes_are_checked():
    with pytest.raises(ShapeError, match=r"loss_mask must have shape \[T\] like logprobs, \[4\]; found \[5\]"):
        importance_weights(RATIOS[:-1], MASK, OFFSETS, level="token")


@settings(deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=10), st.floats(0.1, 5))
def test_weights_are_within_the_cap_and_equal_for_one_token_rows(log_ratios, cap):
    log_ratio = torch.tensor(log_ratios, dtype=torch.float64)
    mask = torch.ones(len(log_ratios), dtype=torch.bool)
    offsets = torch.arange(len(log_ratios) + 1)
    by_token = importance_weights(log_ratio, mask, offsets, level="token", cap=cap)
    assert float(by_token.max()) <= cap
    torch.testing.assert_close(importance_weights(log_ratio, mask, offsets, level="sequence", cap=cap), by_token)
