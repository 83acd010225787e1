"""An engine that decodes in steps, behind the asynchronous protocol.

A `Stepper` is the model with its scheduler. It is synchronous, and one thread calls it. `SteppedEngine` does everything
else: it converts requests into samples, runs steps while there is work, and wakes all waiters.

Requests made in the same turn of the event loop are admitted together, in order, before the next step. Weight updates,
aborts, requests and the search for stop strings happen between two steps. After a failure of the stepper, every waiting
call and every later call raises it.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Literal, TypeVar

import structlog

from rl_core.data import ImageSpan, IntArray
from rl_core.errors import EngineDiedError, EngineError, NotReadyError, RLError
from rl_core.gpus import GpuUse, own_gpu_use
from rl_core.weights import TokenScores, WeightReceipt, WeightUpdate
from rl_rollout.engines.images import EngineImages, PlacedImage
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, NewTokens, Structure
from rl_rollout.engines.requests import check_request, check_scoring
from rl_rollout.engines.response_text import Decode, ResponseText
from rl_rollout.engines.stepper import Sample, SleepState, Stepper

log = structlog.get_logger(__name__)

TURNS_BETWEEN_STEPS = 3
"""Event loop turns after samples finish, so that their callers can send requests before the next step."""

MAX_PREPARED = 1000
"""Maximum number of structures remembered as compiled."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job:
    """The samples of one call, and the callback for their new tokens."""

    samples: list[Sample]
    done: "asyncio.Future[None]"
    num_open: int
    on_tokens: Callable[[NewTokens], None] | None


