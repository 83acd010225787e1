import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rl_core.data.batch import Batch
from rl_core.data.records import Prompt
from rl_core.errors import EngineError, RolloutError, SettingsError
from rl_rollout import (
    Generation,
    RewardScorer,
    Rollout,
    RolloutOptions,
    SamplingParams,
    SingleTurnLoop,
    quick,
    require_some_success,
)
from rl_rollout.audit import SampledSpan, audit_trajectory
from rl_rollout.loops.protocol import stable_seed

SAMPLING = SamplingParams(max_tokens=8, seed=3)


class SeededEngine:
    """Draws sample i of a request from seed + i; fails for prompts that start with token 0."""

    def __init__(self):
        self.running = 0
        self.most_running = 0
        self.requests = []
        self.num_aborts = 0
        self.gate = None

    async def generate(self, request):
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
        finally:
            self.running -= 1
        if request.input_ids[0] == 0:
            raise EngineError("the prompt starts with token 0")
        return [self.sample((request.sampling.seed or 0) + i) for i in range(request.num_samples)]

    def sample(self, seed):
        random = np.random.default_rng(seed)
        size = int(random.integers(1, 9))
        return Generation(
            token_ids=random.integers(1, 20, size, dtype=np.int32),
            logprobs=-random.random(size, dtype=np.float32),
            policy_versions=np.zeros(size, dtype=np.int32),
            finish_reason="stop",
        )

    async def abort(self, request_ids):
        assert request_ids is None
        self.num_aborts += 1


def prompts(*first_tokens):
    return [
        Prompt(uid=f"u{index}-e0", input_ids=np.array([token, 5], dtype=np.int32))
        for index, token in enumerate(first_tokens)
    ]


def join(sequences):
    return [" ".join(map(str, sequence.tolist())) for sequence in sequences]


def rollout(engine, loop=None, **options):
    scorer = RewardScorer(quick(lambda _given: 1.0))
    return Rollout(engine, loop or SingleTurnLoop(), scorer=scorer, decode=join, **options)


def run(engine, asked, *, num_sessions=2, seed=11, sampling=SAMPLING, on_group=None, **options):
    parts = rollout(engine, **options)
    return asyncio.run(parts.run(asked, num_sessions=num_sessions, sampling=sampling, seed=seed, on_group=on_group))


def tokens(results):
    return {
        (trajectory.prompt_uid, trajectory.session_index): trajectory.input_ids.tolist()
        for result in results
        for trajectory in result.trajectories
    }


def test_results_are_in_the_order_of_the_prompts_and_make_a_batch():
    results = run(SeededEngine(), prompts(1, 2, 3), num_sessions=4)
    assert [result.prompt.uid for result in results] == ["u0-e0", "u1-e0", "u2-e0"]
    batch = Batch.from_trajectories([trajectory for result in results for trajectory in result.trajectories])
    assert len(batch) == 12
    assert [tuple(key)[:2] for key in batch.keys[:5]] == [("u0-e0", i) for i in range(4)] + [("u1-e0", 0)]


def test_draws_depend_on_seed_and_uid_alone():
    asked = prompts(1, 2, 3)
    everything = tokens(run(SeededEngine(), asked))
    backwards = tokens(run(SeededEngine(), asked[::-1], options=RolloutOptions(max_concurrent_groups=1)))
    assert backwards == everything
    assert tokens(run(SeededEngine(), asked[1:2])) == {
        key: value for key, value in everything.items() if key[0] == "u1-e0"
    }
    assert tokens(run(SeededEngine(), asked, seed=12)) != everything


def test_which_seed_the_engine_gets():
    engine = SeededEngine()
    run(engine, prompts(1), seed=11)
    run(engine, prompts(1), seed=None)
    run(engine, prompts(1), seed=11, sampling=SamplingParams(max_tokens=8, temperature=0.0))
    assert [request.sampling.seed for request in engine.requests] == [stable_seed(11, "u0-e0"), None, None]


def test_a_failing_group_never_harms_others_and_keeps_its_reason():
    ok, failed, also_ok = run(SeededEngine(), prompts(1, 0, 2))
    assert (ok.failures, also_ok.failures) == ((), ())
    assert failed.failures == ("EngineError: the prompt starts with token 0",) * 2
    assert isinstance(failed.error, EngineError)
    assert failed.trajectories == ()


def test_a_run_in_which_nothing_succeeds_is_refused_with_the_cause():
    mixed, failed = run(SeededEngine(), prompts(1, 0)), run(SeededEngine(), prompts(0, 0))
    require_some_success(mixed)
    require_some_success([])
    with pytest.raises(RolloutError, match="all 4 sessions failed; the first: EngineError: the prompt") as caught:
        require_some_success(failed)
    assert caught.value.__cause__ is failed[0].error


def test_a_loop_that_gives_too_few_results_fails_the_group():
    class Short:
        async def run_group(self, prompt, *, num_sessions, context):
            return []

    (result,) = run(SeededEngine(), prompts(1), loop=Short())
    assert result.failures == ("agent loop Short returned 0 results for 2 sessions",) * 2


