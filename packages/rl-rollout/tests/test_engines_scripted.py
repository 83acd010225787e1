"""The scripted engine follows its script, and refuses what every engine refuses."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from rl_core.errors import EngineError, NotReadyError
from rl_core.weights.update import InProcess, WeightReceipt, WeightUpdate
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, SamplingParams
from rl_rollout.engines.scripted import Script, ScriptedEngine

TRAITS = EngineTraits(name="scripted", max_model_len=16, vocab_size=50, max_top_k=50)


def started(script: Script, **options: object) -> ScriptedEngine:
    engine = ScriptedEngine(script, traits=TRAITS, **options)
    asyncio.run(engine.start())
    return engine


def ask(engine: ScriptedEngine, *prompt: int, num_samples: int = 1, **sampling: float) -> list[Generation]:
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    return asyncio.run(
        engine.generate(GenerateRequest(input_ids=np.array(prompt, np.int32), sampling=params, num_samples=num_samples))
    )


def test_a_table_answers_sample_by_sample() -> None:
    engine = started({(1, 2): [[7, 8, 0], [9]]}, end_token_ids=[0])
    samples = ask(engine, 1, 2, num_samples=3)
    assert [sample.token_ids.tolist() for sample in samples] == [[7, 8, 0], [9], [7, 8, 0]]
    assert [sample.finish_reason for sample in samples] == ["stop", "length", "stop"]
    assert samples[0].logprobs.tolist() == [-1.0, -1.0, -1.0]
    assert ask(engine, 1, 2, temperature=0.0)[0].logprobs.tolist() == [0.0, 0.0, 0.0]


def test_a_long_response_is_cut_at_max_tokens() -> None:
    engine = started(lambda request, index: [1, 2, 3, 4, 5, 6])
    assert ask(engine, 1)[0].token_ids.tolist() == [1, 2, 3, 4]
    assert ask(engine, 1)[0].finish_reason == "length"


def test_an_unknown_prompt_and_a_raising_script_fail_the_request_alone() -> None:
    engine = started({(1,): [[2]]})
    with pytest.raises(EngineError, match=r"no response to the prompt \[9\]"):
        ask(engine, 9)
    assert ask(engine, 1)[0].token_ids.tolist() == [2]

    def fail(request: GenerateRequest, index: int) -> Sequence[int]:
        raise EngineError("as told")

    with pytest.raises(EngineError, match="as told"):
        ask(started(fail), 1)


def test_a_waiting_script_decides_the_order() -> None:
    done: list[int] = []

    async def run() -> None:
        gates = {1: asyncio.Event(), 2: asyncio.Event()}

        async def wait(request: GenerateRequest, index: int) -> Sequence[int]:
            token = int(request.input_ids[0])
            await gates[token].wait()
            return [token]

        engine = ScriptedEngine(lambda request, index: wait(request, index))
        await engine.start()

        async def one(token: int) -> None:
            await engine.generate(
                GenerateRequest(input_ids=np.array([token], np.int32), sampling=SamplingParams(max_tokens=1))
            )
            done.append(token)
            gates[1].set()

        both = asyncio.gather(one(1), one(2))
        gates[2].set()
        await both

    asyncio.run(run())
    assert done == [2, 1]


def test_abort_cuts_off_a_script_that_waits() -> None:
    async def run() -> list[Generation]:
        async def forever(request: GenerateRequest, index: int) -> Sequence[int]:
            await asyncio.Event().wait()
            return []

        engine = ScriptedEngine(lambda request, index: forever(request, index))
        await engine.start()
        request = GenerateRequest(input_ids=np.array([1], np.int32), sampling=SamplingParams(max_tokens=1))
        running = asyncio.ensure_future(engine.generate(request))
        while not engine.requests:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.abort(None)
        return await running

    (sample,) = asyncio.run(run())
    assert sample.finish_reason == "abort"
    assert len(sample.token_ids) == 0


def test_updates_set_the_version_and_are_noted() -> None:
    engine = started({(1,): [[2, 3]]})
    update = WeightUpdate(version=5, digests={}, location=InProcess(tensors={}))
    receipt = asyncio.run(engine.update_weights(update))
    assert receipt == WeightReceipt(version=5, arrived={}, live={})
    assert ask(engine, 1)[0].policy_versions.tolist() == [5, 5]
    assert [u.version for u in engine.updates] == [5]


def test_bad_input_is_refused() -> None:
    engine = started({(1,): [[2]]})
    for prompt, says in (((), "at least one token"), ((50,), "50"), (tuple(range(16)), "16")):
        with pytest.raises(EngineError, match=says):
            ask(engine, *prompt)
    assert engine.requests == []
    with pytest.raises(EngineError, match="max_model_len"):
        asyncio.run(engine.score([np.ones(17, np.int32)]))
    (scores,) = asyncio.run(engine.score([np.ones(3, np.int32)]))
    assert scores.token_logprobs.tolist() == [0.0, -1.0, -1.0]


def test_it_serves_only_between_start_and_close() -> None:
    engine = ScriptedEngine({(1,): [[2]]})
    with pytest.raises(NotReadyError, match="has not been started"):
        ask(engine, 1)
    asyncio.run(engine.start())
    asyncio.run(engine.close())
    asyncio.run(engine.close())
    with pytest.raises(NotReadyError, match="closed"):
        ask(engine, 1)


def test_what_a_score_leaves_is_spread_over_the_other_tokens() -> None:
    def score(sequence: np.ndarray) -> np.ndarray:
        return np.log(np.array([1.0, 0.51, 0.001], np.float32))[: len(sequence)]

    engine = ScriptedEngine({}, traits=TRAITS, score=score)
    asyncio.run(engine.start())
    sequence = np.array([7, 1, 2], np.int32)
    (scores,) = asyncio.run(engine.score([sequence], top_k=3))
    assert scores.token_ids.tolist() == [[-1] * 4, [1, 1, 0, 2], [2, 0, 1, 3]]
    np.testing.assert_allclose(np.exp(scores.logprobs[1]), [0.51, 0.51, 0.01, 0.01], rtol=1e-5)
    np.testing.assert_allclose(np.exp(scores.logprobs[2]), [0.001] + [0.999 / 49] * 3, rtol=1e-5)
    (whole,) = asyncio.run(engine.score([sequence], top_k=50))
    np.testing.assert_allclose(np.exp(whole.logprobs[1:, 1:]).sum(-1), 1.0, rtol=1e-5)
    assert {tuple(sorted(row)) for row in whole.token_ids[1:, 1:].tolist()} == {tuple(range(50))}
