"""The arithmetic of the benchmarks, their long-tailed prompts, and equal rewards on both sides."""

from pathlib import Path

import numpy as np
import pytest
from benchmark_modules import load_benchmark

from rl_rollout.rewards import RewardInput, resolve_reward

ROOT = Path(__file__).resolve().parents[1]


summary, rules, long_tail = map(load_benchmark, ("_summary", "_rules", "_long_tail"))


def run(system: str, step_s: list[float], rewards: list[float]) -> object:
    return summary.Run(
        system=system,
        step_s=step_s,
        rewards=rewards,
        mean_lengths=[4.0] * len(step_s),
        max_lengths=[9.0] * len(step_s),
        part_s={"generate": [seconds / 2 for seconds in step_s]},
        wall_s=10.0,
        load_before=0.5,
    )


def test_speed_leaves_the_warm_up_out() -> None:
    assert summary.samples_per_s([100.0, 100.0, 100.0, 1.0, 3.0], samples_per_step=8) == 4.0
    with pytest.raises(ValueError, match="more than 3 steps"):
        summary.samples_per_s([1.0, 1.0, 1.0], samples_per_step=8)


def test_spread_is_a_share_of_the_median() -> None:
    assert summary.spread([90.0, 100.0, 120.0]) == pytest.approx(0.3)


def test_final_third_takes_at_least_one_value() -> None:
    assert summary.final_third([0.0, 0.0, 0.0, 0.0, 1.0, 3.0]) == 2.0
    assert summary.final_third([0.0, 5.0]) == 5.0


def test_lengths_fall_into_bins() -> None:
    lengths = [1, 16, 17, 48, 192]
    assert summary.share_below(lengths, 48) == 0.6
    counts = summary.histogram(lengths, width=16, longest=192)
    assert list(counts)[:2] == ["1-16", "17-32"]
    assert counts["1-16"] == 2
    assert sum(counts.values()) == 5


def test_ratio_is_the_median_of_pairs_not_of_systems() -> None:
    warm = [9.0, 9.0, 9.0]
    ours = [run("ours", [*warm, seconds], [0.0, 0.0, 0.0, 0.8]) for seconds in (1.0, 2.0, 4.0)]
    peer = [run("trl", [*warm, seconds], [0.0, 0.0, 0.0, 0.7]) for seconds in (2.0, 2.0, 6.0)]
    found = summary.comparison(ours, peer, workload="short", samples_per_step=8, target=1.5)
    assert found["ratio_pairs"] == [2.0, 1.0, 1.5]
    assert found["ratio"] == 1.5
    assert found["is_met"] is True
    assert found["final_third_difference"] == pytest.approx(0.1)


def test_a_systems_row_has_what_the_issue_names() -> None:
    row = summary.system_result(
        [run("ours", [9.0, 9.0, 9.0, seconds], [0.5] * 4) for seconds in (1.0, 2.0, 4.0)],
        workload="short",
        samples_per_step=8,
    )
    assert {name: row[name] for name in ("system", "workload", "samples_per_s", "step_s_median")} == {
        "system": "ours",
        "workload": "short",
        "samples_per_s": 4.0,
        "step_s_median": 2.0,
    }
    assert row["part_s_median"] == {"generate": 1.0}


@pytest.mark.parametrize(
    ("text", "truth", "is_ended", "expected"),
    [
        ("95", "95", True, 1.0),
        ("95", "95", False, 0.0),
        (";15,8:95", "95", True, 1.0),
        ("15,8:95", "95", True, 0.0),
        ("", "95", True, 0.0),
        ("-21", "-21", True, 1.0),
    ],
)
def test_the_arithmetic_rule_is_the_examples_reward(text: str, truth: str, is_ended: bool, expected: float) -> None:
    assert rules.arithmetic(text, truth, is_ended=is_ended) == expected
    reward = resolve_reward(f"{ROOT}/examples/arithmetic/reward.py:reward")
    assert reward(given(text, truth, is_ended=is_ended)) == expected


@pytest.mark.parametrize(("text", "expected"), [("128,129", 1.0), (" 128,129", 1.0), ("128,129,130", 0.0), ("", 0.0)])
def test_the_counting_rule_is_exact_match(text: str, expected: float) -> None:
    assert rules.counting(text, "128,129", is_ended=True) == expected
    assert resolve_reward("exact_match")(given(text, "128,129", is_ended=True)).reward == expected


def given(text: str, truth: str, *, is_ended: bool) -> RewardInput:
    return RewardInput(
        prompt_uid="0",
        response_text=text,
        response_ids=np.zeros(1, dtype=np.int32),
        ground_truth=truth,
        finish_reason="stop" if is_ended else "length",
    )


def test_counting_problems_are_long_tailed() -> None:
    problems = long_tail.draw_problems(2000, seed=0)
    lengths = [len(problem.answer) + 1 for problem in problems]
    assert max(lengths) <= 192
    assert sum(length > 128 for length in lengths) >= 20
    assert summary.share_below(lengths, 48) > 0.75
    assert problems == long_tail.draw_problems(2000, seed=0)
    after_context = long_tail.draw_problems(200, seed=0, numbers_of_context=long_tail.NUMBERS_OF_CONTEXT)
    assert {len(problem.question) for problem in after_context} == {256}
    assert max(len(problem.answer) + 1 for problem in after_context) <= 64


def test_a_counting_problem_has_its_digits_answer() -> None:
    problem = long_tail.Problem(503)
    assert (problem.question, problem.answer, problem.shortened) == ("503=", "503,502,501,500", "503,502,501")
    assert len(long_tail.Problem(147).answer) + 1 == 192
