"""The service: sessions, clients, and the order of their requests."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Coroutine, Mapping
from functools import partial

from rl_core.data import Json
from rl_core.errors import (
    CheckpointError,
    DataError,
    EngineDiedError,
    EngineError,
    NotReadyError,
    RLError,
    SettingsError,
    ShapeError,
)
from rl_rollout.engines import GenerateRequest
from rl_rollout.gateway import FaultLog, RefusedError
from rl_service.backend import BASE, EngineBackend, LearnerBackend
from rl_service.checkpoints import Checkpoints, split_path
from rl_service.clients import Clients, Sampling, TrainingClient, sampling_id, training_id
from rl_service.futures import Answer, Futures
from rl_service.losses import ForwardBackward
from rl_service.records import ClientRecord
from rl_service.requests import (
    CancelFuture,
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    FinishSession,
    Heartbeat,
    LoadWeights,
    OfModel,
    OptimStep,
    Sample,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    Unreadable,
)
from rl_service.sampling import EngineSlots, Sampler, Share, Weights
from rl_service.scheduling import Turns, Work
from rl_service.settings import ServiceSettings
from rl_service.training import TrainingRequest, TrainingRequests
from rl_service.wire import PROTOBUF, write_samples

Body = dict[str, Json]
OF_CLIENT = (RefusedError, SettingsError, ShapeError, DataError, CheckpointError, NotReadyError, EngineError)
"""Errors that a client's request caused."""
OF_SERVER = (EngineDiedError,)
STOPPED = "run_stopped"
"""Event of a client that nobody finished."""
NO_HEAD = "Adapters have no matrices in the output layer: train_unembed has no effect."


