"""The service: what each request of a client does, and when."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from rl_core.data import Json
from rl_core.errors import CheckpointError, DataError, EngineDiedError, EngineError, RLError, SettingsError, ShapeError
from rl_distill import AdamOptions
from rl_distill.objectives import tinker_objective
from rl_rollout.engines import GenerateRequest
from rl_rollout.gateway.refusals import FaultLog, RefusedError, refused_field
from rl_service.backend import BASE, Backends
from rl_service.checkpoints import Checkpoints, Saved, Segment, expiry, weights_path
from rl_service.clients import Clients, Sampling, TrainingClient, sampling_id, training_id
from rl_service.futures import Answer, Futures
from rl_service.losses import ForwardBackward, batch_of, loss_of, target_logprobs
from rl_service.requests import (
    CancelFuture,
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    FinishSession,
    Heartbeat,
    LoadWeights,
    LoraConfig,
    OfModel,
    OptimizerConfig,
    OptimStep,
    Ordered,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
)
from rl_service.sampling import EngineTurns, Sampler
from rl_service.scheduling import Turns, Work
from rl_service.settings import ServiceSettings
from rl_service.wire import PROTOBUF, write_forward_backward, write_samples

log = structlog.get_logger(__name__)
Opened = dict[str, Json]
OF_CLIENT = (RefusedError, SettingsError, ShapeError, DataError, CheckpointError)
"""Errors that a client's request caused."""
NO_HEAD = "Adapters have no matrices in the output layer: train_unembed has no effect."


