"""Failures of a reward function, and their handling."""

import asyncio
import functools
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_rollout.rewards import FailurePolicy, RewardInput, RewardResult, RewardScorer, quick


def responses(*texts):
    return [RewardInput(prompt_uid="p7", response_text=text, response_ids=np.array([1])) for text in texts]


def score(function, *texts, **options):
    return asyncio.run(RewardScorer(function, **options).score(responses(*texts)))


class BadRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


class BadMapping(dict):
    def __contains__(self, key):
        raise RuntimeError("no keys")


class BadInt(int):
    def __float__(self):
        raise RuntimeError("no float")


class BadError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


async def a_coroutine():
    return 1.0


BAD_VALUES = [
    (10**6000, "returned reward = an integer of 19932 bits"),
    (BadRepr(), "whose repr raises RuntimeError"),
    (np.array(0.5), r"Use `.item\(\)` to get a single value"),
    (BadMapping(), "returned a BadMapping that cannot be read"),
    (BadInt(3), "returned a BadInt that cannot be read"),
    (b"1.0", r"\(bytes\)"),
    ([1.0], r"\(list\)"),
    ({"reward": {"reward": 1.0}}, r"\(dict\)"),
    ({"reward": 1.0, **{str(i): 0.0 for i in range(300)}}, "300 components; expected at most 256"),
    (RewardResult(reward=1.0, extras={"log": "x" * 10_000_000}), "extras of 10000011 bytes as JSON; expected at most"),
    (RewardResult(reward=1.0, extras={"array": np.zeros(2)}), "extras that are not JSON"),
    (RewardResult(reward=1.0, extras={"x": float("nan")}), "extras that are not JSON"),
    (RewardResult(reward=1.0, extras={"x": nested(100_000)}), r"extras that are not JSON \(RecursionError"),
    (RewardResult(reward=1.0, extras=[1]), r"extras = \[1\] \(list\); expected a mapping"),
    (RewardResult(reward=1.0, components={"a": "b"}), "returned a = 'b'"),
    (RewardResult(reward="1"), "returned reward = '1'"),
]


@pytest.mark.parametrize("make", ["def", "quick", "async"])
@pytest.mark.parametrize(("value", "message"), BAD_VALUES, ids=[message for _, message in BAD_VALUES])
def test_a_value_that_is_no_reward_fails_its_session_alone(make, value, message):
    def sync(given):
        return value if given.response_text == "b" else 1.0

    async def asynchronous(given):
        return sync(given)

    function = {"def": sync, "quick": quick(functools.partial(sync)), "async": asynchronous}[make]
    scored = score(function, "a", "b", "c")
    assert [one.result is None for one in scored] == [False, True, False]
    with pytest.raises(ValueError, match=message):
        raise ValueError(scored[1].failure)
    assert len(scored[1].failure) < 4000
    assert scored[1].failure_names == ("bad_value",)


def test_what_is_awaitable_or_yields_is_named_and_warns_nobody():
    async def yields_later(_given):
        yield 1.0

    def yields(_given):
        yield 1.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (coroutine,) = score(lambda _given: a_coroutine(), "a")
        (async_generator,) = score(lambda given: yields_later(given), "a")
        (generator,) = score(lambda given: yields(given), "a")
    assert "returned a coroutine that nothing awaits; make the function an `async def`" in coroutine.failure
    assert "returned an async generator: it uses `yield`" in async_generator.failure
    assert "returned a generator: it uses `yield`" in generator.failure


def test_an_async_function_that_gives_an_async_generator_fails():
    async def reward(_given):
        async def inner():
            yield 1.0

        return inner()

    assert "returned an async generator" in score(reward, "a")[0].failure


ERRORS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), RecursionError(), BadError()]


