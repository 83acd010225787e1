"""One engine serves the weights of several clients in slots."""

import asyncio
import random

import numpy as np
import pytest

from rl_core.errors import NotReadyError, WeightProofError
from rl_rollout.engines import ScriptedEngine
from rl_rollout.gateway import RefusedError
from rl_service.requests import Sample
from rl_service.sampling import EngineSlots, Sampler, Share, Weights


class Engine:
    """Slots with the weights that they have, and the requests that run."""

    def __init__(self, adapters, broken=()):
        self.slots, self.running, self.loaded, self.broken = dict.fromkeys(adapters), [], [], set(broken)
        self.uses = EngineSlots(self.serve, adapters)

    async def serve(self, weights, adapter):
        assert not any(slot == adapter for slot, _ in self.running)
        self.slots[adapter] = None
        await asyncio.sleep(0)
        if weights.path in self.broken:
            raise NotReadyError(f"{weights.path} is broken")
        self.slots[adapter] = weights
        self.loaded.append(weights.path)
        return len(self.loaded)

    async def use(self, path, until, saved_at=0.0):
        async with self.uses.using(Weights(path, saved_at)) as (adapter, version):
            assert adapter == "base" or self.slots[adapter] == Weights(path, saved_at)
            assert adapter == "base" or self.loaded[version - 1] == path
            self.running.append((adapter, path))
            try:
                await until.wait()
            finally:
                self.running.remove((adapter, path))

    def begin(self, paths, saved_at=0.0):
        ends = [asyncio.Event() for _ in paths]
        return ends, [
            asyncio.ensure_future(self.use(path, end, saved_at)) for path, end in zip(paths, ends, strict=True)
        ]

    @property
    def paths(self):
        return sorted(path for _, path in self.running)


async def settled():
    for _ in range(19):
        await asyncio.sleep(0)


def test_requests_whose_weights_are_in_a_slot_run_at_once_and_others_wait_for_one():
    async def run():
        engine = Engine(["one", "two"])
        ends, jobs = engine.begin(["a", "b", "base", "c", "b", "a"])
        await settled()
        assert engine.paths == ["a", "b", "b", "base"]  # c waits for the slot of a, the least recently used
        ends[0].set()
        await settled()
        assert engine.paths == ["b", "b", "base", "c"]
        for end in ends:
            end.set()
        await asyncio.gather(*jobs)
        assert engine.loaded == ["a", "b", "c", "a"]

    asyncio.run(run())


def test_a_waiting_request_is_not_overtaken_for_ever():
    async def run():
        engine = Engine(["one", "two"])
        ends, jobs = engine.begin("ab")
        await settled()
        (last,), waiting = engine.begin("c")
        for _ in range(5):
            (more_a, more_b), more = engine.begin("ab")
            await settled()
            ends[0].set()
            ends[1].set()
            ends, jobs = [more_a, more_b], [*jobs, *more]
            await settled()
        assert "c" in engine.paths
        for end in (last, *ends):
            end.set()
        await asyncio.gather(*jobs, *waiting)

    asyncio.run(run())


def test_a_single_slot_serves_all_weights_in_turns():
    async def run():
        engine = Engine([None])
        ends, jobs = engine.begin(["a", "a", "base", "a"])
        await settled()
        late_ends, late = engine.begin(["a"])
        await settled()
        assert engine.paths == ["a", "a"]  # the last came after the base's, and does not overtake it
        for end in (*ends, *late_ends):
            end.set()
        await asyncio.gather(*jobs, *late)
        assert engine.loaded == ["a", "base", "a"]

    asyncio.run(run())


def test_others_saved_at_the_same_path_are_other_weights():
    async def run():
        engine = Engine(["one", "two"])
        for saved_at in (0.0, 1.0, 0.0):
            (end,), (job,) = engine.begin("a", saved_at)
            end.set()
            await job
        assert engine.loaded == ["a", "a"]

    asyncio.run(run())


def test_weights_that_cannot_be_served_fail_only_their_own_requests():
    async def run():
        engine = Engine(["one", "two"], broken="b")
        ends, jobs = engine.begin("abba")
        for end in ends:
            end.set()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [isinstance(one, NotReadyError) for one in results] == [False, True, True, False]
        assert engine.loaded == ["a"]
        (end,), (job,) = engine.begin("c")
        end.set()
        await job
        assert {one.path for one in engine.slots.values()} == {"a", "c"}  # the slot of b was empty

    asyncio.run(run())


