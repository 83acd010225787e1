import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import SettingsError, ShapeError
from rl_distill.objectives import AGGREGATIONS
from rl_distill.objectives.aggregation import token_weights

# Trained tokens of the rows: two of three, none of two, and one of one.
MASK = torch.tensor([False, True, True, False, False, True])
OFFSETS = torch.tensor([0, 3, 5, 6])


@pytest.mark.parametrize(
    ("mode", "horizon", "expected"),
    [
        ("token-mean", None, [0, 1 / 3, 1 / 3, 0, 0, 1 / 3]),
        ("token-sum", None, [0, 1, 1, 0, 0, 1]),
        ("seq-mean-token-sum", None, [0, 1 / 2, 1 / 2, 0, 0, 1 / 2]),
        ("seq-mean-token-sum-norm", 8, [0, 1 / 16, 1 / 16, 0, 0, 1 / 16]),
        ("seq-mean-token-mean", None, [0, 1 / 4, 1 / 4, 0, 0, 1 / 2]),
    ],
)
def test_token_weights_equal_literals(mode, horizon, expected):
    found = token_weights(MASK, OFFSETS, row_weights=AGGREGATIONS.get(mode), horizon=horizon)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    ("horizon", "message"),
    [(None, "needs horizon >= 1"), *((wrong, "a whole number of at least 1") for wrong in (0, -5, math.nan, 2.5, "9"))],
)
def test_norm_needs_a_horizon(horizon, message):
    with pytest.raises(SettingsError, match=message):
        token_weights(MASK, OFFSETS, row_weights=AGGREGATIONS.get("seq-mean-token-sum-norm"), horizon=horizon)


@pytest.mark.parametrize("mode", AGGREGATIONS.names())
def test_nothing_to_train_gives_zeros(mode):
    found = token_weights(
        torch.zeros(4, dtype=torch.bool), torch.tensor([0, 4]), row_weights=AGGREGATIONS.get(mode), horizon=4
    )
    assert found.tolist() == [0.0] * 4
    assert AGGREGATIONS.get(mode)(torch.zeros(2), 4).isfinite().all()  # as the interface asks of every aggregation


def test_wrong_tensors_are_refused():
    mode = AGGREGATIONS.get("token-mean")
    with pytest.raises(ShapeError, match=r"dtype torch\.bool; found torch\.float32"):
        token_weights(MASK.float(), OFFSETS, row_weights=mode)
    with pytest.raises(ShapeError, match=r"must have shape \[T\]; found \[2, 3\]"):
        token_weights(MASK.reshape(2, 3), OFFSETS, row_weights=mode)
    with pytest.raises(ShapeError, match="from 0 to T = 6"):
        token_weights(MASK, OFFSETS[:-1], row_weights=mode)
    with pytest.raises(ShapeError, match="int64"):
        token_weights(MASK, OFFSETS.float(), row_weights=mode)


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8))
def test_means_sum_to_one_and_sums_to_the_mean_length(rows):
    mask = torch.tensor([token for row in rows for token in row])
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    trained = [sum(row) for row in rows if any(row)]
    mean_length = sum(trained) / max(len(trained), 1)
    expected = {
        "token-mean": float(bool(trained)),
        "seq-mean-token-mean": float(bool(trained)),
        "token-sum": float(sum(trained)),
        "seq-mean-token-sum": mean_length,
        "seq-mean-token-sum-norm": mean_length / 16,
    }
    for mode, total in expected.items():
        found = token_weights(mask, offsets, row_weights=AGGREGATIONS.get(mode), horizon=16)
        assert float(found.double().sum()) == pytest.approx(total, rel=1e-5)
        assert not found[~mask].any()
