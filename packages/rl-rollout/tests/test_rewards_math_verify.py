import asyncio
import os
import threading
import time

import math_verify
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError, RoleError, SettingsError
from rl_rollout.rewards import MathVerify, RewardInput, RewardScorer, calls, resolve_reward
from rl_rollout.rewards.check_processes import CheckProcesses

HANGS = "9^{9^{9^{9}}} + 1"  # sympy computes a number too large for memory, in one C call


@pytest.fixture(scope="module")
def verify():
    verify = MathVerify(timeout_s=60.0, num_workers=1)
    yield verify
    verify.close()


def score(verify, text, ground_truth):
    given_input = RewardInput(prompt_uid="p", response_text=text, response_ids=np.array([1]), ground_truth=ground_truth)
    return asyncio.run(verify(given_input))


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
        ("4²", "4", 0.0),
        ("x = 4²", "16", 1.0),
        (r"\boxed{4²}", "16", 1.0),
        (r"\boxed{10⁻²}", "0.01", 1.0),
        ("it is 3½", "3", 0.0),
        ("it is 3½", "3.5", 1.0),
        (r"\boxed{-3½}", "-3.5", 1.0),
        (r"\boxed{x²+1}", "$x^2+1$", 1.0),
        ("it is \u22124", "-4", 1.0),
        ("it is \u20134", "4", 0.0),
        ("it is 1e4", "1", 0.0),
        (r"<think>\boxed{18}", "18", 0.0),
        (r"<think>17</think>\boxed{18}", "18", 1.0),
        (r"\boxed{2.5e-3}", "0.0025", 1.0),
        ("it is 1_000", "1", 0.0),
        (r"\boxed{1_000}", "1000", 1.0),
        ("9" * 6001, "18", 0.0),
        (r"\boxed{" + ",".join(["999"] * 2001) + "}", "18", 0.0),
        (r"\boxed{" + chr(0xD800) + "}", "18", 0.0),
    ],
)
def test_answers_are_rewarded_by_value(verify, text, ground_truth, reward):
    result = score(verify, text, ground_truth)
    assert result.reward == reward
    assert result.components == {"accuracy": reward, "math_verify_timed_out": 0.0}


@pytest.mark.parametrize(
    ("text", "votes"),
    [
        (r"so it is \boxed{19}", {"pred": "19"}),
        ("The answer is $19$.", {"pred": "19"}),
        ("no idea", {}),
        (r"\boxed{" + "x + " * 100 + "1}", {}),
    ],
)
def test_answers_vote_for_a_majority(verify, text, votes):
    assert score(verify, text, "18").extras == votes


def test_it_works_outside_the_main_thread(verify):
    results = []
    thread = threading.Thread(target=lambda: results.append(score(verify, r"\boxed{\frac{2}{4}}", "0.5")))
    thread.start()
    thread.join(timeout=60)
    assert results[0].reward == 1.0


def test_a_comparison_that_hangs_is_ended_marked_and_harms_no_other(request):
    verify = MathVerify(timeout_s=5.0, num_workers=1)  # enough for the others on a busy machine
    request.addfinalizer(verify.close)
    assert score(verify, r"\boxed{\sqrt{4}}", "2").reward == 1.0
    hung = score(verify, rf"\boxed{{{HANGS}}}", r"\boxed{3^{3^{3^{3}}} + 1}")
    assert (hung.reward, hung.components["math_verify_timed_out"]) == (0.0, 1.0)
    assert score(verify, r"\boxed{\sqrt{4}}", "2").reward == 1.0


def test_a_worker_that_dies_is_an_error_and_is_replaced(verify):
    assert score(verify, r"\boxed{\sqrt{4}}", "2").reward == 1.0
    process = verify._processes.workers[0]._process
    process.kill()
    process.wait()
    assert score(verify, r"\boxed{\sqrt{4}}", "2").reward == 1.0


@pytest.mark.parametrize("ground_truth", ["", " . ", r"\frac{1}{2", r"\boxed{}"])
def test_a_ground_truth_without_expression_is_the_rows_fault(verify, ground_truth):
    with pytest.raises(DataError, match="no expression in the ground truth"):
        score(verify, r"\boxed{x}", ground_truth)


