"""What the requests of training clients do. All of it runs on the learner's thread."""

import time
from functools import partial
from pathlib import Path

from rl_core.errors import SettingsError
from rl_distill import AdamOptions
from rl_distill.objectives import tinker_objective
from rl_rollout.gateway import RefusedError, refused_field
from rl_service.backend import LearnerBackend
from rl_service.checkpoints import Checkpoints, Saved, expiry, weights_path
from rl_service.clients import Clients, Sampling, TrainingClient, sampling_id
from rl_service.encryption import encrypt_files
from rl_service.futures import Answer
from rl_service.losses import ForwardBackward, batch_of, loss_of, target_logprobs
from rl_service.records import ClientRecord
from rl_service.requests import (
    AdamParams,
    CreateModel,
    LoadWeights,
    LoraConfig,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    Unreadable,
)
from rl_service.settings import ServiceSettings
from rl_service.wire import PROTOBUF, write_forward_backward

Save = SaveWeights | SaveWeightsForSampler | SaveWeightsExternal
TrainingRequest = CreateModel | LoadWeights | ForwardBackward | OptimStep | Save | Unreadable
UNJUDGED = ["grad_norm", "grad_jump", "policy_loss", "loss_jump", "step_time_jump"]
"""Health rules of trainers that do not hold here: sums over tokens grow with the batch, which may change at each step,
and the time between steps is the client's own."""