@pytest.mark.parametrize("make", ["def", "quick", "async"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_function_raises_fails_its_session_alone(make, error):
    def sync(given):
        if given.response_text == "b":
            raise error
        return 1.0

    async def asynchronous(given):
        return sync(given)

    function = {"def": sync, "quick": quick(functools.partial(sync)), "async": asynchronous}[make]
    scored = score(function, "a", "b", "c")
    assert [one.result is None for one in scored] == [False, True, False]
    assert f"raised {type(error).__name__}" in scored[1].failure


def test_a_long_error_text_is_cut():
    def raises(_given):
        raise ValueError("x" * 10_000_000)

    assert len(score(raises, "a")[0].failure) < 3000


def test_a_cancellation_from_outside_ends_an_async_call():
    async def check():
        entered, left = asyncio.Event(), asyncio.Event()

        async def waits(_given):
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

        scoring = asyncio.create_task(RewardScorer(waits).score(responses("a")))
        await asyncio.wait_for(entered.wait(), timeout=60)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        await asyncio.wait_for(left.wait(), timeout=60)

    asyncio.run(check())


def test_an_async_call_that_refuses_to_be_cancelled_is_left_behind():
    async def check():
        released = asyncio.Event()

        async def stubborn(_given):
            while not released.is_set():
                try:
                    await released.wait()
                except asyncio.CancelledError:
                    continue
            return 1.0

        (scored,) = await RewardScorer(stubborn, timeout_s=0.05).score(responses("a"))
        released.set()
        return scored

    assert "did not return within 0.05 s" in asyncio.run(check()).failure


class Flaky:
    """Fails the first calls for each text with the given errors or values."""

    def __init__(self, failures):
        self.failures = {text: list(ones) for text, ones in failures.items()}
        self.calls = []

    def __call__(self, given):
        self.calls.append(given.response_text)
        left = self.failures.get(given.response_text)
        if left:
            failure = left.pop(0)
            if isinstance(failure, BaseException):
                raise failure
            return failure
        return 1.0


def retrying(retries, **options):
    return FailurePolicy(on_failure="retry", retries=retries, backoff_s=0.0, **options)


@pytest.mark.parametrize("is_async", [False, True])
def test_only_the_calls_that_failed_are_tried_again(is_async):
    flaky = Flaky({"b": [OSError("1"), OSError("2")], "c": [OSError("1"), OSError("2"), OSError("3")]})

    async def asynchronous(given):
        return flaky(given)

    scored = score(asynchronous if is_async else flaky, "a", "b", "c", failures=retrying(2))
    assert [one.result is None for one in scored] == [False, False, True]
    assert [one.num_attempts for one in scored] == [1, 3, 3]
    assert sorted(flaky.calls) == ["a", "b", "b", "b", "c", "c", "c"]
    assert "raised OSError: 3" in scored[2].failure
    assert scored[2].failure.endswith("(the last of 3 attempts)")


def test_a_policy_of_drop_calls_once():
    flaky = Flaky({"a": [OSError("1")]})
    assert score(flaky, "a")[0].result is None
    assert flaky.calls == ["a"]


@pytest.mark.parametrize(
    ("failure", "retry_on", "num_attempts"),
    [
        (OSError("1"), ("raised", "timed_out"), 2),
        (OSError("1"), ("timed_out",), 1),
        (ConnectionRefusedError("1"), ("ConnectionError",), 2),
        (KeyError("1"), ("ConnectionError",), 1),
        (float("nan"), ("raised", "timed_out"), 1),
        (float("nan"), ("bad_value",), 2),
        (DataError("the row is broken"), ("raised",), 1),
        (DataError("the row is broken"), ("DataError",), 2),
    ],
)
def test_which_failures_are_tried_again(failure, retry_on, num_attempts):
    (scored,) = score(Flaky({"a": [failure]}), "a", failures=retrying(3, retry_on=retry_on))
    assert scored.num_attempts == num_attempts
    assert (scored.result is None) == (num_attempts == 1)


def test_a_call_that_hung_is_tried_again_and_all_its_time_counts():
    released = threading.Event()
    calls = []

    def hangs_once(given):
        calls.append(given.response_text)
        if len(calls) == 1:
            released.wait(timeout=30)
        return 1.0

    policy = FailurePolicy(on_failure="retry", retries=1, backoff_s=0.1)
    (scored,) = score(hangs_once, "a", timeout_s=0.2, failures=policy)
    released.set()
    assert scored.result.reward == 1.0
    assert scored.num_attempts == 2
    assert scored.reward_s >= 0.3  # a timeout of 0.2 s and a backoff of 0.1 s


def test_the_policy_of_zero_marks_failures_and_successes():
    flaky = Flaky({"b": [OSError("disk")]})
    scored = score(flaky, "a", "b", failures=FailurePolicy(on_failure="zero"))
    assert [one.failure for one in scored] == [None, None]
    assert [one.result.reward for one in scored] == [1.0, 0.0]
    assert [one.result.components for one in scored] == [{"reward_failed": 0.0}, {"reward_failed": 1.0}]
    assert "raised OSError: disk" in scored[1].result.extras["reward_failure"]


def test_the_rate_limit_spaces_the_starts_of_calls():
    async def check(is_quick):
        loop = asyncio.get_running_loop()
        starts, began_at = [], loop.time()

        def note(_given):
            starts.append(loop.time())
            return 1.0

        function = quick(note) if is_quick else note
        await RewardScorer(function, max_calls_per_s=50.0).score(responses(*"abcd"))
        return np.array(starts) - began_at

    for is_quick in (False, True):
        assert (asyncio.run(check(is_quick)) > np.arange(4) / 50 - 0.001).all()  # starts may be late, never early


def test_the_rate_limit_lets_no_burst_follow_a_pause():
    async def check():
        loop = asyncio.get_running_loop()
        starts = []

        async def note(_given):
            starts.append(loop.time())
            return 1.0

        scorer = RewardScorer(note, max_calls_per_s=20.0)
        await scorer.score(responses(*"abc"))
        await asyncio.sleep(0.2)
        await scorer.score(responses(*"def"))
        return starts[2] - starts[0], starts[5] - starts[2]

    together, after_pause = asyncio.run(check())
    assert together >= 0.09
    assert after_pause >= 0.28


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.complex_numbers(),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=6) | st.just("reward"), children, max_size=3)
    ),
)


@settings(deadline=None, max_examples=200)
@hypothesis_given(value=json_like, extras=json_like)
def test_any_value_gives_a_finite_reward_or_a_failure(value, extras):
    for given_value in (value, RewardResult(reward=1.0, extras=extras), RewardResult(reward=1.0, components=value)):
        (scored,) = score(quick(lambda _given, one=given_value: one), "a")
        assert (scored.result is None) != (scored.failure is None)
        if scored.result is not None:
            assert np.isfinite([scored.result.reward, *scored.result.components.values()]).all()