def test_a_row_without_ground_truth_is_the_rows_fault(verify):
    with pytest.raises(DataError, match="the row has no ground truth"):
        score(verify, r"\boxed{None}", None)


def test_closing_ends_the_processes():
    verify = MathVerify(num_workers=1)
    assert verify._processes.workers[0]._process is None, "nothing starts before it is needed"
    score(verify, r"\boxed{\sqrt{4}}", "2")
    process = verify._processes.workers[0]._process
    verify.close()
    assert process.poll() is not None
    verify.close()


def test_a_worker_that_cannot_start_says_so(monkeypatch):
    verify = MathVerify(num_workers=1)
    monkeypatch.setattr("rl_rollout.rewards.check_processes.sys.executable", "/bin/false")
    with pytest.raises(RoleError, match="exit code 1"):
        score(verify, r"\boxed{\sqrt{4}}", "2")
    verify.close()


def test_integers_are_compared_in_place_as_the_library_would():
    verify = MathVerify(num_workers=1)
    assert score(verify, r"\boxed{1,018}", " 1018 ").reward == 1.0
    assert score(verify, r"\boxed{-5}", "5").reward == 0.0
    assert verify._processes.workers[0]._process is None
    verify.close()


@settings(deadline=None)
@given(
    gold=st.integers(-(10**7), 10**7), change=st.sampled_from([0, 0, 1, -1, 1000]), separator=st.sampled_from(["", ","])
)
def test_the_short_cut_for_integers_agrees_with_the_library(gold, change, separator):
    verify = MathVerify(num_workers=1)
    gold_text, answer = str(gold), format(gold + change, separator)
    by_library = math_verify.verify(
        math_verify.parse(gold_text, parsing_timeout=None),
        math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=None),
        timeout_seconds=None,
    )
    assert asyncio.run(verify.compare(gold_text, answer)) == by_library == (change == 0)


def test_a_process_that_a_response_ends_gives_no_verdict(tmp_path, monkeypatch):
    module = tmp_path / "dies.py"
    module.write_text(
        "import os, sys\nprint('{}', flush=True)\nfor line in sys.stdin:\n    print('{}', flush=True)\n    os.abort()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    processes = CheckProcesses("dies", timeout_s=60.0, num_processes=1)
    assert [processes.check({}), processes.check({})] == [None, None]
    processes.close()


@pytest.mark.parametrize("is_async", [True, False])
def test_the_start_of_a_worker_does_not_count_against_the_timeout_of_the_scorer(tmp_path, monkeypatch, is_async):
    module = tmp_path / "starts.py"
    module.write_text("import sys\nprint('{}', flush=True)\nfor line in sys.stdin:\n    print('{}\\n{}', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    processes = CheckProcesses("starts", timeout_s=60.0, num_processes=1)
    start, ready_at = processes.workers[0]._start, []

    def start_slowly():
        time.sleep(0.3)  # longer than the timeout
        process = start()
        ready_at.append(time.perf_counter())
        return process

    monkeypatch.setattr(processes.workers[0], "_start", start_slowly)
    monkeypatch.setattr(calls, "now", lambda: (*ready_at, time.perf_counter())[0])  # nothing later counts

    def in_thread(given):
        return float(processes.check({}) == {})

    async def in_loop(given):
        return float(await asyncio.to_thread(processes.check, {}) == {})

    scorer = RewardScorer(in_loop if is_async else in_thread, timeout_s=0.1)
    given_input = RewardInput(prompt_uid="p", response_text="", response_ids=np.array([1]))
    (scored,) = asyncio.run(scorer.score([given_input]))
    scorer.close()
    processes.close()
    assert (scored.failure, scored.result.reward) == (None, 1.0)


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": -1}, {"timeout_s": 0}, {"timeout_s": -1.0}])
def test_options_with_which_no_check_could_end_are_refused(options):
    with pytest.raises(SettingsError, match=rf"{next(iter(options))} of MathVerify must be a .*number"):
        resolve_reward("math_verify", options=options)
