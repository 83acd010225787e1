import asyncio
import threading

import numpy as np
import pytest

from rl_core.errors import DataError, RoleError
from rl_rollout.rewards import MathVerify, RewardInput
from rl_rollout.rewards.math_verify import answer_of, is_integer

HANGS = "9^{9^{9^{9}}} + 1"  # sympy computes a number that fits no memory, inside one C call


@pytest.fixture(scope="module")
def verify():
    verify = MathVerify(timeout_s=2.0, num_workers=1)
    yield verify
    verify.close()


def score(verify, text, ground_truth):
    given = RewardInput(prompt_uid="p", response_text=text, response_ids=np.array([1]), ground_truth=ground_truth)
    return asyncio.run(verify(given))


@pytest.mark.parametrize(
    ("text", "ground_truth", "reward"),
    [
        (r"so it is \boxed{18}", "18", 1.0),
        (r"\boxed{1,018}", "1018", 1.0),
        (r"\boxed{17}", "18", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{x^2 + 2x + 1}", r"\boxed{(x+1)^2}", 1.0),
        ("The answer is 18.", "18", 1.0),
        ("The answer is 19.", "18", 0.0),
        (r"first \boxed{18}, then \boxed{19}", "18", 0.0),
        ("no idea", "18", 0.0),
        ("", "18", 0.0),
    ],
)
def test_answers(verify, text, ground_truth, reward):
    result = score(verify, text, ground_truth)
    assert result.reward == reward
    assert result.components == {"accuracy": reward, "math_verify_timed_out": 0.0}


def test_it_works_outside_the_main_thread(verify):
    results = []
    thread = threading.Thread(target=lambda: results.append(score(verify, r"\boxed{\frac{2}{4}}", "0.5")))
    thread.start()
    thread.join(timeout=60)
    assert results[0].reward == 1.0


def test_a_comparison_that_hangs_is_ended_marked_and_harms_no_other(verify):
    assert score(verify, r"\boxed{\frac{1}{2}}", "0.5").reward == 1.0
    hung = score(verify, rf"\boxed{{{HANGS}}}", r"\boxed{3^{3^{3^{3}}} + 1}")
    assert (hung.reward, hung.components["math_verify_timed_out"]) == (0.0, 1.0)
    assert score(verify, r"\boxed{\frac{1}{2}}", "0.5").reward == 1.0


def test_a_worker_that_dies_is_an_error_and_is_replaced(verify):
    assert score(verify, r"\boxed{\frac{1}{2}}", "0.5").reward == 1.0
    process = verify._workers[0]._process
    process.kill()
    process.wait()
    assert score(verify, r"\boxed{\frac{1}{2}}", "0.5").reward == 1.0


def test_a_ground_truth_without_expression_is_the_rows_fault(verify):
    with pytest.raises(DataError, match="no expression in the ground truth 'none'"):
        score(verify, r"\boxed{\frac{1}{2}}", "none")


def test_closing_ends_the_processes():
    verify = MathVerify(num_workers=1)
    assert verify._workers[0]._process is None, "nothing starts before it is needed"
    score(verify, r"\boxed{\frac{1}{2}}", "0.5")
    process = verify._workers[0]._process
    verify.close()
    assert process.poll() is not None
    verify.close()


def test_a_worker_that_cannot_start_says_so(monkeypatch):
    verify = MathVerify(num_workers=1)
    monkeypatch.setattr("rl_rollout.rewards.math_verify.sys.executable", "/bin/false")
    with pytest.raises(RoleError, match="exit code 1"):
        score(verify, r"\boxed{\frac{1}{2}}", "0.5")
    verify.close()


def test_integers_are_compared_in_place_as_the_library_would():
    verify = MathVerify(num_workers=1)
    assert score(verify, r"\boxed{1,018}", " 1018 ").reward == 1.0
    assert score(verify, r"\boxed{-5}", "5").reward == 0.0
    assert verify._workers[0]._process is None
    verify.close()


def test_answer_of():
    assert answer_of(r"a \boxed{ 12 } b") == "12"
    assert answer_of(r"a \boxed{x+1} b") == r"\boxed{x+1}"
    assert answer_of("no box") == "no box"
    assert [is_integer(text) for text in ("12", "1,234", "+3", "1.0", "12,34", "", "9" * 301)] == [True] * 3 + [
        False
    ] * 4
