import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError, SettingsError
from rl_rollout.rewards import LengthTarget, Overlong, RewardInput


def response(num_tokens, **columns):
    ids = np.zeros(num_tokens, dtype=np.int32)
    return RewardInput(prompt_uid="p", response_text="", response_ids=ids, columns=columns)


# DAPO, equation 13, with the paper's own setting: L_max = 20480, L_cache = 4096.
@pytest.mark.parametrize(
    ("num_tokens", "reward"),
    [
        (0, 0.0),
        (16383, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (17408, -0.25),
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1.0),
        (20481, -1.0),
        (40000, -1.0),
    ],
)
def test_overlong_is_the_papers_formula(num_tokens, reward):
    assert Overlong(max_tokens=20480, buffer_tokens=4096)(response(num_tokens)) == reward
    assert Overlong(max_tokens=20480, buffer_tokens=4096, penalty_factor=0.5)(response(num_tokens)) == reward / 2


def test_overlong_whose_buffer_is_everything_starts_at_the_first_token():
    overlong = Overlong(max_tokens=4, buffer_tokens=4)
    assert [overlong(response(n)) for n in range(6)] == [0.0, -0.25, -0.5, -0.75, -1.0, -1.0]


@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 400))
def test_overlong_never_rises_with_length_and_stays_between_minus_one_and_zero(a, b, num_tokens):
    overlong = Overlong(max_tokens=max(a, b), buffer_tokens=min(a, b))
    here, longer = overlong(response(num_tokens)), overlong(response(num_tokens + 1))
    assert -1.0 <= longer <= here <= 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 10, "buffer_tokens": 0},
        {"max_tokens": 10, "buffer_tokens": 11},
        {"max_tokens": 10.5, "buffer_tokens": 2},
        {"max_tokens": 10, "buffer_tokens": 2, "penalty_factor": -1.0},
        {"max_tokens": 10, "buffer_tokens": 2, "penalty_factor": float("nan")},
    ],
)
def test_impossible_overlong_options_are_refused(options):
    with pytest.raises(SettingsError, match=r"(?i)overlong"):
        Overlong(**options)


def test_length_target_counts_tokens_off_the_target():
    reward = LengthTarget(tokens=100, coefficient=0.25)
    assert [reward(response(n)) for n in (100, 96, 104, 0)] == [0.0, -1.0, -1.0, -25.0]
    by_row = LengthTarget(column="budget", coefficient=1.0)
    assert by_row(response(7, budget=10)) == -3.0


def test_length_target_without_a_target_says_so():
    with pytest.raises(DataError, match=r"column 'budget' must be a whole number of tokens; found None"):
        LengthTarget(column="budget")(response(7))
    for options in ({}, {"tokens": 3, "column": "budget"}):
        with pytest.raises(SettingsError, match="either tokens"):
            LengthTarget(**options)
    for options in ({"tokens": -1}, {"tokens": True}):
        with pytest.raises(SettingsError, match="tokens of LengthTarget must be a whole number of at least 0"):
            LengthTarget(**options)
