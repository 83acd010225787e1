import asyncio
import functools
import threading

import numpy as np
import pytest

from rl_core.data.records import Prompt
from rl_core.errors import SettingsError
from rl_rollout.rewards import RewardInput, RewardResult, RewardScorer, quick, resolve_reward
from rl_rollout.rewards.calls import CallThreads


def responses(*texts):
    return [RewardInput(prompt_uid="p7", response_text=text, response_ids=np.array([1])) for text in texts]


def score(function, *texts, **options):
    return asyncio.run(RewardScorer(function, **options).score(responses(*texts)))


async def async_length(given):
    await asyncio.sleep(0)
    return len(given.response_text)


class Judge:
    is_closed = False

    async def __call__(self, given):
        return len(given.response_text)

    def close(self):
        self.is_closed = True


def length(given):
    return len(given.response_text)


@pytest.mark.parametrize("function", [length, quick(lambda given: len(given.response_text)), async_length, Judge()])
def test_every_kind_of_function_scores_in_order(function):
    scored = score(function, "a", "bbb", "")
    assert [one.result.reward for one in scored] == [1.0, 3.0, 0.0]
    assert all(one.failure is None and one.reward_s >= 0 for one in scored)


def test_where_functions_run():
    names = []

    def note(_given):
        names.append(threading.current_thread() is threading.main_thread())
        return 0.0

    score(note, "a", "b")
    score(quick(functools.partial(note)), "a")
    assert names == [False, False, True]


def test_what_a_function_may_give():
    result = RewardResult(reward=1.0, components={"format": 1}, extras={"prediction": "18"})
    values = iter([True, np.float32(0.5), np.bool_(True), {"reward": 1, "accuracy": np.float64(0.25)}, result])
    given = [one.result for one in score(lambda _given: next(values), *"abcde")]
    assert [one.reward for one in given] == [1.0, 0.5, 1.0, 1.0, 1.0]
    assert all(type(one.reward) is float for one in given)
    assert given[3].components == {"accuracy": 0.25}
    assert (given[4].components, given[4].extras) == ({"format": 1.0}, {"prediction": "18"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), r"returned reward = nan \(float\); expected a finite number"),
        (float("inf"), "returned reward = inf"),
        (1e39, "returned reward = 1e\\+39"),
        (10**400, "returned reward = 1000"),
        (None, r"returned reward = None \(NoneType\); .* Return a number for every response: `return 0.0`"),
        (
            [1.0],
            r"returned reward = \[1.0\] \(list\); .* Return one number for one response, as in `return 1.0`; TRL's",
        ),
        ((1.0, "a"), r"returned reward = \(1.0, 'a'\) \(tuple\); .* Return one number for one response"),
        ("1.0", r"returned reward = '1.0' \(str\)"),
        (1j, r"\(complex\)"),
        (
            {"score": 1.0},
            r"returned a mapping without 'reward'; it has \['score'\]. Rename verl's 'score' to 'reward', as in `retu",
        ),
        ({}, r"it has \[\]. Return the number to train on as 'reward', as in `return {'reward': 1.0, 'acc': 1.0}`"),
        ({"reward": 1.0, "answer": "18"}, r"returned answer = '18' \(str\)"),
        (RewardResult(reward=float("nan")), "returned reward = nan"),
    ],
)
def test_other_values_are_failures_that_name_function_prompt_and_value(value, message):
    def reward_of_mine(_given):
        return value

    (scored,) = score(reward_of_mine, "a")
    assert scored.result is None
    with pytest.raises(ValueError, match=message):
        raise ValueError(scored.failure)
    assert "reward_of_mine' on prompt p7 returned" in scored.failure


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_raises_fails_that_response_alone(tmp_path, is_async):
    path = tmp_path / "mine.py"
    path.write_text(
        f"{'async ' * is_async}def reward(given):\n    if given.response_text == 'b':\n"
        "        raise KeyError('answer')\n    return 1.0\n"
    )
    scored = score(resolve_reward(f"{path}:reward"), "a", "b", "c")
    assert [one.result is None for one in scored] == [False, True, False]
    assert scored[1].failure == (
        "reward function 'mine.py:reward' on prompt p7 raised KeyError: 'answer' (mine.py, line 3, in reward)"
    )


def test_a_function_that_exits_is_a_failure():
    def leaves(_given):
        raise SystemExit(3)

    (scored,) = score(leaves, "a")
    assert "raised SystemExit: 3" in scored.failure


