"""Invalid results and errors of a loop fail only their own sessions, with the reason."""

import asyncio
import re
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rl_core.data.records import Prompt
from rl_core.errors import DataError
from rl_rollout import (
    AuditOptions,
    GenerateRequest,
    Generation,
    RewardScorer,
    Rollout,
    RolloutOptions,
    SamplingParams,
    SessionLoop,
    SessionResult,
    quick,
)
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.loops import trajectory_of
from rl_rollout.loops.outcomes import join_experts, join_parts

BAD = "p0"
UNAUDITED = RolloutOptions(audit=AuditOptions(share=0.0))


class UnlikeNumber:
    def __float__(self):
        raise OSError("no number today")


class Unreadable(dict):
    def items(self):
        raise OSError("no items today")


async def sampled(prompt, session_index, context):
    """Sample a response and give it a reward."""
    request = GenerateRequest(input_ids=prompt.input_ids, sampling=context.session_sampling(session_index))
    (generation,) = await context.engine.generate(request)
    return replace(trajectory_of(prompt, generation, session_index=session_index, generate_s=0.0), reward=1.0)


def test_experts_are_those_of_the_first_request_that_told_them():
    def told(*experts: int) -> np.ndarray:
        return np.array(experts, np.int16).reshape(-1, 1, 1)

    joined = join_experts([told(4, 5, -1), None, told(9, 9, 6, 7, -1)], 6)
    assert joined is not None
    assert joined.ravel().tolist() == [4, 5, 6, 7, -1, -1]
    assert join_experts([None], 6) is None


def test_nuclei_are_those_of_trained_parts() -> None:
    ids, logprobs = np.array([7, 8], np.int32), np.zeros(2, np.float32)
    plain = Generation(token_ids=ids, logprobs=logprobs, policy_versions=ids, finish_reason="stop")
    cut = replace(plain, nucleus_ids=np.array([[7, 3, -1], [5, 8, 6]], np.int32))
    joined = join_parts([(ids, None), (ids, cut), (ids[:1], None)])
    assert joined["nucleus_ids"].tolist() == [[-1] * 3, [-1] * 3, [7, 3, -1], [5, 8, 6], [-1] * 3]
    assert join_parts([(ids, None), (ids, plain)])["nucleus_ids"] is None


class Changing(SessionLoop):
    """Session 1 of the bad prompt returns a function of its trajectory."""

    def __init__(self, change):
        self._change = change

    async def run_session(self, prompt, *, session_index, context):
        trajectory = await sampled(prompt, session_index, context)
        if (prompt.uid, session_index) == (BAD, 1):
            return self._change(trajectory)
        return SessionResult(trajectories=(trajectory,))


class Whole:
    """A loop without SessionLoop, which returns `give()` as the bad prompt's group."""

    def __init__(self, give):
        self._give = give

    async def run_group(self, prompt, *, num_sessions, context):
        if prompt.uid == BAD:
            return self._give()
        return [SessionResult(trajectories=(await sampled(prompt, i, context),)) for i in range(num_sessions)]


async def roll(loop, *, uids=(BAD, "p1"), options=None):
    engine = ScriptedEngine({(1, 2): [[3, 4]]})
    await engine.start()
    rollout = Rollout(
        engine,
        loop,
        scorer=RewardScorer(quick(lambda _given: 1.0)),
        decode=lambda rows: ["" for _ in rows],
        options=options,
    )
    prompts = [Prompt(uid=uid, input_ids=np.array([1, 2], np.int32)) for uid in uids]
    return await rollout.run(prompts, num_sessions=3, sampling=SamplingParams(max_tokens=4))


def run(loop, **options):
    return asyncio.run(asyncio.wait_for(roll(loop, **options), timeout=30))


def assert_only_session_1_failed(groups):
    bad, good = groups
    assert [session.failure is None for session in bad.sessions] == [True, False, True]
    assert [trajectory.reward for trajectory in bad.trajectories] == [1.0, 1.0]
    assert good.failures == ()
    assert len(good.trajectories) == 3
    return bad.sessions[1].failure