class TrainingService:
    """Serves the requests of all clients.

    Attributes:
        clients: Sessions and clients.
        checkpoints: Saved weights.
        futures: Results.
        sampler: Answers sampling requests, once started.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        """Read the service's folder; `start` loads the models.

        Raises:
            DataError: The folder is damaged.
            SettingsError: The policy cannot be trained, or there is no such engine.
        """
        self._settings, self._limits = settings, settings.limits
        self._models = settings.server.folder / "models"
        self._models.mkdir(parents=True, exist_ok=True)
        self.clients = Clients(settings.server.folder)
        self.checkpoints = Checkpoints(settings.server.folder / "checkpoints")
        self.futures = Futures(kept_s=self._limits.kept_results_s, kept_bytes=self._limits.kept_results_bytes)
        self._learner = LearnerBackend(settings)
        self._engine = EngineBackend(settings, self._learner)
        self._training = TrainingRequests(settings, self._learner, self.clients, self.checkpoints)
        slots = EngineSlots(self._serve, self._engine.adapters)
        self.sampler = Sampler(self._engine.engine, slots, max_samples=self._limits.max_samples)
        self._turns, self._faults = Turns(self._limits), FaultLog()
        self._sampling: defaultdict[str, dict[str, asyncio.Task[None]]] = defaultdict(dict)
        most = settings.vllm.max_num_seqs * settings.engine.replicas
        self._shares: defaultdict[str, Share] = defaultdict(partial(Share, most))
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the models and begin to work; see the backends."""
        await self._learner.start(self._models)
        await self._engine.start(self._models / BASE)
        self._begin(self._work())

    def stop(self) -> int:
        """Answer clients that wait: training clients with what is lost, others that they may ask again.

        Returns:
            How many results they waited for.
        """
        self.clients.lose_all("the server was stopped")
        return self.futures.forget_open()

    async def close(self) -> None:
        """Stop; a running request of the learner finishes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engine.engine.close()
        await self._learner.call(self._training.close)
        await self._learner.close()
        self.clients.close()

    @property
    def has_engine(self) -> bool:
        """False once every engine has died for the last time."""
        return any(load.state != "dead" for load in self._engine.engine.loads())

    async def tick(self) -> None:
        """Drop what has expired. Call it about once a second."""
        self.futures.sweep()
        await asyncio.to_thread(self.checkpoints.sweep, kept_snapshots=self._limits.kept_snapshots)
        last = time.monotonic() - self._limits.lapse_s
        for session_id, seen in list(self.clients.seen.items()):
            if seen < last and session_id not in self.clients.ended:
                self._end(session_id, f"it gave no sign of life for {self._limits.lapse_s:g} s", event=STOPPED)

    def create_session(self, request: CreateSession) -> Body:
        """Open a session."""
        if self.clients.num_open >= self._limits.max_sessions:
            most = f"limits.max_sessions = {self._limits.max_sessions}"
            raise RefusedError(f"there are {most} open already. Finish some.", kind="rate_limit_error")
        session = self.clients.open_session(user_metadata=request.user_metadata, display_name=request.display_name)
        return {"session_id": session.session_id, "info_message": NO_HEAD}

    def heartbeat(self, request: Heartbeat) -> Body:
        """Note a sign of life."""
        self.clients.live_session(request.session_id)
        return {}

    def finish_session(self, session_id: str, request: FinishSession) -> Body:
        """End a session and free its training clients; what it saved stays."""
        self.clients.live_session(session_id)
        reason = str(request.reason.get("type", "done"))[:40]
        event = "run_failed" if reason == "errored" else "run_finished"
        self._end(session_id, f"its client finished it ({reason})", event=event)
        return {}

    def create_model(self, request: CreateModel | LoadWeights) -> Body:
        """Create a training client; its result has the id."""
        session_id, number = request.session_id, request.model_seq_id
        if session_id is None or number is None or number < 0:
            raise RefusedError("session_id and model_seq_id, from 0, are required.", param="session_id")
        self.clients.live_session(session_id)
        client = self.clients.training.get(training_id(session_id, number))
        if client is None:
            num_live = sum(one.lost is None for one in self.clients.training.values())
            if num_live >= self._limits.max_training_clients:
                told = f"there are limits.max_training_clients = {num_live} already. Finish a session."
                raise RefusedError(told, kind="rate_limit_error")
            base, rank = request.base_model or "", self._settings.lora.max_rank
            client = self.clients.open_training(
                session_id, number, base_model=base, rank=rank, user_metadata=request.user_metadata
            )
            self._turns.open(client.model_id, next_seq_id=0)
        return self._submit(client, 0, request)

    def load_weights(self, request: LoadWeights) -> Body:
        """Load saved weights into a training client, or into a new one."""
        if request.model_id is None:
            return self.create_model(request)
        return self._submit(self.clients.trains(request.model_id), request.seq_id, request)

    def train(
        self,
        request: ForwardBackward | OptimStep | SaveWeights | SaveWeightsForSampler | SaveWeightsExternal | Unreadable,
        *,
        num_bytes: int = 0,
    ) -> Body:
        """Let a request of a training client wait for its turn."""
        return self._submit(self.clients.trains(request.model_id), request.seq_id, request, num_bytes=num_bytes)

    def get_info(self, request: OfModel) -> Body:
        """Return what a training client trains."""
        entry, policy = self.clients.trains(request.model_id).entry, self._settings.policy
        return {
            "model_id": entry.model_id,
            "model_data": {
                "model_name": entry.base_model,
                "tokenizer_id": policy.tokenizer or str(policy.path.absolute()),
            },
            "is_lora": entry.rank > 0,
            "lora_rank": entry.rank or None,
            "model_name": entry.base_model,
        }

    def create_sampling_session(self, request: CreateSamplingSession) -> Body:
        """Create a sampling client of saved weights or of the base model."""
        self.clients.live_session(request.session_id)
        base, path = request.base_model or "", request.model_path
        if path is not None:
            saved = self.checkpoints.find(path)
            if saved.segment != "sampler_weights":
                raise RefusedError(f"{path} is not for sampling; use one of save_weights_for_sampler.", param="path")
            base = base or saved.base_model
        self._training.check_name(base)
        sampler_id = sampling_id(request.session_id, request.sampling_session_seq_id)
        self.clients.open_sampling(
            Sampling(sampler_id=sampler_id, session_id=request.session_id, base_model=base, path=path)
        )
        return {"sampling_session_id": sampler_id}

    def sample(self, request: Sample) -> Body:
        """Sample, or score a prompt; the result is a future."""
        sampler_id, most = request.sampling_session_id, self._limits.max_waiting
        client = self.clients.sampler(sampler_id)
        self.clients.live_session(client.session_id)
        request_id = f"{sampler_id}:{request.seq_id}"
        if not self.futures.knows(request_id):
            asked = self.sampler.checked(request)
            if len(self._sampling[sampler_id]) >= most:
                raise RefusedError(f"{sampler_id} has limits.max_waiting = {most} requests.", kind="rate_limit_error")
            self.futures.open(request_id)
            self._sampling[sampler_id][request_id] = self._begin(self._sample(client, request, asked, request_id))
        ids: list[Json] = [f"{request_id}:{index}" for index in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def cancel(self, request: CancelFuture) -> Body:
        """End a sampling request whose result is no longer needed."""
        request_id = request.request_id
        running = self._sampling.get(request_id.rpartition(":")[0], {})
        if request_id in running:
            self._abort({request_id: running.pop(request_id)}, "its client cancelled it")
        return {}

    def unknown_result(self, request_id: str) -> Answer | None:
        """Return the failure of a request without result, or None if its client may send it again.

        Raises:
            RefusedError: Nobody sent such a request.
        """
        owner = request_id.rpartition(":")[0]
        if owner in self.clients.sampling:
            return None
        client = self.clients.trains(owner)
        told = self._lost(client) if client.lost else "its result was dropped; see limits.kept_results_bytes."
        return Answer.failed(str(told), "server")

    def _submit(
        self, client: TrainingClient, seq_id: int | None, request: TrainingRequest, *, num_bytes: int = 0
    ) -> Body:
        """Let a request wait for its turn, unless it does already: a client that lost the response asks again."""
        if seq_id is None:
            raise RefusedError("seq_id is required.", param="seq_id")
        owner = client.model_id
        request_id = f"{owner}:{seq_id}"
        if not self.futures.knows(request_id):
            if client.lost is not None:
                raise self._lost(client)
            num_tokens = request.num_tokens if isinstance(request, ForwardBackward) else 0
            self._turns.check_room(owner, seq_id=seq_id, num_tokens=num_tokens, num_bytes=num_bytes)
            run = partial(self._training.run, client, request, arrived_at=time.monotonic())
            size = {"num_tokens": num_tokens, "num_bytes": num_bytes}
            self._turns.put(Work(owner=owner, seq_id=seq_id, request_id=request_id, run=run, **size))
            self.futures.open(request_id)
        return {"request_id": request_id, "model_id": owner}

    async def _work(self) -> None:
        while True:
            work = await self._turns.next()
            try:
                answer = await self._learner.call(work.run)
            except Exception as error:
                answer = self._failure(error)
            self.futures.settle(work.request_id, answer)

    async def _sample(self, client: Sampling, request: Sample, asked: GenerateRequest, request_id: str) -> None:
        path = self._training.inflight.get(client.follows or "", client.path)
        record = self._record_of(path)
        try:
            weights = Weights(BASE) if path is None else Weights(path, self.checkpoints.find(path).saved_at)
            async with self._shares[client.session_id].of(request.num_samples):
                samples, logprobs, top = await self.sampler.sample(weights, request, asked, request_id=request_id)
            answer = Answer(content=write_samples(samples, logprobs, top), media_type=PROTOBUF)
            if record is not None and logprobs is None:  # not to score a prompt
                record.sampled(samples, num_prompt=len(asked.input_ids))
        except Exception as error:
            answer = self._failure(error)
            if record is not None:
                record.failed(error)
        finally:
            self._sampling[client.sampler_id].pop(request_id, None)
        self.futures.settle(request_id, answer)

    def _abort(self, requests: Mapping[str, "asyncio.Task[None]"], why: str) -> None:
        """End sampling requests that wait or run."""
        for request_id, task in requests.items():
            self.futures.settle(request_id, Answer.failed(f"the request was aborted: {why}.", "user"))
            task.cancel()
        self._begin(self._engine.engine.abort(set(requests)))

    async def _serve(self, weights: Weights, adapter: str | None) -> int:
        path = weights.path
        folder = self._models / BASE if path == BASE else self.checkpoints.folder_of(path)
        report = await self._engine.serve(folder, adapter)
        if (record := self._record_of(path)) is not None:
            record.published(report)
        return report.version

    def _record_of(self, path: str | None) -> ClientRecord | None:
        """Return the record of the training client that saved some weights, if its own are in memory."""
        return None if path in (None, BASE) else self._training.records.get(split_path(path)[0])

    def _failure(self, error: Exception) -> Answer:
        if isinstance(error, OF_CLIENT) and not isinstance(error, OF_SERVER):
            return Answer.failed(str(error), "user")
        self._faults.note("service_request_failed", error)
        told = str(error) if isinstance(error, RLError) else "the service failed; its log has the reason."
        return Answer.failed(told, "server")

    def _end(self, session_id: str, why: str, *, event: str) -> None:
        self.clients.end(session_id, why)
        self.futures.release(f"{session_id}:")
        self._shares.pop(session_id, None)
        for sampler_id in [one for one in self._sampling if self.clients.sampling[one].session_id == session_id]:
            self._abort(self._sampling.pop(sampler_id), f"its session has ended, because {why}")
        for client in self.clients.of_session(session_id):
            self._begin(self._unload(client, why, event=event))

    async def _unload(self, client: TrainingClient, why: str, *, event: str) -> None:
        """Free a client's weights, saved if nobody finished it; its waiting requests fail."""
        client.lost = f"its session has ended: {why}"
        unrun = self._turns.close(client.model_id)
        if event == STOPPED:
            try:
                await self._learner.call(partial(self._training.save_state, client, "lapsed"))
            except Exception as error:
                self._faults.note("service_lapsed_client_not_saved", error)
                client.lost += f". It could not be saved: {str(error).rstrip('.')}"
        self.clients.end(client.model_id, client.lost)
        await self._learner.call(partial(self._training.end, client, event))
        for work in unrun:
            self.futures.settle(work.request_id, Answer.failed(str(self._lost(client)), "user"))

    def _lost(self, client: TrainingClient) -> RefusedError:
        saved = self.checkpoints.newest(client.model_id)
        where = (
            "It saved no state." if saved is None else f"Its last saved state is {saved.path}, of step {saved.step}."
        )
        return RefusedError(f"the weights of {client.model_id} are no longer in memory: {client.lost}. {where}")

    def _begin(self, job: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(job)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._faults.note("service_task_failed", error)
