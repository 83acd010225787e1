"""The pump between the asynchronous protocol and a stepper: order, failures, cancellation, closing."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from rl_core.errors import EngineDiedError, EngineError, MissingExtraError, NotReadyError
from rl_core.weights.update import InProcess, WeightReceipt, WeightUpdate
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, SamplingParams, TokenScores
from rl_rollout.engines.stepped import SteppedEngine
from rl_rollout.engines.stepper import Sample
from rl_rollout.engines.streaming import stream

TRAITS = EngineTraits(name="counting", max_model_len=64, vocab_size=100, max_top_k=3)
UPDATE = WeightUpdate(version=1, digests={}, location=InProcess(tensors={}))


class CountingStepper:
    """Gives each sample the tokens 1, 2, 3, ..., and records its calls."""

    traits = TRAITS

    def __init__(self) -> None:
        self.admitted: list[list[int]] = []
        self.removed: list[Sample] = []
        self.running: list[Sample] = []
        self.num_steps = 0
        self.num_closed = 0
        self.fail_at_step: int | None = None
        self.update_error: Exception | None = None

    def admit(self, samples: Sequence[Sample]) -> None:
        self.admitted.append([sample.input_ids[0] for sample in samples])
        self.running.extend(samples)

    def step(self) -> list[Sample]:
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise ValueError("out of memory")
        for sample in self.running:
            if sample.sampling is None:
                rows = np.full((len(sample.input_ids) - 1, 1 + sample.top_k), 5.0)
                sample.scores = TokenScores.after_first(rows.astype(np.int64), -rows)
                sample.finish_reason = "stop"
                continue
            sample.token_ids.append(len(sample.token_ids) + 1)
            sample.policy_versions.append(0)
            if len(sample.token_ids) == sample.sampling.max_tokens:
                sample.finish_reason = "length"
        finished = [sample for sample in self.running if sample.finish_reason]
        self.running = [sample for sample in self.running if not sample.finish_reason]
        return finished

    def remove(self, samples: Sequence[Sample]) -> None:
        self.removed.extend(samples)
        self.running = [sample for sample in self.running if sample not in samples]

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        if self.update_error is not None:
            raise self.update_error
        return WeightReceipt(version=update.version, arrived={}, live={})

    def close(self) -> None:
        self.num_closed += 1


def asking(token: int, *, max_tokens: int = 2, num_samples: int = 1) -> GenerateRequest:
    return GenerateRequest(
        input_ids=np.array([token], np.int32), sampling=SamplingParams(max_tokens=max_tokens), num_samples=num_samples
    )


@pytest.fixture
def stepper() -> CountingStepper:
    return CountingStepper()


@pytest.fixture(params=[False, True], ids=["inline", "thread"])
def engine(request: pytest.FixtureRequest, stepper: CountingStepper) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(lambda: stepper, in_thread=request.param)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


def gather(engine: SteppedEngine, *requests: GenerateRequest) -> list[Any]:
    async def send_all() -> list[Any]:
        async with asyncio.timeout(20):
            return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    return asyncio.run(send_all())


def test_requests_of_one_turn_are_admitted_together_and_in_order(
    engine: SteppedEngine, stepper: CountingStepper
) -> None:
    results = gather(engine, asking(7, num_samples=2), asking(3), asking(5))
    assert stepper.admitted == [[7, 7, 3, 5]]
    assert stepper.num_steps == 2
    assert [[sample.token_ids.tolist() for sample in result] for result in results] == [
        [[1, 2]] * 2,
        [[1, 2]],
        [[1, 2]],
    ]


def test_who_waited_can_ask_again_before_the_next_step(engine: SteppedEngine, stepper: CountingStepper) -> None:
    async def two_turns(token: int) -> None:
        await engine.generate(asking(token, max_tokens=1))
        await asyncio.ensure_future(engine.generate(asking(token + 1, max_tokens=1)))

    async def run() -> None:
        await asyncio.gather(two_turns(10), two_turns(20), engine.generate(asking(30, max_tokens=4)))

    asyncio.run(run())
    assert stepper.admitted == [[10, 20, 30], [11, 21]]
    assert stepper.num_steps == 4


def test_a_failing_step_reaches_everyone_with_its_cause(engine: SteppedEngine, stepper: CountingStepper) -> None:
    stepper.fail_at_step = 2
    errors = gather(engine, asking(1), asking(2, max_tokens=9))
    for error in errors:
        assert isinstance(error, EngineError)
        assert "ValueError: out of memory" in str(error)
        assert isinstance(error.__cause__, ValueError)
    with pytest.raises(EngineError, match="out of memory"):
        asyncio.run(engine.generate(asking(1)))
    with pytest.raises(EngineError, match="out of memory"):
        asyncio.run(engine.update_weights(UPDATE))


def test_a_cancelled_request_leaves_the_stepper(engine: SteppedEngine, stepper: CountingStepper) -> None:
    async def cancel_one() -> list[Generation]:
        first = asyncio.ensure_future(engine.generate(asking(1, max_tokens=50)))
        second = asyncio.ensure_future(engine.generate(asking(2, max_tokens=5)))
        await engine.generate(asking(3, max_tokens=1))
        first.cancel()
        return await second

    assert asyncio.run(cancel_one())[0].token_ids.tolist() == [1, 2, 3, 4, 5]
    assert [sample.input_ids for sample in stepper.removed] == [[1]]
    assert stepper.running == []


def test_a_loop_that_ends_midway_leaves_the_engine_usable(engine: SteppedEngine, stepper: CountingStepper) -> None:
    async def leave() -> None:
        asyncio.ensure_future(engine.generate(asking(1, max_tokens=50)))  # noqa: RUF006 - cancelled by the loop's end
        await engine.generate(asking(2, max_tokens=1))

    asyncio.run(leave())
    assert gather(engine, asking(3))[0][0].token_ids.tolist() == [1, 2]
    assert [sample.input_ids for sample in stepper.removed] == [[1]]


def test_abort_ends_what_runs_and_what_waits(engine: SteppedEngine, stepper: CountingStepper) -> None:
    async def abort() -> list[list[Generation]]:
        running = asyncio.ensure_future(engine.generate(asking(1, max_tokens=50)))
        await engine.generate(asking(2, max_tokens=2))
        waiting = asyncio.ensure_future(engine.generate(asking(3, max_tokens=50)))
        await asyncio.sleep(0)
        await engine.abort(None)
        return [await running, await waiting]

    (ran,), (waited,) = asyncio.run(abort())
    assert ran.finish_reason == waited.finish_reason == "abort"
    assert len(ran.token_ids) >= 2
    assert len(waited.token_ids) <= len(ran.token_ids)
    assert stepper.running == []


def test_a_refused_update_leaves_the_engine_working(engine: SteppedEngine, stepper: CountingStepper) -> None:
    stepper.update_error = EngineError("tensor 'x' is missing")
    with pytest.raises(EngineError, match="tensor 'x' is missing"):
        asyncio.run(engine.update_weights(UPDATE))
    assert len(gather(engine, asking(1))[0]) == 1


def test_an_update_that_fails_midway_fails_the_engine(engine: SteppedEngine, stepper: CountingStepper) -> None:
    stepper.update_error = RuntimeError("half of it is loaded")
    with pytest.raises(EngineError, match="version 1 could not be loaded: half of it"):
        asyncio.run(engine.update_weights(UPDATE))
    with pytest.raises(EngineError, match="half of it is loaded"):
        asyncio.run(engine.generate(asking(1)))


def test_score_returns_in_order_and_an_empty_list_at_once(engine: SteppedEngine) -> None:
    scores = asyncio.run(engine.score([np.array([1, 2], np.int32), np.array([3], np.int32)]))
    assert [one.token_logprobs.tolist() for one in scores] == [[0.0, -5.0], [0.0]]
    assert asyncio.run(engine.score([])) == []


def test_scores_have_a_row_for_each_token_and_nothing_in_the_first(engine: SteppedEngine) -> None:
    sequences = [np.array([1, 2, 3], np.int32), np.array([3], np.int32)]
    three, one = asyncio.run(engine.score(sequences, top_k=1))
    assert three.token_ids.tolist() == [[-1, -1], [5, 5], [5, 5]]
    assert three.logprobs.tolist() == [[0.0, 0.0], [-5.0, -5.0], [-5.0, -5.0]]
    assert (three.token_ids.dtype, three.logprobs.dtype) == (np.int32, np.float32)
    assert one.token_ids.tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("top_k", "words"),
    [(-1, "at least 0"), (101, "vocabulary of 100 tokens; found 101"), (4, "max_top_k = 3; found 4. Lower top_k")],
)
def test_a_number_of_likeliest_tokens_that_cannot_be_is_refused(
    engine: SteppedEngine, stepper: CountingStepper, top_k: int, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        asyncio.run(engine.score([np.array([1], np.int32)], top_k=top_k))
    assert stepper.admitted == []


def test_closing_fails_who_waits_and_closes_the_stepper_once(engine: SteppedEngine, stepper: CountingStepper) -> None:
    async def close() -> Any:
        running = asyncio.ensure_future(engine.generate(asking(1, max_tokens=60)))
        await engine.generate(asking(2, max_tokens=1))
        await engine.close()
        await engine.close()
        return (await asyncio.gather(running, return_exceptions=True))[0]

    error = asyncio.run(close())
    assert isinstance(error, EngineError)
    assert stepper.num_closed == 1
    with pytest.raises(NotReadyError, match="closed"):
        asyncio.run(engine.generate(asking(1)))


@pytest.mark.parametrize(
    ("raised", "expected", "words"),
    [
        (ValueError("no memory"), EngineError, "could not start: ValueError: no memory"),
        (MissingExtraError("install it"), MissingExtraError, "install it"),
    ],
)
def test_a_start_that_fails_says_why(raised: Exception, expected: type[Exception], words: str) -> None:
    def fail() -> CountingStepper:
        raise raised

    make: Callable[[], Any] = fail
    engine = SteppedEngine(make, in_thread=True)
    with pytest.raises(expected, match=words):
        asyncio.run(engine.start())
    with pytest.raises(NotReadyError, match="has not been started"):
        engine.traits  # noqa: B018 - raises
    asyncio.run(engine.close())


def test_a_start_that_nobody_waits_for_is_closed_all_the_same(stepper: CountingStepper) -> None:
    is_loading, may_end = threading.Event(), threading.Event()

    def load_slowly() -> CountingStepper:
        is_loading.set()
        assert may_end.wait(20)
        return stepper

    async def give_up() -> None:
        engine = SteppedEngine(load_slowly, in_thread=True)
        start = asyncio.ensure_future(engine.start())
        await asyncio.to_thread(is_loading.wait, 20)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        may_end.set()
        await engine.close()

    asyncio.run(give_up())
    assert stepper.num_closed == 1


def test_a_stream_that_is_left_is_no_more_work(engine: SteppedEngine, stepper: CountingStepper) -> None:
    async def leave() -> int:
        async with asyncio.timeout(60):
            async with aclosing(stream(engine, asking(7, max_tokens=50, num_samples=2))) as pieces:
                piece = await anext(pieces)
            await engine.generate(asking(8))  # the stepper drops samples before its next step
            return len(piece.token_ids)

    assert asyncio.run(leave()) < 50
    assert len(stepper.removed) == 2
    assert not stepper.running


def test_a_stepper_that_fails_fails_its_streams(engine: SteppedEngine, stepper: CountingStepper) -> None:
    stepper.fail_at_step = 3

    async def read() -> None:
        async with asyncio.timeout(60):
            async for _ in stream(engine, asking(7, max_tokens=50)):
                pass

    with pytest.raises(EngineDiedError, match="out of memory"):
        asyncio.run(read())