@pytest.mark.parametrize("adapters", [[None], ["one", "two"]])
def test_a_request_that_is_cancelled_blocks_nobody(adapters):
    async def run():
        engine = Engine(adapters)
        ends, jobs = engine.begin("abc")
        await asyncio.sleep(0)
        jobs[0].cancel()  # while its weights are loaded
        await settled()
        jobs[1].cancel()  # while it waits or runs
        for end in ends:
            end.set()
        await asyncio.wait_for(jobs[2], 10)
        assert "c" in engine.loaded
        for job in jobs[:2]:
            with pytest.raises(asyncio.CancelledError):
                await job
        assert not engine.uses._waiting
        assert engine.uses._slots
        assert all(slot.is_idle for slot in engine.uses._slots)

    asyncio.run(run())


def test_random_requests_all_end_with_their_own_weights():
    async def run():
        draw, engine = random.Random(7), Engine(["one", "two", "three"], broken="z")
        ends, jobs = [], []
        for _ in range(400):
            new = engine.begin(draw.choices("abcdefgz", k=draw.randint(0, 3)))
            ends, jobs = ends + new[0], jobs + new[1]
            for _ in range(draw.randint(0, 4)):
                await asyncio.sleep(0)
            if ends and draw.random() < 0.5:
                ends.pop(draw.randrange(len(ends))).set()
            if draw.random() < 0.1:
                draw.choice(jobs or [asyncio.ensure_future(settled())]).cancel()
        for end in ends:
            end.set()
        results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 60)
        assert not [one for one in results if isinstance(one, AssertionError)]
        assert not engine.uses._waiting

    asyncio.run(run())


def test_a_session_has_only_so_many_samples_in_the_engine():
    async def run():
        share, inside = Share(4), []

        async def use(name, num_samples, until):
            async with share.of(num_samples):
                inside.append(name)
                await until.wait()
            inside.remove(name)

        ends = {name: asyncio.Event() for name in "abcd"}
        jobs = [asyncio.ensure_future(use(*one, ends[one[0]])) for one in (("a", 3), ("b", 9), ("c", 1), ("d", 1))]
        await settled()
        assert inside == ["a"]  # the others wait for b, which is first
        jobs[1].cancel()
        await settled()
        assert inside == ["a", "c"]
        ends["c"].set()
        await settled()
        assert inside == ["a", "d"]
        for end in ends.values():
            end.set()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert share._room._value == 4

    asyncio.run(run())


def asked(**changes):
    body = {
        "sampling_session_id": "s",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 3},
    }
    return Sample.model_validate({**body, **changes})


async def sampler_of(engine, version=0):
    await engine.start()

    async def serve(*_):
        return version

    return Sampler(engine, EngineSlots(serve, [None]), max_samples=8)


REFUSED = [
    ({"prompt": {"chunks": [{"type": "image", "data": "aGk=", "format": "png"}]}}, r"prompt.chunks\[0\] must be text"),
    ({"prompt": {"chunks": []}}, "prompt must have token ids from 0 to"),
    ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "prompt must have token ids from 0 to"),
    ({"num_samples": 9}, "num_samples must be from 1 to limits.max_samples = 8; found 9"),
    ({"sampling_params": {"stop": []}}, "turns off the end token"),
    ({"sampling_params": {"max_tokens": 0}}, "at least 1; found a prompt of 2 and max_tokens = 0"),
    ({"record_stability_info": True}, "record_stability_info is not supported"),
    ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "target_prompt_logprobs is not supported"),
    ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
    ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs must be from 0 to the engine's max_top_k"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_the_engine_cannot_do_is_refused_by_name_before_it_runs(changes, message):
    async def run():
        sampler = await sampler_of(ScriptedEngine(lambda *_: [5, 6]))
        with pytest.raises(RefusedError, match=message):
            sampler.checked(asked(**changes))

    asyncio.run(run())


def test_samples_and_logprobs_of_the_prompt():
    async def run():
        sampler = await sampler_of(ScriptedEngine(lambda *_: [5, 6], end_token_ids=[6]))
        request = asked(num_samples=2, prompt_logprobs=True, sampling_params={"seed": 3, "top_k": -1, "stop": [6]})
        params = sampler.checked(request)
        samples, logprobs, top = await sampler.sample(Weights("a"), request, params, request_id="r")
        assert [one.tokens.tolist() for one in samples] == [[5, 6], [5, 6]]
        assert not samples[0].is_cut
        assert np.isnan(logprobs).tolist() == [True, False]
        assert top is None

    asyncio.run(run())


def test_tokens_of_other_weights_are_dropped():
    async def run():
        sampler = await sampler_of(ScriptedEngine(lambda *_: [5, 6], end_token_ids=[6]), version=4)
        request = asked()
        with pytest.raises(WeightProofError, match="tokens of version 0 were sampled for a client of version 4"):
            await sampler.sample(Weights("a"), request, sampler.checked(request), request_id="r")

    asyncio.run(run())