def given(**changes):
    return lambda t: SessionResult(trajectories=(replace(t, **changes),))


@pytest.mark.parametrize("options", [None, UNAUDITED])
@pytest.mark.parametrize(
    ("change", "failure"),
    [
        (lambda _: None, r"None \(NoneType\) for session 1; expected a SessionResult"),
        (lambda t: t, r"Trajectory\(.*\.\.\. \(Trajectory\) for session 1; expected a SessionResult"),
        (lambda _: SessionResult(), "no trajectory and no failure for session 1; expected one of them"),
        (lambda _: SessionResult(failure=""), r"failure = '' \(str\) for session 1; expected a reason"),
        (given(output_index=-1), r"a trajectory named \('p0', 1, -1\) .*; expected \('p0', 1, 0\)"),
        (given(session_index=0), r"a trajectory named \('p0', 0, 0\) .*; expected \('p0', 1, 0\)"),
        (given(prompt_uid="p1"), r"a trajectory named \('p1', 1, 0\) .*; expected \('p0', 1, 0\)"),
        (given(reward=None), "trajectory 0 of session 1 with reward = None; expected a finite number, or a session wi"),
        (given(reward=float("nan")), r"trajectory 0 of session 1 with reward = nan \(float\); expected a finite numb"),
        (given(reward=1e39), r"reward = 1e\+39 \(float\); expected a finite number"),
        (given(reward_components={"a": float("inf")}), r"a = inf \(float\); expected a finite number"),
        (given(extras={"a": {1}}), r"extras that are not JSON \(TypeError: Object of type set"),
    ],
)
def test_what_is_no_session_fails_alone(change, failure, options):
    said = assert_only_session_1_failed(run(Changing(change), options=options))
    assert re.match(f"agent loop Changing returned .*{failure}", said), said


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        (
            lambda _: SessionResult(trajectories=None),
            "trajectories of SessionResult must be a tuple, each a Trajectory",
        ),
        (lambda t: SessionResult(trajectories=(t, 3), failure="lost"), "trajectories of SessionResult must be a tuple"),
        (
            lambda _: SessionResult(failure=OSError("x")),
            r"failure of SessionResult must be a string or None; found OSErr",
        ),
        (given(reward="1"), r"reward of Trajectory\(.*\) must be a number or None; found '1' \(str\)"),
        (given(reward=UnlikeNumber()), r"reward of Trajectory\(.*\) must be a number or None; found .*UnlikeNumber"),
        (given(reward_components=Unreadable(a=1)), "reward_components of .* must be a mapping"),
        (given(finish_reason="done"), "finish_reason of .* must be one of 'stop', 'length', 'abort'; found 'done'"),
        (given(timings=3.0), r"timings of .* must be a Timings; found 3\.0 \(float\)"),
        (given(input_ids=np.array([1.5, 2.0, 3.0, 4.0])), r"input_ids of .* must be \[T\] int32; found float64"),
        (given(loss_mask=np.array([0, 0, 1, 2])), r"loss_mask of .* must be \[T\] bool; found int64"),
        (given(policy_versions=SimpleNamespace(shape=(4,))), r"policy_versions of .* must be \[T\] int32"),
    ],
)
def test_what_is_no_record_is_refused_in_the_loop_and_fails_its_session_alone(change, failure):
    said = assert_only_session_1_failed(run(Changing(change)))
    assert re.match(rf"(Data|Shape)Error: {failure}", said), said


def test_what_there_was_is_kept_without_a_reward():
    bad, _ = run(Changing(given(reward=float("nan"))))
    assert [t.reward for t in bad.sessions[1].trajectories] == [None]


@pytest.mark.parametrize("reward", [1, True, np.float32(1.0), np.int64(1)])
def test_numbers_of_other_kinds_become_floats(reward):
    bad, _ = run(Changing(given(reward=reward, reward_components={"a": np.float32(0.5)})))
    assert bad.failures == ()
    (trajectory,) = bad.sessions[1].trajectories
    assert (type(trajectory.reward), trajectory.reward) == (float, 1.0)
    assert trajectory.reward_components == {"a": 0.5}


