"""Which steps a skip cache serves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import SettingsError
from rl_rollout.skip.options import ENDLESS, StepSelection

LAST = 60


def chosen(steps):
    return [step for step in range(LAST + 1) if step in StepSelection.parse(steps)]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("1-4,7", [1, 2, 3, 4, 7]),
        (" 2 , 4 - 5 ", [2, 4, 5]),
        (7, [7]),
        ("58-", [58, 59, 60]),
        ("3,3,3", [3]),
        ("5-9,7-8", [5, 6, 7, 8, 9]),
        ("9,1-3,4", [1, 2, 3, 4, 9]),
        ("[1, 2]", [1, 2]),
        ([3, 1], [1, 3]),
        ((5,), [5]),
        ("0004", [4]),
    ],
)
def test_steps_are_lists_and_ranges(steps, expected):
    assert chosen(steps) == expected


def test_all_steps_are_all_from_the_first():
    assert chosen("all") == list(range(1, LAST + 1))
    assert 10**12 in StepSelection.parse("all")


def test_ranges_that_touch_are_one():
    assert StepSelection.parse("1-3,4,5-9").ranges == (range(1, 10),)
    assert StepSelection.parse("20-,1-3,25-30").ranges == (range(1, 4), range(20, ENDLESS + 1))


NO_TEXTS = ["", " ", ",", "1,,2", "a", "1-2-3", "-3", "0", "0-4", "4-2", "1.5", "1e3", "all,3", "[1,2", "1]", "[]"]
NO_SELECTIONS = [*NO_TEXTS, "\u0661-\u0663", "1" * 5000, [], [0], [True], [1.0], None, 3.5, 0, True]


@pytest.mark.parametrize("steps", NO_SELECTIONS, ids=lambda steps: repr(steps)[:20])
def test_what_is_no_selection_is_refused_with_an_example(steps):
    with pytest.raises(SettingsError, match=r'ascending ranges; found .* Write "all", \[1, 2, 40\] or "1-20,40"'):
        StepSelection.parse(steps)


RANGES = st.lists(st.tuples(st.integers(1, LAST), st.integers(0, 9)), min_size=1, max_size=5)


@given(RANGES, st.integers(1, LAST))
def test_a_selection_holds_what_its_ranges_hold_and_repeats_it_in_order(ranges, step):
    text = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in ranges)
    selection = StepSelection.parse(text)
    expected = {each for first, more in ranges for each in range(first, first + more + 1)}
    assert (step in selection) == (step in expected)
    assert (selection.first, selection.last) == (min(expected), max(expected))
    assert selection.repeated(step) == sorted(expected)[step % len(expected)]
    assert StepSelection.parse(sorted(expected)) == selection
