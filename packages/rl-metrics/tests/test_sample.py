import math

from hypothesis import given
from hypothesis import strategies as st

from rl_metrics.report.writing import choose
from rl_metrics.run_files.rollout_log import RolloutRow


def row(problem, reward, step=1):
    return RolloutRow(
        step=step, time=0.0, prompt_uid=f"{problem}-{step}", problem=problem, prompt="", response="", reward=reward
    )


ROWS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([0.0, 0.4, 1.0, math.nan])), max_size=60)


@given(ROWS, st.integers(1, 70))
def test_as_many_as_there_is_room_for(pairs, limit):
    kept, count = choose([row(*pair) for pair in pairs], limit=limit)
    assert count == len(pairs)
    assert kept.sum() == min(limit, len(pairs))


def test_all_are_kept_where_there_is_room():
    kept, count = choose([row("a", 0.0), row("b", 1.0)], limit=2)
    assert (kept.tolist(), count) == ([True, True], 2)
    assert choose([], limit=1)[1] == 0


def test_problems_stay_whole_and_are_the_same_in_every_run():
    names = [f"problem-{number}" for number in range(40)]
    first, _ = choose([row(name, 1.0) for name in names for _ in range(4)], limit=80)
    second, _ = choose([row(name, 1.0, step=2) for name in reversed(names) for _ in range(4)], limit=80)
    of_first = {names[place // 4] for place in first.nonzero()[0]}
    of_second = {names[39 - place // 4] for place in second.nonzero()[0]}
    assert len(of_first) == 20
    assert of_first == of_second


def test_the_worst_cases_are_in_it():
    rows = [row(f"problem-{number}", 0.0 if number in (17, 60) else 1.0) for number in range(100)]
    kept, _ = choose(rows, limit=20)
    assert kept[17]
    assert kept[60]


def test_at_most_a_quarter_is_there_for_its_rewards():
    rows = [row(f"problem-{number}", number / 1000) for number in range(1000)]
    kept, _ = choose(rows, limit=100)
    assert kept[:20].all()
    assert 20 <= kept[:30].sum() <= 28


def test_unscored_ones_come_before_low_rewards():
    rows = [row(f"problem-{number}", math.nan if number == 500 else 0.1) for number in range(1000)]
    kept, _ = choose(rows, limit=4)
    assert kept.sum() == 4


def test_hostile_names_are_chosen_like_others():
    kept, _ = choose([row("\ud800", 1.0), row("", 0.0), row("\0", 1.0)], limit=2)
    assert kept.sum() == 2