@pytest.mark.parametrize(
    ("give", "failure"),
    [
        (lambda: None, r"None \(NoneType\); expected a list of 3 SessionResult, one per session"),
        (lambda: "xyz", r"'xyz' \(str\); expected a list of 3"),
        (lambda: [None], "1 results for 3 sessions"),
        (lambda: [None, 1, "x"], r"(None|1|'x') \(\w+\) for session \d; expected a SessionResult"),
    ],
)
def test_what_is_no_group_fails_its_sessions(give, failure):
    bad, good = run(Whole(give))
    assert len(bad.failures) == 3
    assert all(re.match(f"agent loop Whole returned {failure}", said) for said in bad.failures), bad.failures
    assert (good.failures, len(good.trajectories)) == ((), 3)


def raising(error):
    def change(_trajectory):
        raise error

    return change


@pytest.mark.parametrize("error", [asyncio.CancelledError("scope"), SystemExit(3), GeneratorExit(), KeyError("k")])
def test_whatever_user_code_raises_fails_its_session(error):
    said = assert_only_session_1_failed(run(Changing(raising(error))))
    assert re.match(rf"agent loop Changing raised {type(error).__name__}: .*\(test_loops_outcomes.py, line \d+,", said)
    bad, good = run(Whole(lambda: raising(error)(None)))
    assert bad.failures[0].startswith(f"agent loop Whole raised {type(error).__name__}: ")
    assert (len(bad.failures), bad.error, good.failures) == (3, error, ())


def test_a_cancellation_that_reaches_one_session_or_one_group_ends_no_other():
    class Leaking(Changing):
        async def run_session(self, prompt, *, session_index, context):
            if (prompt.uid, session_index) == (BAD, 1):
                asyncio.current_task().cancel()
                await asyncio.sleep(0)
            return await super().run_session(prompt, session_index=session_index, context=context)

    said = assert_only_session_1_failed(run(Leaking(None)))
    assert said.startswith("agent loop Leaking raised CancelledError: ")

    class LeakingWhole(Whole):
        async def run_group(self, prompt, *, num_sessions, context):
            if prompt.uid == BAD:
                asyncio.current_task().cancel()
                await asyncio.sleep(0)
            return await super().run_group(prompt, num_sessions=num_sessions, context=context)

    bad, good = run(LeakingWhole(None))
    assert bad.failures == ("agent loop LeakingWhole raised CancelledError: ",) * 3
    assert (good.failures, len(good.trajectories)) == ((), 3)


def test_a_keyboard_interrupt_passes_through():
    with pytest.raises(KeyboardInterrupt):
        run(Changing(raising(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        run(Whole(lambda: raising(KeyboardInterrupt())(None)))


class Waiting(SessionLoop):
    """A loop whose sessions wait until they are cancelled."""

    def __init__(self):
        self.num_waiting = 0
        self.num_cancelled = 0
        self.all_wait = asyncio.Event()

    async def run_session(self, prompt, *, session_index, context):
        self.num_waiting += 1
        if self.num_waiting == 6:
            self.all_wait.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


def test_a_cancelled_run_ends_at_once():
    loop = Waiting()

    async def cancelled():
        run = asyncio.create_task(roll(loop))
        await asyncio.wait_for(loop.all_wait.wait(), timeout=30)
        run.cancel()
        await asyncio.wait({run}, timeout=30)
        assert run.cancelled()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(cancelled()) == set()
    assert loop.num_cancelled == 6


def test_ctrl_c_ends_the_run():
    loop = Waiting()

    async def interrupted():
        interrupt = asyncio.create_task(loop.all_wait.wait())
        interrupt.add_done_callback(lambda _: signal.raise_signal(signal.SIGINT))
        await asyncio.wait_for(roll(loop), timeout=30)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())
    assert loop.num_cancelled == 6


def test_a_uid_that_comes_twice_is_refused():
    with pytest.raises(DataError, match=r"distinct uids; prompts\[2\] repeats 'b'"):
        run(Changing(None), uids=("a", "b", "b", "a"))
