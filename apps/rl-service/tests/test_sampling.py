"""One engine serves the weights of several clients, one after the other."""

import asyncio

import numpy as np
import pytest

from rl_core.errors import NotReadyError, WeightProofError
from rl_rollout.engines import ScriptedEngine
from rl_rollout.gateway import RefusedError
from rl_service.requests import Sample
from rl_service.sampling import EngineTurns, Sampler


class Served:
    """Weights by path; serving others while requests run would be an error."""

    def __init__(self, broken=()):
        self.paths, self.running, self.broken = [], set(), broken

    async def serve(self, path):
        assert not self.running
        await asyncio.sleep(0)
        if path in self.broken:
            raise NotReadyError(f"{path} is broken")
        self.paths.append(path)
        return len(self.paths)

    async def use(self, turns, path, until):
        async with turns.using(path) as version:
            assert self.paths[version - 1] == path
            self.running.add((path, id(until)))
            await until.wait()
            self.running.discard((path, id(until)))


def test_requests_of_the_same_weights_run_together_and_others_wait():
    async def run():
        served, ends = Served(), [asyncio.Event() for _ in range(5)]
        turns = EngineTurns(served.serve)
        jobs = [asyncio.ensure_future(served.use(turns, path, end)) for path, end in zip("aaba", ends[:4], strict=True)]
        for _ in range(9):
            await asyncio.sleep(0)
        jobs.append(asyncio.ensure_future(served.use(turns, "a", ends[4])))
        for _ in range(9):
            await asyncio.sleep(0)
        assert len(served.running) == 3  # the last came after b, and does not overtake it
        for end in ends:
            end.set()
        await asyncio.gather(*jobs)
        assert served.paths == ["a", "b", "a"]

    asyncio.run(run())


def test_weights_that_cannot_be_served_fail_only_their_own_requests():
    async def run():
        served, end = Served(broken="b"), asyncio.Event()
        end.set()
        turns = EngineTurns(served.serve)
        jobs = [served.use(turns, path, end) for path in "abba"]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [isinstance(one, NotReadyError) for one in results] == [False, True, True, False]
        assert served.paths == ["a"]

    asyncio.run(run())


def test_a_request_that_is_cancelled_blocks_nobody():
    async def run():
        served, end = Served(), asyncio.Event()
        turns = EngineTurns(served.serve)
        jobs = [asyncio.ensure_future(served.use(turns, path, end)) for path in "abc"]
        for _ in range(9):
            await asyncio.sleep(0)
        jobs[1].cancel()
        end.set()
        await asyncio.gather(jobs[0], jobs[2])
        assert served.paths == ["a", "c"]
        with pytest.raises(asyncio.CancelledError):
            await jobs[1]

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

    async def serve(_):
        return version

    return Sampler(engine, EngineTurns(serve), max_samples=8)


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
        samples, logprobs, top = await sampler.sample("a", request, params, request_id="r")
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
            await sampler.sample("a", request, sampler.checked(request), request_id="r")

    asyncio.run(run())