class SteppedEngine:
    """A `RolloutEngine` around a `Stepper`."""

    def __init__(
        self,
        make_stepper: Callable[[], Stepper],
        *,
        in_thread: bool,
        decoder: Callable[[], Decode] | None = None,
        images: Callable[[], EngineImages | None] = lambda: None,
    ) -> None:
        """Wrap a stepper. Nothing is loaded yet.

        Args:
            make_stepper: Loads the model, as version 0; called by `start`.
            in_thread: Create and call the stepper in its own thread, so that the event loop stays free.
            decoder: Loads the token decoder; called by the first request with a stop string.
            images: Opens the images that requests may name; called by `start`.
        """
        self._make_stepper = make_stepper
        self._decoder = decoder
        self._decode: Decode | None = None
        self._open_images = images
        self._images: EngineImages | None = None
        self._stepper: Stepper | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engine") if in_thread else None
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="structures")
        self._prepared: set[Structure] = set()
        self._incoming: list[Sample] = []
        self._removed: list[Sample] = []
        self._jobs: dict[Sample, _Job] = {}
        self._told: set[_Job] = set()
        self._pump: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._is_closed = False
        self._sleep_state = SleepState()

    @property
    def traits(self) -> EngineTraits:
        """See `RolloutEngine.traits`."""
        return self._loaded.traits

    @property
    def _loaded(self) -> Stepper:
        if self._stepper is None or self._is_closed:
            raise NotReadyError(f"the engine {'is closed' if self._is_closed else 'has not been started'}.")
        return self._stepper

    async def start(self) -> None:
        """See `RolloutEngine.start`."""
        if self._is_closed:
            raise NotReadyError("the engine is closed; create a new one.")
        if self._stepper is not None:
            return
        try:
            await self._call(self._make)
        except RLError:
            raise
        except Exception as error:
            raise EngineError(f"the engine could not start: {type(error).__name__}: {error}") from error

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        stepper = self._able()
        check_request(request, stepper.traits)
        input_ids: list[int] = request.input_ids.tolist()
        images, pixel_digest = self._placed(request.input_ids, request.images)
        samples = []
        for sampling in request.samplings:
            sample = Sample(
                input_ids=input_ids,
                sampling=sampling,
                seed=sampling.seed,
                request_id=request.request_id,
                adapter=request.adapter,
                images=images,
                pixel_digest=pixel_digest,
            )
            if sampling.structure is not None:
                await self._prepare(stepper, sampling.structure)
            if sampling.stop:
                sample.text = ResponseText(await self._loaded_decoder(), input_ids, stop=sampling.stop)
            samples.append(sample)
        await self._run(samples, request.on_tokens)
        return [sample.generation() for sample in samples]

    async def score(
        self,
        sequences: Sequence[IntArray],
        *,
        top_k: int = 0,
        with_experts: bool = False,
        images: Sequence[tuple[ImageSpan, ...]] = (),
        adapter: str | None = None,
    ) -> list[TokenScores]:
        """See `RolloutEngine.score`."""
        check_scoring(sequences, top_k, self._able().traits, images, adapter)
        samples = [
            Sample(
                input_ids=sequence.tolist(),
                sampling=None,
                top_k=top_k,
                with_experts=with_experts,
                adapter=adapter,
                images=self._placed(sequence, spans)[0],
            )
            for sequence, spans in zip(sequences, images or repeat(()), strict=bool(images))
        ]
        await self._run(samples)
        scored = [(sample.scores, sample.routed_experts) for sample in samples if sample.scores is not None]
        if len(scored) < len(samples):
            raise EngineError(f"{len(samples) - len(scored)} of {len(samples)} sequences were aborted unscored.")
        return [replace(scores, routed_experts=experts if with_experts else None) for scores, experts in scored]

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See `RolloutEngine.update_weights`."""
        stepper = self._working()
        self._sleep_state.check(update)
        try:
            receipt = await self._call(stepper.update_weights, update)
            self._sleep_state.lacks_weights = False
            return receipt
        except EngineError:
            raise
        except Exception as error:
            self._fail(error)
            raise EngineDiedError(f"version {update.version} could not be loaded: {error}") from error

    async def drop_adapter(self, name: str) -> None:
        """See `RolloutEngine.drop_adapter`."""
        await self._call(self._working().drop_adapter, name)

    async def abort(self, request_ids: Collection[str] | None) -> None:
        """See `RolloutEngine.abort`."""
        samples = [one for one in self._jobs if request_ids is None or one.request_id in request_ids]
        aborted = set(samples)
        self._incoming = [sample for sample in self._incoming if sample not in aborted]
        await self._call(self._working().remove, samples)
        for sample in samples:
            sample.finish_reason = sample.finish_reason or "abort"
        self._tell({self._jobs[sample] for sample in samples if sample in self._jobs})  # others may be in a step
        self._settle(samples)

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """See `RolloutEngine.sleep`."""
        stepper = self._working()
        if not stepper.traits.can_sleep:
            raise EngineError(f"{stepper.traits.name} cannot free memory; check traits.can_sleep first.")
        if self._jobs:
            raise EngineError(f"{len(self._jobs)} samples are running; wait for them or abort them before sleep.")
        if not self._sleep_state.is_asleep:
            self._sleep_state.begin(level)
            await self._call(stepper.sleep, level)

    async def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        stepper = self._working()
        if self._sleep_state.is_asleep:
            await self._call(stepper.wake)
            self._sleep_state.is_asleep = False

    async def gpu_use(self) -> list[GpuUse]:
        """Return the use of each of the engine's GPUs since the last call; empty on CPUs."""
        ask = getattr(self._working(), "gpu_use", None)
        return own_gpu_use("engine") if ask is None else await self._call(ask)

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail(NotReadyError("the engine was closed."))
        try:
            await self._call(self._unload)  # waits for a start that is still loading
        finally:
            self._preparing.shutdown(cancel_futures=True)
            if self._executor is not None:
                self._executor.shutdown()

    def _make(self) -> None:
        self._images = self._open_images()
        self._stepper = self._make_stepper()

    def _unload(self) -> None:
        if self._stepper is not None:
            self._stepper.close()

    def _working(self) -> Stepper:
        stepper = self._loaded
        if self._failure is not None:
            raise _failed(self._failure) from self._failure
        return stepper

    def _able(self) -> Stepper:
        stepper = self._working()
        self._sleep_state.check()
        return stepper

    async def _prepare(self, stepper: Stepper, structure: Structure) -> None:
        """Compile structures one at a time, because each may need much memory and several seconds."""
        if structure not in self._prepared:
            await asyncio.get_running_loop().run_in_executor(self._preparing, stepper.prepare, structure)
            if len(self._prepared) >= MAX_PREPARED:
                self._prepared.clear()
            self._prepared.add(structure)

    def _placed(self, token_ids: IntArray, spans: Sequence[ImageSpan]) -> tuple[tuple[PlacedImage, ...], str]:
        """Return a sequence's images and their digest. Computed here, so that requests of a turn stay together."""
        return self._images.placed(token_ids, spans) if spans and self._images is not None else ((), "")

    async def _loaded_decoder(self) -> Decode:
        if self._decode is None and self._decoder is not None:
            try:
                self._decode = await asyncio.to_thread(self._decoder)
            except RLError as error:
                raise EngineError(f"stop strings need the model's tokenizer: {error}") from error
        if self._decode is None:
            raise EngineError(f"{self.traits.name} has no tokenizer for stop strings.")
        return self._decode

    async def _run(self, samples: list[Sample], on_tokens: Callable[[NewTokens], None] | None = None) -> None:
        if not samples:
            return
        self._working()  # it may have failed while these were prepared
        loop = asyncio.get_running_loop()
        job = _Job(samples, loop.create_future(), len(samples), on_tokens)
        self._jobs.update(dict.fromkeys(samples, job))
        self._incoming.extend(samples)
        if on_tokens is not None:
            self._told.add(job)
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._pump_steps(), name="engine steps")
            self._pump.add_done_callback(self._on_pump_done)
        try:
            await job.done
        except asyncio.CancelledError:
            self._forget(samples)
            raise
        finally:
            self._told.discard(job)
        if failures := [sample.failure for sample in samples if sample.failure is not None]:
            raise EngineError(failures[0])

    async def _pump_steps(self) -> None:
        stepper = self._loaded
        while self._jobs and self._failure is None:
            incoming, self._incoming = self._incoming, []
            removed = list(self._removed)
            searched = [sample for sample in self._jobs if sample.text is not None]
            finished = await self._call(_advance, stepper, incoming, removed, searched)
            del self._removed[: len(removed)]
            self._tell(self._told)
            self._settle(finished)
            for _ in range(TURNS_BETWEEN_STEPS if finished else 1):
                await asyncio.sleep(0)

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        if self._executor is None:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def _tell(self, jobs: Collection[_Job]) -> None:
        """Pass new tokens to the callers' callbacks. A callback's exception fails only its own request."""
        for job in self._told.intersection(jobs):
            try:
                for index, sample in enumerate(job.samples):
                    news = sample.news(index)
                    if news is not None and job.on_tokens is not None and not job.done.done():
                        job.on_tokens(news)
            except Exception as error:
                self._forget(job.samples)
                self._told.discard(job)
                if not job.done.done():
                    job.done.set_exception(error)

    def _settle(self, finished: Iterable[Sample]) -> None:
        for sample in finished:
            job = self._jobs.pop(sample, None)
            if job is None:
                continue
            job.num_open -= 1
            if not job.num_open and not job.done.done():
                job.done.set_result(None)

    def _forget(self, samples: Sequence[Sample]) -> None:
        """Forget samples without waiters. The stepper drops them before its next step."""
        here = [sample for sample in samples if self._jobs.pop(sample, None) is not None]
        waiting = set(self._incoming)
        self._incoming = [sample for sample in self._incoming if sample not in set(here)]
        self._removed.extend(sample for sample in here if sample not in waiting)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        jobs, self._jobs, self._incoming = set(self._jobs.values()), {}, []
        for job in jobs:
            if not job.done.done():
                failure = _failed(error)
                failure.__cause__ = error
                job.done.set_exception(failure)

    def _on_pump_done(self, pump: "asyncio.Task[None]") -> None:
        if pump.cancelled():  # the event loop is ending
            for job in set(self._jobs.values()):
                job.done.cancel()
            self._forget(list(self._jobs))
            return
        error = pump.exception()
        if isinstance(error, Exception):
            log.error("engine_failed", error=f"{type(error).__name__}: {error}")
            self._fail(error)


def _advance(
    stepper: Stepper, incoming: Sequence[Sample], removed: Sequence[Sample], searched: Sequence[Sample]
) -> list[Sample]:
    """Run one step, and end the samples that contain a stop string."""
    if removed:
        stepper.remove(removed)
    if incoming:
        stepper.admit(incoming)
    finished = stepper.step()
    stopped = [sample for sample in searched if sample.find_stop()]
    running = [sample for sample in stopped if sample.finish_reason is None]
    if running:
        stepper.remove(running)
    for sample in stopped:
        sample.finish_reason = "stop"
    return [*finished, *running]


def _failed(error: Exception) -> EngineError:
    if isinstance(error, NotReadyError):
        return EngineError(str(error))
    return EngineDiedError(f"the engine failed and no longer serves: {type(error).__name__}: {error}. Start a new one.")