class TrainingRequests:
    """Runs the requests of training clients.

    Attributes:
        inflight: The newest weights that each training client published for all its in-flight sampling clients.
        records: The record of each training client whose weights are in memory.
    """

    def __init__(
        self, settings: ServiceSettings, learner: LearnerBackend, clients: Clients, checkpoints: Checkpoints
    ) -> None:
        """Use a learner, and what the service knows of its clients."""
        self._settings, self._learner, self._clients, self._checkpoints = settings, learner, clients, checkpoints
        self.inflight = {one.follows: one.path for one in clients.sampling.values() if one.follows and one.path}
        self.records: dict[str, ClientRecord] = {}
        self._adapters: dict[str, LoraConfig] = {}

    def run(self, client: TrainingClient, request: TrainingRequest, *, arrived_at: float) -> Answer:
        """Run a request.

        Args:
            client: Its client.
            request: The request.
            arrived_at: When it arrived, by the monotonic clock.

        Raises:
            RLError: It cannot run.
        """
        record = self.records.get(client.model_id)
        match request:
            case CreateModel() | LoadWeights(model_id=None):
                return self._begin(client, request)
            case _ if record is None:
                raise SettingsError(f"{client.model_id} has no weights in memory.")
        record.note({"timing_s/turns": time.monotonic() - arrived_at})
        try:
            match request:
                case ForwardBackward():
                    return self._forward_backward(client, request)
                case OptimStep():
                    return self._optim_step(client, request)
                case SaveWeights():
                    return self._save(client, request)
                case SaveWeightsForSampler():
                    return self._save_for_sampler(client, request)
                case SaveWeightsExternal():
                    return self._save_external(client, request)
                case LoadWeights():
                    return self._load(client, request)
                case Unreadable():
                    raise request.problem
        except Exception as error:
            record.failed(error)
            raise

    def _begin(self, client: TrainingClient, request: CreateModel | LoadWeights) -> Answer:
        try:
            answer = self._create(client, request)
            self.records[client.model_id] = self._record_for(client)
        except BaseException as error:
            self._clients.end(client.model_id, f"it could not be created: {error}")
            self._learner.forget(client.model_id)
            self._adapters.pop(client.model_id, None)
            raise
        return answer

    def _record_for(self, client: TrainingClient) -> ClientRecord:
        entry, settings = client.entry, self._settings
        policy, lora = settings.policy, {"rank": entry.rank, "alpha": settings.lora.alpha}
        of_client = {"model_id": entry.model_id, "base_model": entry.base_model, "opened_at": entry.opened_at}
        shown = {"policy": {"path": str(policy.path)}, "lora": lora, "client": of_client, "health": {"off": UNJUDGED}}
        folder = settings.server.folder / "clients" / client.model_id.replace(":", "_")
        return ClientRecord(folder, shown, step=client.step)

    def end(self, client: TrainingClient, event: str) -> None:
        """Free a client's weights, and end its record with an event of a run."""
        self._learner.forget(client.model_id)
        self._adapters.pop(client.model_id, None)
        if client.model_id in self.records:
            self.records.pop(client.model_id).close(event, client.lost)

    def close(self) -> None:
        """End all records, because the server stops."""
        for record in self.records.values():
            record.close("run_stopped", "the server was stopped")

    def save_state(self, client: TrainingClient, name: str) -> str:
        """Save a client's weights and optimizer, without gradients that wait, and return their path."""
        request = SaveWeights(model_id=client.model_id, seq_id=0, path=name, overwrite=True)
        self._save(client, request)
        return weights_path(client.model_id, "weights", name)

    def check_name(self, base_model: str) -> None:
        """Check that a name is one of the policy's.

        Raises:
            RefusedError: It is another model's.
        """
        known = self._settings.policy.all_names
        if base_model not in known:
            message = f"base_model must be one of {', '.join(known)}; found {base_model[:120]!r}."
            raise RefusedError(message, param="base_model")

    def _create(self, client: TrainingClient, request: CreateModel | LoadWeights) -> Answer:
        """Create the weights of a new client, from saved ones if it asks for them."""
        lora = request.lora_config if isinstance(request, CreateModel) else None
        if isinstance(request, LoadWeights):
            saved = self._checkpoints.find(request.path)
            client.entry.base_model = request.base_model or saved.base_model
            lora = LoraConfig(rank=saved.rank, train_mlp=saved.train_mlp, train_attn=saved.train_attn)
        self.check_name(client.entry.base_model)
        optimizer = request.optimizer_config
        if optimizer is not None and optimizer.type != "adamw":
            raise refused_field("optimizer_config.type", optimizer.type, '"adamw", the optimizer of this service')
        client.entry.rank = self._learner.create(client.model_id, lora)
        self._adapters[client.model_id] = lora if lora is not None and client.entry.rank else LoraConfig(rank=0)
        if isinstance(request, LoadWeights):
            return self._load(client, request)
        return Answer.of(model_id=client.model_id, type="create_model")

    def _forward_backward(self, client: TrainingClient, request: ForwardBackward) -> Answer:
        learner, most = self._learner, self._settings.limits.max_request_tokens
        record, began = self.records[client.model_id], time.monotonic()
        try:
            if request.problem is not None:
                raise request.problem
            if request.num_tokens > most:
                raise refused_field(
                    "data", f"{request.num_tokens} tokens", f"at most limits.max_request_tokens = {most}"
                )
            objective = tinker_objective(request.loss, request.options)
            batch = batch_of(request, vocab_size=learner.vocab_size, max_tokens=learner.max_tokens)
            if request.forward_only:
                logprobs = learner.of(client.model_id).logprobs(batch)
                loss = loss_of(objective, batch, logprobs)
            else:
                result = learner.of(client.model_id).forward_backward(batch, objective, with_tokens=True)
                logprobs, loss = result.tokens["policy_logprobs"], result.loss
                record.passed(batch, logprobs, loss)
        except Exception as error:
            if not request.forward_only:
                client.broken = f"forward_backward {request.seq_id} failed: {error}"
            raise
        record.note({"timing_s/forward_backward": time.monotonic() - began})
        content = write_forward_backward(target_logprobs(request, logprobs), {"loss:sum": loss})
        return Answer(content=content, media_type=PROTOBUF)

    def _optim_step(self, client: TrainingClient, request: OptimStep) -> Answer:
        record, began = self.records[client.model_id], time.monotonic()
        broken, client.broken = client.broken, None
        if broken is not None:
            record.restart(client.step)
            self._learner.of(client.model_id).zero_grad()
            raise RefusedError(f"the step was not taken and its gradients are dropped, because {broken}")
        given = request.optim_params
        if not isinstance(given, AdamParams):
            raise refused_field("optim_params", given.type, "those of Adam, the optimizer of this service")
        options = AdamOptions(
            learning_rate=given.learning_rate,
            betas=(given.beta1, given.beta2),
            eps=given.eps,
            weight_decay=given.weight_decay,
            clip_grad=max(given.grad_clip_norm, 0.0),
        )
        result = self._learner.of(client.model_id).optim_step(options)
        record.note({"timing_s/optim_step": time.monotonic() - began})
        if not result.is_applied:
            record.note({"actor/skipped_updates": 1})
            raise SettingsError("the step was not taken, because the loss or the gradient norm is not finite.")
        self._clients.stepped(client, result.step)
        record.stepped(result)
        return Answer.of(metrics={"optim_step": result.step, "grad_norm": result.grad_norm})

    def _save(self, client: TrainingClient, request: SaveWeights) -> Answer:
        path = weights_path(client.model_id, "weights", request.path or f"step-{client.step}")
        self._checkpoints.check_free(path, overwrite=request.overwrite)
        learner = self._learner.of(client.model_id)
        self._checkpoints.save(self._record(client, path, request), lambda folder: learner.save(folder).wait())
        return Answer.of(path=path, type="save_weights")

    def _save_external(self, client: TrainingClient, request: SaveWeightsExternal) -> Answer:
        """Save an adapter in peft's format, or all weights as a Hugging Face folder."""
        path = weights_path(client.model_id, "external_weights", request.path)
        self._checkpoints.check_free(path, overwrite=False)
        recipients = request.age_encryption_recipients

        def write(folder: Path) -> None:
            self._learner.save_external(client.model_id, folder, rank=client.entry.rank)
            if recipients:
                encrypt_files([file for file in folder.glob("*/*") if file.is_file()], recipients)

        saved = self._checkpoints.save(self._record(client, path, request), write)
        return Answer.of(path=path, size_bytes=saved.size_bytes, type="save_weights_external")

    def _save_for_sampler(self, client: TrainingClient, request: SaveWeightsForSampler) -> Answer:
        entry, number = client.entry, request.sampling_session_seq_id
        if (request.path is None) == (number is None):
            raise RefusedError("either path or sampling_session_seq_id is required.", param="path")
        path = weights_path(client.model_id, "sampler_weights", request.path or f"snapshot-{request.seq_id}")
        self._checkpoints.check_free(path, overwrite=False)
        self._checkpoints.save(
            self._record(client, path, request), partial(self._learner.save_sampler, client.model_id)
        )
        self.records[client.model_id].served()
        if number is None:
            return Answer.of(path=path, type="save_weights_for_sampler")
        is_inflight = request.kind == "inflight"
        if is_inflight:
            self.inflight[client.model_id] = path
        sampling = Sampling(
            sampler_id=sampling_id(entry.session_id, number),
            session_id=entry.session_id,
            base_model=entry.base_model,
            path=path,
            follows=client.model_id if is_inflight else None,
        )
        self._clients.open_sampling(sampling)
        return Answer.of(sampling_session_id=sampling.sampler_id, type="save_weights_for_sampler")

    def _load(self, client: TrainingClient, request: LoadWeights) -> Answer:
        saved = self._checkpoints.find(request.path)
        if saved.segment != "weights":
            raise RefusedError(f"{request.path} has no state to train from; load one of save_state.", param="path")
        own = self._adapters[client.model_id]
        if saved.rank and own.rank and (found := _adapter(saved)) != (wanted := _adapter(own)):
            raise RefusedError(
                f"{request.path} has {found}; this client has {wanted}. Use create_training_client_from_state, whose "
                "client is as the one that saved.",
                param="path",
            )
        folder = self._checkpoints.folder_of(request.path)
        learner = self._learner.of(client.model_id)
        learner.zero_grad()
        learner.load(folder, with_optimizer=request.optimizer)
        client.broken = None
        self._clients.stepped(client, saved.step if request.optimizer else 0)
        if client.model_id in self.records:
            self.records[client.model_id].restart(client.step)
        return Answer.of(path=request.path, model_id=client.model_id, type="load_weights")

    def _record(self, client: TrainingClient, path: str, request: Save) -> Saved:
        adapter = self._adapters[client.model_id]
        return Saved(
            path=path,
            base_model=client.entry.base_model,
            rank=client.entry.rank,
            step=client.step,
            saved_at=time.time(),
            user_metadata=None if isinstance(request, SaveWeightsExternal) else request.user_metadata,
            expires_at=expiry(request.ttl_seconds),
            is_snapshot=request.path is None and isinstance(request, SaveWeightsForSampler),
            train_mlp=adapter.train_mlp,
            train_attn=adapter.train_attn,
        )


def _adapter(one: Saved | LoraConfig) -> str:
    """Describe an adapter."""
    return f"rank {one.rank}, train_mlp = {one.train_mlp}, train_attn = {one.train_attn}"