def test_an_engine_that_gives_too_few_responses_fails_the_group():
    class Short(SeededEngine):
        async def generate(self, request):
            return (await super().generate(request))[1:]

    (result,) = run(Short(), prompts(1))
    assert result.failures == ("EngineError: the engine returned 1 responses to a request for 2.",) * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_groups_are_told_as_they_settle(is_async):
    class Second(SeededEngine):
        """Holds the first prompt's request until the second prompt's group is reported."""

        def __init__(self):
            super().__init__()
            self.told = asyncio.Event()

        async def generate(self, request):
            if request.input_ids[0] == 1:
                await asyncio.wait_for(self.told.wait(), timeout=60)
            return await super().generate(request)

    engine, order = Second(), []

    def tell(result):
        order.append(result.prompt.uid)
        engine.told.set()

    async def tell_async(result):
        await asyncio.sleep(0)
        tell(result)

    run(engine, prompts(1, 2), on_group=tell_async if is_async else tell)
    assert order == ["u1-e0", "u0-e0"]


def test_concurrency_is_bounded():
    engine = SeededEngine()
    run(engine, prompts(*range(1, 9)), options=RolloutOptions(max_concurrent_groups=3))
    assert engine.most_running == 3
    engine = SeededEngine()
    run(engine, prompts(*range(1, 9)))
    assert engine.most_running == 8


def test_cancelling_aborts_the_engine_and_leaves_no_task():
    engine = SeededEngine()

    async def cancelled():
        engine.gate = asyncio.Event()
        task = asyncio.create_task(rollout(engine).run(prompts(1, 2), num_sessions=2, sampling=SAMPLING))
        while engine.running < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(cancelled()) == set()
    assert (engine.num_aborts, engine.running) == (1, 0)


def test_an_error_of_the_callback_reaches_the_caller_with_its_cause():
    def store(_result):
        try:
            raise OSError("disk full")
        except OSError as error:
            raise RuntimeError("cannot store") from error

    engine = SeededEngine()
    with pytest.raises(RuntimeError, match="cannot store") as caught:
        run(engine, prompts(1, 2), on_group=store)
    assert str(caught.value.__cause__) == "disk full"
    assert engine.num_aborts == 1


def test_impossible_numbers_are_refused():
    with pytest.raises(SettingsError, match="num_sessions must be at least 1; found 0"):
        run(SeededEngine(), prompts(1), num_sessions=0)
    with pytest.raises(SettingsError, match=r"max_concurrent_groups .* at least 1"):
        run(SeededEngine(), prompts(1), options=RolloutOptions(max_concurrent_groups=0))


def test_what_it_gives_passes_the_audit():
    engine = SeededEngine()
    for result in run(engine, prompts(1, 2)):
        for trajectory in result.trajectories:
            seed = stable_seed(11, result.prompt.uid) + trajectory.session_index
            audit_trajectory(trajectory, [SampledSpan.of(result.prompt.input_ids, engine.sample(seed))])


class GreedyEngine(SeededEngine):
    """Samples token 7 where others draw: with greedy sampling, which fails for prompts that start with token 9."""

    async def generate(self, request):
        found = await super().generate(request)
        if request.sampling.temperature:
            return found
        if request.input_ids[0] == 9:
            raise EngineError("no greedy response")
        return [replace(one, token_ids=np.full_like(one.token_ids, 7)) for one in found]


def sevens(given):
    return float(all(token == 7 for token in given.response_ids))


def with_baseline(engine, asked, *, num_sessions):
    parts = Rollout(engine, SingleTurnLoop(), scorer=RewardScorer(quick(sevens)), decode=join)
    running = parts.run(asked, num_sessions=num_sessions, sampling=SAMPLING, seed=11, with_baseline=True)
    return asyncio.run(running)


@pytest.mark.parametrize("num_sessions", [1, 3])
def test_a_greedy_session_gives_its_reward_to_the_group_and_nothing_else(num_sessions):
    engine = GreedyEngine()
    (group,) = with_baseline(engine, prompts(1), num_sessions=num_sessions)
    assert [row.reward_baseline for row in group.trajectories] == [1.0] * num_sessions
    assert [row.reward for row in group.trajectories] == [0.0] * num_sessions
    drawn, greedy = sorted(engine.requests, key=lambda request: -request.sampling.temperature)
    assert (drawn.num_samples, drawn.sampling.temperature) == (num_sessions, 1.0)
    assert (greedy.num_samples, greedy.sampling) == (1, replace(SAMPLING, temperature=0.0, seed=None))
    assert tokens([group]) == tokens(run(SeededEngine(), prompts(1), num_sessions=num_sessions))


def test_sessions_without_their_baseline_fail_and_say_why():
    failed, other = with_baseline(GreedyEngine(), prompts(9, 1), num_sessions=2)
    reason = "the greedy session, whose reward is the baseline, failed: EngineError: no greedy response"
    assert failed.failures == (reason, reason)
    assert [row.reward for one in failed.sessions for row in one.trajectories] == [None, None]
    assert failed.trajectories == ()
    assert other.failures == ()


def test_a_cancelled_run_leaves_no_greedy_session_behind():
    engine = GreedyEngine()

    async def cancelled():
        engine.gate = asyncio.Event()
        parts = rollout(engine)
        running = asyncio.create_task(parts.run(prompts(1), num_sessions=2, sampling=SAMPLING, with_baseline=True))
        while engine.running < 2:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return engine.running

    assert asyncio.run(cancelled()) == 0
    assert engine.num_aborts == 1