def test_a_call_that_hangs_is_left_behind_and_the_others_are_scored():
    released = threading.Event()

    def hangs_on_b(given):
        if given.response_text == "b":
            released.wait(timeout=30)
        return 1.0

    scored = score(hangs_on_b, "a", "b", "c", timeout_s=2.0)
    released.set()
    assert [one.result is None for one in scored] == [False, True, False]
    assert "on prompt p7 did not return within 2.0 s" in scored[1].failure
    assert scored[1].reward_s == 2.0


def test_an_async_call_that_hangs_is_cancelled():
    async def hangs_on_b(given):
        if given.response_text == "b":
            await asyncio.Event().wait()
        return 1.0

    scored = score(hangs_on_b, "a", "b", "c", timeout_s=0.05)
    assert [one.result is None for one in scored] == [False, True, False]
    assert "did not return within 0.05 s" in scored[1].failure


def test_an_async_functions_own_timeout_error_is_told_apart():
    async def raises(_given):
        raise TimeoutError("the judge did not answer")

    (scored,) = score(raises, "a")
    assert "raised TimeoutError: the judge did not answer" in scored.failure


def test_the_time_limit_is_for_each_call_not_for_the_group():
    def pauses(_given):
        threading.Event().wait(timeout=0.3)
        return 1.0

    scored = score(pauses, *"abcdef", timeout_s=1.5)
    assert [one.failure for one in scored] == [None] * 6
    assert all(0.3 <= one.reward_s < 1.5 for one in scored)
    assert all(one.wait_s >= 5 * 0.3 for one in scored)  # the calls run one after another
    assert [one.wait_s for one in score(quick(lambda _given: 1.0), "a")] == [0.0]


@pytest.mark.parametrize("is_async", [False, True])
def test_concurrency_is_bounded(is_async):
    running, most = 0, 0
    lock = threading.Lock()

    def enter():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)

    def leave():
        nonlocal running
        with lock:
            running -= 1

    async def async_reward(_given):
        enter()
        await asyncio.sleep(0.01)
        leave()
        return 1.0

    def thread_reward(_given):
        enter()
        threading.Event().wait(timeout=0.01)
        leave()
        return 1.0

    scorer = RewardScorer(async_reward if is_async else thread_reward, max_concurrency=3)

    async def groups():
        return await asyncio.gather(*(scorer.score(responses("a", "b")) for _ in range(8)))

    assert sum(map(len, asyncio.run(groups()))) == 16
    assert most == 3


def test_responses_that_wait_for_their_reward_are_counted():
    def function(given):
        found.append(scorer.num_scoring)
        if given.response_text == "c":
            raise ValueError("no verdict")
        return 1.0

    found = []
    scorer = RewardScorer(function)
    assert scorer.num_scoring == 0
    asyncio.run(scorer.score(responses("a", "b", "c")))
    assert found == [3, 3, 3]
    assert scorer.num_scoring == 0


def test_rehearsal_finds_a_broken_function():
    prompt = Prompt(uid="p0", input_ids=np.array([1], dtype=np.int32), ground_truth="3", columns={"answer": "3"})

    def broken(given):
        return given.columns["solution"]

    with pytest.raises(SettingsError, match=r"fails on an empty response .* on prompt p0 raised KeyError: 'solution'"):
        asyncio.run(RewardScorer(broken).rehearse(prompt))
    asyncio.run(RewardScorer(length).rehearse(prompt))


def test_close_reaches_the_function():
    judge = Judge()
    RewardScorer(judge).close()
    assert judge.is_closed
    RewardScorer(length).close()


def test_impossible_options_are_refused():
    for options in ({"timeout_s": 0.0}, {"max_concurrency": 0}):
        with pytest.raises(SettingsError, match=rf"{next(iter(options))} of RewardScorer must be a .*; found 0"):
            RewardScorer(length, **options)


def test_a_scorer_has_the_name_of_its_function():
    assert RewardScorer(resolve_reward("exact_match")).name == "ExactMatch"
    assert RewardScorer(length).name.endswith("length")


@pytest.mark.parametrize(("is_quick", "num_hand_overs"), [(True, 0), (False, 64)])
def test_512_calls_cost_a_hand_over_for_each_group(is_quick, num_hand_overs, monkeypatch):
    handed_over = []
    run = CallThreads.run

    async def counted(self, inputs, *, timeout_s):
        handed_over.append(len(inputs))
        return await run(self, inputs, timeout_s=timeout_s)

    monkeypatch.setattr(CallThreads, "run", counted)

    async def step():
        scorer = RewardScorer(quick(functools.partial(length)) if is_quick else length)
        inputs = responses(*"abcdefgh")
        groups = await asyncio.gather(*(scorer.score(inputs) for _ in range(64)))
        return [one.result.reward for group in groups for one in group]

    assert asyncio.run(step()) == [1.0] * 512
    assert handed_over == [8] * num_hand_overs