class TrainingService:
    """Serves the requests of all clients.

    Attributes:
        clients: Sessions and clients.
        checkpoints: Saved weights.
        futures: Results.
        sampler: Answers sampling requests, once started.
    """

    def __init__(self, settings: ServiceSettings, backends: Backends) -> None:
        """Read the service's folder; `start` loads the models.

        Raises:
            DataError: The folder is damaged.
        """
        self._settings, self._backends, self._limits = settings, backends, settings.limits
        self._folder = settings.server.folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self.clients = Clients(self._folder)
        self.checkpoints = Checkpoints(self._folder / "checkpoints")
        self.futures = Futures(kept_s=self._limits.kept_results_s, kept_bytes=self._limits.kept_results_bytes)
        self._turns = Turns(self._limits)
        self._faults = FaultLog()
        self._sampling: Counter[str] = Counter()
        self._inflight: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._engine_turns = EngineTurns(self._serve)
        self.sampler = Sampler(backends.engine.engine, self._engine_turns, max_samples=self._limits.max_samples)

    async def start(self) -> None:
        """Load the models and begin to work."""
        (self._folder / "models").mkdir(exist_ok=True)
        await self._backends.start(self._folder / "models")
        self._begin(self._work())

    async def close(self) -> None:
        """Stop; a running request of the learner finishes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._backends.close()
        self.clients.close()

    async def tick(self) -> None:
        """Drop what has expired. Call it about once a second."""
        self.futures.sweep()
        now = time.monotonic()
        for session_id, seen in list(self.clients.seen.items()):
            if now - seen > self._limits.lapse_s and session_id not in self.clients.ended:
                self.clients.end(session_id, f"it gave no sign of life for {self._limits.lapse_s:g} s")
                for client in self.clients.of_session(session_id):
                    self._begin(self._unload(client, saves_as="lapsed"))

    # Sessions and clients

    def create_session(self, request: CreateSession) -> Opened:
        """Open a session."""
        session = self.clients.open_session(user_metadata=request.user_metadata, display_name=request.display_name)
        return {"session_id": session.session_id, "info_message": NO_HEAD, "type": "create_session"}

    def heartbeat(self, request: Heartbeat) -> Opened:
        """Note a sign of life."""
        self.clients.live_session(request.session_id)
        return {"type": "session_heartbeat"}

    def finish_session(self, session_id: str, request: FinishSession) -> Opened:
        """End a session and free its training clients; what it saved stays."""
        self.clients.live_session(session_id)
        self.clients.end(session_id, f"its client finished it ({str(request.reason.get('type', 'done'))[:40]})")
        for client in self.clients.of_session(session_id):
            self._begin(self._unload(client, saves_as=None))
        return {}

    def create_model(self, request: CreateModel) -> Opened:
        """Create a training client; its result has the id."""
        self.clients.live_session(request.session_id)
        model_id = training_id(request.session_id, request.model_seq_id)

        def create(client: TrainingClient) -> Answer:
            self._check_new(request.base_model, request.optimizer_config)
            client.entry.rank = self._backends.learner.create(client.model_id, request.lora_config)
            return Answer.of(model_id=client.model_id, type="create_model")

        return self._open_training(model_id, request, create)

    def load_weights(self, request: LoadWeights) -> Opened:
        """Load saved weights into a training client, or into a new one."""
        if request.model_id is not None:
            client = self.clients.trains(request.model_id)
            return self._submit(client, _required(request.seq_id, "seq_id"), partial(self._load, client, request))
        session_id = _required(request.session_id, "session_id")
        self.clients.live_session(session_id)
        model_id = training_id(session_id, _required(request.model_seq_id, "model_seq_id"))

        def create(client: TrainingClient) -> Answer:
            saved = self.checkpoints.find(request.path)
            self._check_new(request.base_model or saved.base_model, request.optimizer_config or OptimizerConfig())
            client.entry.base_model = request.base_model or saved.base_model
            client.entry.rank = self._backends.learner.create(client.model_id, self._adapter_of(saved))
            return self._load(client, request)

        return self._open_training(model_id, request, create)

    def get_info(self, request: OfModel) -> Opened:
        """Return what a training client trains."""
        entry = self.clients.trains(request.model_id).entry
        policy = self._settings.policy
        tokenizer = policy.tokenizer or str(policy.path.absolute())
        return {
            "type": "get_info",
            "model_id": entry.model_id,
            "model_data": {"model_name": entry.base_model, "tokenizer_id": tokenizer},
            "is_lora": entry.rank > 0,
            "lora_rank": entry.rank or None,
            "model_name": entry.base_model,
        }

    def create_sampling_session(self, request: CreateSamplingSession) -> Opened:
        """Create a sampling client of saved weights or of the base model."""
        self.clients.live_session(request.session_id)
        base = request.base_model
        if request.model_path is not None:
            saved = self._sampler_weights(request.model_path)
            base = base or saved.base_model
        self._check_name(_required(base, "base_model"))
        if len(self.clients.sampling) >= self._limits.max_sampling_clients:
            raise RefusedError(f"there are limits.max_sampling_clients = {self._limits.max_sampling_clients} already.")
        sampler_id = sampling_id(request.session_id, request.sampling_session_seq_id)
        entry = Sampling(sampler_id=sampler_id, session_id=request.session_id, base_model=str(base))
        entry.path = request.model_path
        self.clients.open_sampling(entry)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    # Requests of training clients

    def forward_backward(self, request: ForwardBackward, *, num_bytes: int) -> Opened:
        """Compute losses and gradients."""
        client = self.clients.trains(request.model_id)
        run = partial(self._forward_backward, client, request)
        return self._submit(client, request.seq_id, run, num_tokens=request.num_tokens, num_bytes=num_bytes)

    def optim_step(self, request: OptimStep) -> Opened:
        """Take an optimizer step."""
        return self._ordered(request, self._optim_step)

    def save_weights(self, request: SaveWeights) -> Opened:
        """Save weights and optimizer."""
        return self._ordered(request, self._save_weights)

    def save_weights_for_sampler(self, request: SaveWeightsForSampler) -> Opened:
        """Save weights to sample from."""
        return self._ordered(request, self._save_for_sampler)

    def _ordered(self, request: Ordered, run: Callable[[TrainingClient, Any], Answer]) -> Opened:
        client = self.clients.trains(request.model_id)
        return self._submit(client, request.seq_id, partial(run, client, request))

    def _submit(
        self,
        client: TrainingClient,
        seq_id: int,
        run: Callable[[], Answer],
        *,
        num_tokens: int = 0,
        num_bytes: int = 0,
    ) -> Opened:
        """Let a request wait for its turn, unless it does already; a client that lost the response asks again."""
        request_id = f"{client.model_id}:{seq_id}"
        if not self.futures.knows(request_id):
            if client.lost is not None:
                raise self._lost(client)
            self._turns.check_room(client.model_id, num_tokens=num_tokens, num_bytes=num_bytes)
            owner = client.model_id
            work = Work(
                owner=owner, seq_id=seq_id, request_id=request_id, run=run, num_tokens=num_tokens, num_bytes=num_bytes
            )
            self._turns.put(work)
            self.futures.open(request_id)
        return {"request_id": request_id, "model_id": client.model_id}

    def _open_training(
        self, model_id: str, request: CreateModel | LoadWeights, create: Callable[[TrainingClient], Answer]
    ) -> Opened:
        client = self.clients.training.get(model_id)
        if client is None:
            num_live = sum(one.lost is None for one in self.clients.training.values())
            if num_live >= self._limits.max_training_clients:
                raise RefusedError(f"there are limits.max_training_clients = {num_live} already. Finish a session.")
            client = self.clients.open_training(
                *(_required(request.session_id, "session_id"), _required(request.model_seq_id, "model_seq_id")),
                base_model=request.base_model or "",
                rank=self._settings.lora.max_rank,
                user_metadata=request.user_metadata,
            )
            self._turns.open(model_id, next_seq_id=0)
        return self._submit(client, 0, partial(self._created, client, create))

    def _created(self, client: TrainingClient, create: Callable[[TrainingClient], Answer]) -> Answer:
        try:
            return create(client)
        except BaseException as error:
            self.clients.end(client.model_id, f"it could not be created: {error}")
            self._backends.learner.forget(client.model_id)
            raise

    # What runs on the learner's thread

    def _forward_backward(self, client: TrainingClient, request: ForwardBackward) -> Answer:
        learner = self._backends.learner
        try:
            if request.problem is not None:
                raise request.problem
            if request.num_tokens > self._limits.max_request_tokens:
                most = self._limits.max_request_tokens
                raise refused_field(
                    "data", f"{request.num_tokens} tokens", f"at most limits.max_request_tokens = {most}"
                )
            objective = tinker_objective(request.loss, request.options)
            batch = batch_of(request, vocab_size=learner.vocab_size, max_tokens=learner.max_tokens)
            if request.forward_only:
                logprobs = learner.logprobs(client.model_id, batch)
                loss = loss_of(objective, batch, logprobs)
            else:
                result = learner.forward_backward(client.model_id, batch, objective)
                logprobs, loss = result.tokens["policy_logprobs"], result.loss
        except Exception as error:
            if not request.forward_only:
                client.broken = f"forward_backward {request.seq_id} failed: {error}"
            raise
        return Answer(
            content=write_forward_backward(target_logprobs(logprobs), {"loss:sum": loss}), media_type=PROTOBUF
        )

    def _optim_step(self, client: TrainingClient, request: OptimStep) -> Answer:
        learner = self._backends.learner
        broken, client.broken = client.broken, None
        if broken is not None:
            learner.drop_gradients(client.model_id)
            raise RefusedError(f"the step was not taken and its gradients are dropped, because {broken}")
        if request.adam_params is None:
            kind = (request.optimizer_params or {}).get("type")
            raise refused_field("optim_params", kind, "those of Adam, the optimizer of this service")
        given = request.adam_params
        options = AdamOptions(
            learning_rate=given.learning_rate,
            betas=(given.beta1, given.beta2),
            eps=given.eps,
            weight_decay=given.weight_decay,
            clip_grad=max(given.grad_clip_norm, 0.0),
        )
        result = learner.optim_step(client.model_id, options)
        if not result.is_applied:
            raise RefusedError("the step was not taken, because the loss or the gradient norm is not finite.")
        self.clients.stepped(client, result.step)
        metrics: dict[str, Json] = {"step": result.step, "grad_norm": result.grad_norm}
        return Answer.of(metrics=metrics)

    def _save_weights(self, client: TrainingClient, request: SaveWeights) -> Answer:
        path = weights_path(client.model_id, "weights", request.path or f"step-{client.step}")
        self.checkpoints.check_free(path, overwrite=request.overwrite)
        saved = self._record(client, path, request.user_metadata, request.ttl_seconds)
        self.checkpoints.save(saved, partial(self._backends.learner.save, client.model_id))
        return Answer.of(path=path, type="save_weights")

    def _save_for_sampler(self, client: TrainingClient, request: SaveWeightsForSampler) -> Answer:
        is_snapshot = request.path is None
        segment: Segment = "sampler_weights"
        path = weights_path(client.model_id, segment, request.path or f"snapshot-{request.seq_id}")
        self.checkpoints.check_free(path, overwrite=False)
        saved = self._record(client, path, request.user_metadata, request.ttl_seconds, is_snapshot=is_snapshot)
        self.checkpoints.save(saved, partial(self._backends.learner.save_sampler, client.model_id))
        if not is_snapshot:
            return Answer.of(path=path, type="save_weights_for_sampler")
        follows = client.model_id if request.kind == "inflight" else None
        if follows is not None:
            self._inflight[follows] = path
        entry = client.entry
        number = _required(request.sampling_session_seq_id, "sampling_session_seq_id")
        sampling = Sampling(
            sampler_id=sampling_id(entry.session_id, number),
            session_id=entry.session_id,
            base_model=entry.base_model,
            path=path,
            follows=follows,
        )
        self.clients.open_sampling(sampling)
        self.checkpoints.sweep(kept_snapshots=self._limits.kept_snapshots)
        return Answer.of(sampling_session_id=sampling.sampler_id, type="save_weights_for_sampler")

    def _load(self, client: TrainingClient, request: LoadWeights) -> Answer:
        saved = self.checkpoints.find(request.path)
        if saved.segment != "weights":
            raise RefusedError(
                f"{request.path} has no state to train from; load one that save_state wrote.", param="path"
            )
        folder = self.checkpoints.folder_of(request.path)
        self._backends.learner.load(client.model_id, folder, with_optimizer=request.optimizer)
        client.broken = None
        self.clients.stepped(client, saved.step if request.optimizer else 0)
        return Answer.of(path=request.path, model_id=client.model_id, type="load_weights")

    # Sampling

    def sample(self, request: Sample) -> Opened:
        """Sample, or score a prompt; the result is a future."""
        sampler_id = _required(request.sampling_session_id, "sampling_session_id")
        client = self.clients.sampling.get(sampler_id)
        if client is None:
            raise RefusedError(f"there is no sampling client {sampler_id[:120]!r}.", kind="not_found_error")
        self.clients.live_session(client.session_id)
        request_id = f"{sampler_id}:{_required(request.seq_id, 'seq_id')}"
        if not self.futures.knows(request_id):
            asked = self.sampler.checked(request)
            if self._sampling[sampler_id] >= self._limits.max_waiting:
                most = self._limits.max_waiting
                raise RefusedError(f"{sampler_id} has limits.max_waiting = {most} requests.", kind="rate_limit_error")
            self.futures.open(request_id)
            self._sampling[sampler_id] += 1
            self._begin(self._sample(client, request, asked, request_id))
        ids: list[Json] = [f"{request_id}:{index}" for index in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def cancel(self, request: CancelFuture) -> Opened:
        """End a sampling request whose result is no longer needed."""
        if self.futures.is_open(request.request_id):
            await self._backends.engine.engine.abort({request.request_id})
        return {}

    async def _sample(self, client: Sampling, request: Sample, asked: GenerateRequest, request_id: str) -> None:
        path = self._inflight.get(client.follows or "", client.path)
        try:
            samples, logprobs, top = await self.sampler.sample(path or BASE, request, asked, request_id=request_id)
            answer = Answer(content=write_samples(samples, logprobs, top), media_type=PROTOBUF)
        except Exception as error:
            answer = self._failure(error)
        finally:
            self._sampling[client.sampler_id] -= 1
        self.futures.settle(request_id, answer)

    async def _serve(self, path: str) -> int:
        folder = self._folder / "models" / BASE if path == BASE else self.checkpoints.folder_of(path)
        return await self._backends.engine.serve(folder)

    # The rest

    async def _work(self) -> None:
        while True:
            work = await self._turns.next()
            try:
                answer = await self._backends.learner.call(work.run)
            except Exception as error:
                answer = self._failure(error)
            self.futures.settle(work.request_id, answer)

    def _failure(self, error: Exception) -> Answer:
        is_of_client = isinstance(error, OF_CLIENT) or (
            isinstance(error, EngineError) and not isinstance(error, EngineDiedError)
        )
        if is_of_client:
            return Answer.failed(str(error), "user")
        self._faults.note("service_request_failed", error)
        told = str(error) if isinstance(error, RLError) else "the service failed; its log has the reason."
        return Answer.failed(told, "server")

    async def _unload(self, client: TrainingClient, *, saves_as: str | None) -> None:
        unrun, why = self._turns.close(client.model_id), "its session has ended"
        if saves_as is not None:
            path = weights_path(client.model_id, "weights", saves_as)
            record = self._record(client, path, None, None)
            save = partial(self.checkpoints.save, record, partial(self._backends.learner.save, client.model_id))
            await self._backends.learner.call(partial(self._backends.learner.drop_gradients, client.model_id))
            await self._backends.learner.call(save)
            why = f"its session gave no sign of life; its state is saved as {path}"
        self.clients.end(client.model_id, why)
        await self._backends.learner.call(partial(self._backends.learner.forget, client.model_id))
        for work in unrun:
            self.futures.settle(work.request_id, Answer.failed(str(self._lost(client)), "user"))

    def _lost(self, client: TrainingClient) -> RefusedError:
        saved = self.checkpoints.newest(client.model_id)
        where = (
            "It saved no state." if saved is None else f"Its last saved state is {saved.path}, of step {saved.step}."
        )
        return RefusedError(
            f"the weights of training client {client.model_id} are no longer in memory: {client.lost}. {where}"
        )

    def unknown_result(self, request_id: str) -> Answer | None:
        """Return the failure of a request without result, or None if its client may send it again."""
        owner = request_id.rpartition(":")[0]
        if owner in self.clients.sampling:
            return None
        client = self.clients.training.get(owner)
        if client is None:
            raise RefusedError(f"there is no request {request_id[:120]!r}.", kind="not_found_error")
        told = self._lost(client) if client.lost else "its result was dropped; see limits.kept_results_bytes."
        return Answer.failed(str(told), "server")

    def _record(
        self,
        client: TrainingClient,
        path: str,
        user_metadata: dict[str, str] | None,
        ttl_s: int | None,
        *,
        is_snapshot: bool = False,
    ) -> Saved:
        return Saved(
            path=path,
            base_model=client.entry.base_model,
            rank=client.entry.rank,
            step=client.step,
            saved_at=time.time(),
            user_metadata=user_metadata,
            expires_at=expiry(ttl_s),
            is_snapshot=is_snapshot,
        )

    def _sampler_weights(self, path: str) -> Saved:
        saved = self.checkpoints.find(path)
        if saved.segment != "sampler_weights":
            raise RefusedError(
                f"{path} is not for sampling; use one that save_weights_for_sampler wrote.", param="path"
            )
        return saved

    def _adapter_of(self, saved: Saved) -> LoraConfig:
        return LoraConfig(rank=saved.rank)

    def _check_new(self, base_model: str, optimizer: OptimizerConfig) -> None:
        self._check_name(base_model)
        if optimizer.type not in (None, "adamw"):
            raise refused_field("optimizer_config.type", optimizer.type, '"adamw", the optimizer of this service')

    def _check_name(self, base_model: str) -> None:
        known = self._settings.policy.all_names
        if base_model not in known:
            names = ", ".join(known)
            raise RefusedError(f"base_model must be one of {names}; found {base_model[:120]!r}.", param="base_model")

    def _begin(self, job: Any) -> None:
        task = asyncio.ensure_future(job)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and isinstance(error, Exception):
            self._faults.note("service_task_failed", error)


def _required(value: Any, name: str) -> Any:
    if value is None:
        raise RefusedError(f"{name} is required.", param=name)
    return value
