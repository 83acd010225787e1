"""The learner and the engine: adapters of training clients over one base, and their weights in the engine."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog

from rl_core import Batch, Ragged, RowKey
from rl_core.cluster import within
from rl_core.data import IntArray
from rl_core.errors import CheckpointError, EngineDiedError, EngineError, SettingsError, WeightProofError
from rl_core.files import read_json_object
from rl_core.weights import (
    BFLOAT16_TOLERANCES,
    AdapterUpdate,
    Canary,
    InFile,
    ProofTolerances,
    PublishReport,
    TensorDigest,
    WeightUpdate,
    digest_tensors,
    write_safetensors,
)
from rl_distill import (
    LearnerOptions,
    LoraOptions,
    adapted_modules,
    parse_policy_config,
    read_policy_config,
)
from rl_distill.learner import FIRST_ADAPTER, MultiAdapterLearner
from rl_rollout.engines import (
    EnginePlacement,
    ProcessEngine,
    ReplicatedEngine,
    TransformersOptions,
    VLLMOptions,
    engine_class,
)
from rl_rollout.gateway import RefusedError
from rl_service.requests import LoraConfig
from rl_service.settings import ServiceSettings

log = structlog.get_logger(__name__)
T = TypeVar("T")
BASE = "base"
WEIGHTS_FILE, CONFIG_FILE, CANARY_FILE = "adapter_model.safetensors", "adapter_config.json", "canary.json"
MLP, ATTENTION = ("*.mlp.*", "*.feed_forward.*", "*_moe.*"), ("*attn.*", "*attention.*")
"""Names of the modules that a client may leave alone."""
NUM_CANARIES, CANARY_TOKENS = 4, 24
UNCHANGED = "unchanged"
"""The adapter that changes nothing. The engine always has it, which proves the base at every start."""


class LearnerBackend:
    """Trains the adapters of clients, one request at a time.

    All methods but `start`, `call` and `close` run on its thread.

    Attributes:
        base: Digest of each tensor under the adapters.
        tied: Names that share another's tensor.
        vocab_size: All token ids are smaller.
        max_tokens: Maximum number of tokens of a row.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        """Choose a policy; `start` loads it."""
        self._settings = settings
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._owner: str | None = None
        self._had_owner = False
        self._learner: MultiAdapterLearner  # once loaded
        self.base: Mapping[str, TensorDigest] = {}
        self.tied: Mapping[str, str] = {}
        config = parse_policy_config(read_policy_config(settings.policy.path), backend=settings.policy.backend)
        self.vocab_size, self.max_tokens = config.vocab_size, config.max_position_embeddings
        self.adapted = tuple(adapted_modules(config, self._lora())) if settings.lora.max_rank else ()
        ids = np.random.default_rng(0).integers(0, self.vocab_size, (NUM_CANARIES, min(CANARY_TOKENS, self.max_tokens)))
        self._canary = list(ids.astype(np.int32))

    async def call(self, function: Callable[[], T]) -> T:
        """Run something on the learner's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def start(self, folder: Path) -> None:
        """Load the policy, and write the adapter that changes nothing into a folder."""
        await self.call(lambda: self._load(folder))

    async def close(self) -> None:
        """Free the learner."""
        await self.call(lambda: self._learner.close() if hasattr(self, "_learner") else None)
        self._thread.shutdown()

    def _lora(self) -> LoraOptions:
        lora = self._settings.lora
        return LoraOptions(rank=lora.max_rank, alpha=lora.alpha, target_modules=lora.target_modules)

    def _load(self, folder: Path) -> None:
        self._learner = self._built()
        if self._settings.lora.max_rank:
            self.base = digest_tensors(self._learner.export_base())
        self.tied = dict(self._learner.tied)
        weights, logprobs = self._weights(), self._learner.logprobs(self._canary_batch())
        (folder / BASE).mkdir(exist_ok=True)
        self._write_sampler(folder / BASE, weights, logprobs)  # B of the first adapter is 0

    def _built(self) -> MultiAdapterLearner:
        from rl_distill.megatron.learner import MegatronLearner

        chosen, policy = self._settings.learner, self._settings.policy
        options = LearnerOptions(**{one.name: getattr(chosen, one.name) for one in fields(chosen)})
        return MegatronLearner(policy.path, options, backend=policy.backend, lora=self._lora())

    def create(self, model_id: str, lora: LoraConfig | None) -> int:
        """Create the adapter of a client, or give it all weights; return the adapter's rank.

        Raises:
            RefusedError: The service cannot train it.
        """
        most = self._settings.lora.max_rank
        if not most:
            return self._create_full(model_id)
        if lora is None or not 1 <= lora.rank <= most:
            found = lora and lora.rank
            raise RefusedError(
                f"lora_config.rank must be 1 to lora.max_rank = {most}; found {found}. Ask for a lower one, or "
                "start the service with a higher lora.max_rank."
            )
        frozen = [*(() if lora.train_mlp else MLP), *(() if lora.train_attn else ATTENTION)]
        if all(any(fnmatchcase(name, pattern) for pattern in frozen) for name in self.adapted):
            raise RefusedError(
                "lora_config must have train_mlp or train_attn, because this service has adapters only in "
                f"{', '.join(sorted({name.rpartition('.')[2] for name in self.adapted}))}, not in the output matrix.",
                param="lora_config",
            )
        self._learner.add_adapter(model_id, seed=lora.seed, rank=lora.rank, frozen=frozen)
        return lora.rank

    def _create_full(self, model_id: str) -> int:
        if self._owner is not None:
            raise RefusedError(f"{self._owner} trains all weights, so nobody else can. Finish its session first.")
        if self._had_owner:  # which may have loaded or trained other weights
            self._learner.close()
            self._learner = self._built()
        self._owner, self._had_owner = model_id, True
        return 0

    def forget(self, model_id: str) -> None:
        """Free the weights of a client; without effect if it has none."""
        if self._owner == model_id:
            self._learner.zero_grad()
            self._owner = None
        if self._settings.lora.max_rank:
            with suppress(SettingsError):  # it has no adapter
                self._learner.select_adapter(FIRST_ADAPTER)
                self._learner.drop_adapter(model_id)

    def of(self, model_id: str) -> MultiAdapterLearner:
        """Return the learner with the weights of a client.

        Raises:
            SettingsError: The client has no weights in memory.
        """
        if self._settings.lora.max_rank:
            self._learner.select_adapter(model_id)
        elif self._owner != model_id:
            raise SettingsError(f"{model_id} has no weights in memory.")
        return self._learner

    def save_sampler(self, model_id: str, folder: Path) -> None:
        """Write the weights to sample from, with the learner's logprobs for their proof; adapters in peft's format."""
        logprobs = self.of(model_id).logprobs(self._canary_batch())
        self._write_sampler(folder, self._weights(), logprobs)

    def save_external(self, model_id: str, folder: Path, *, rank: int) -> None:
        """Write all weights as a Hugging Face folder, or an adapter of a rank in peft's format, into a subfolder."""
        self.of(model_id).save(folder).wait()
        shutil.rmtree(folder / "state")
        if 0 < rank < self._settings.lora.max_rank:
            _cut_adapter(folder / "adapter", rank)

    def _weights(self) -> Mapping[str, Any]:
        return self._learner.export_adapter() if self._settings.lora.max_rank else self._learner.export_weights()

    def _canary_batch(self) -> Batch:
        keys = [RowKey(f"canary-{index}", 0, 0) for index in range(len(self._canary))]
        return Batch(keys, {"input_ids": Ragged.from_rows(self._canary, dtype="int32")})

    def _write_sampler(self, folder: Path, tensors: Mapping[str, Any], logprobs: Ragged) -> None:
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_safetensors(on_host, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        rows = [[float(value) for value in row] for row in logprobs]
        (folder / CANARY_FILE).write_text(json.dumps({"logprobs": rows}))
        if rank := self._settings.lora.max_rank:
            self._write_config(folder, rank)

    def _write_config(self, folder: Path, rank: int) -> None:
        """Write peft's configuration; B is already multiplied by the scaling."""
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self._settings.policy.path.absolute()),
            "inference_mode": True,
            "r": rank,
            "lora_alpha": rank,
            "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in self.adapted}),
        }
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))

    @property
    def canary_sequences(self) -> list[IntArray]:
        """The sequences whose logprobs prove served weights."""
        return self._canary


def _cut_adapter(folder: Path, rank: int) -> None:
    """Cut an adapter in peft's format, which zeros pad to a higher rank, to its own."""
    from safetensors.torch import load_file

    tensors = load_file(folder / WEIGHTS_FILE)
    cut = {
        name: (tensor[:rank] if "lora_A" in name else tensor[:, :rank]).contiguous() for name, tensor in tensors.items()
    }
    write_safetensors(cut, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = read_json_object(folder / CONFIG_FILE)
    alpha = config["lora_alpha"] * rank / config["r"]
    (folder / CONFIG_FILE).write_text(json.dumps({**config, "r": rank, "lora_alpha": alpha}, indent=2))


class EngineBackend:
    """The engine, and the weights that it serves.

    Attributes:
        engine: The engine.
        adapters: Names of its slots; [None] if it serves all weights of one client at a time.
    """

    def __init__(self, settings: ServiceSettings, learner: LearnerBackend) -> None:
        """Choose an engine; `start` loads it.

        Raises:
            SettingsError: There is no such engine.
        """
        self._settings, self._learner = settings, learner
        options: Any = settings.vllm
        self.adapters: list[str | None] = [None]
        if settings.lora.max_rank:
            self.adapters = [f"slot-{index}" for index in range(settings.engine.max_adapters)]
            options = replace(
                options,
                max_lora_rank=settings.lora.max_rank,
                max_adapters=len(self.adapters) + 1,
                lora_target_modules=tuple(sorted({name.rpartition(".")[2] for name in learner.adapted})),
            )
        name = settings.engine.name
        if name == "transformers":
            shared = {one.name for one in fields(TransformersOptions)} & {one.name for one in fields(VLLMOptions)}
            options = TransformersOptions(**{one: getattr(options, one) for one in shared})
        path, chosen = settings.policy.path, settings.engine
        host = EnginePlacement(deadline_s=chosen.start_deadline_s, max_restarts=chosen.restarts)
        is_inline = chosen.placement == "inline"
        engines = [
            engine_class(name)(path, options)
            if is_inline
            else ProcessEngine(name, path, options, host=host, index=index)
            for index in range(1 if is_inline else chosen.replicas)
        ]
        self.engine = ReplicatedEngine(engines)
        self._version = 0
        self._folder = settings.server.folder / "served"
        self._files: dict[str | None, Path] = {}
        is_exact = settings.vllm.dtype == settings.learner.dtype == "float32"
        self._tolerances = ProofTolerances() if is_exact else BFLOAT16_TOLERANCES

    async def start(self, base: Path) -> None:
        """Load the model, and prove it with the weights in a folder that change nothing.

        Raises:
            DeadlineError: It took too long.
            EngineError: The engine cannot serve the model.
            SettingsError: The engine cannot serve adapters of the set rank, or not as many.
            WeightProofError: It serves something else than the learner.
        """
        deadline_s = self._settings.engine.start_deadline_s
        async with within(deadline_s, f"the engine did not start within engine.start_deadline_s = {deadline_s:g} s."):
            await self.engine.start()
        traits, rank, most = self.engine.traits, self._settings.lora.max_rank, len(self.adapters) + 1
        if rank and (traits.max_lora_rank < rank or traits.max_adapters < most):
            raise SettingsError(
                f"the engine must serve {most} adapters of rank {rank}, for engine.max_adapters and lora.max_rank; "
                f"{traits.name} serves {traits.max_adapters} up to rank {traits.max_lora_rank}."
            )
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        if rank:
            await self.serve(base, UNCHANGED)

    async def serve(self, folder: Path, adapter: str | None) -> PublishReport:
        """Serve the weights in a folder that `LearnerBackend.save_sampler` wrote.

        A failed proof is repeated once.

        Args:
            folder: The folder. It may be removed while its weights are served.
            adapter: One of `adapters`; its last weights are no longer served.

        Raises:
            CheckpointError: The folder was removed.
            WeightProofError: The engine refuses them, or serves something else; the message names the tensor.
        """
        self._version += 1
        file = self._folder / f"{self._version}.safetensors"  # an engine that restarts reads it again
        try:
            update, canary = await asyncio.to_thread(self._update, folder, file, self._version, adapter)
            report = await self._publish(update, canary)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        if (last := self._files.get(adapter)) is not None:
            last.unlink()
        self._files[adapter] = file
        return report

    async def _publish(self, update: WeightUpdate, canary: Canary) -> PublishReport:
        try:
            return await self.engine.publish(update, canary=canary, tolerances=self._tolerances)
        except WeightProofError as error:
            log.warning("weight_proof_failed", version=update.version, tensor=error.tensor, error=str(error))
            return await self.engine.publish(update, canary=canary, tolerances=self._tolerances)
        except EngineDiedError:
            raise
        except EngineError as error:
            raise WeightProofError(f"the engine refuses version {update.version}: {error}") from error

    def _update(self, folder: Path, file: Path, version: int, adapter: str | None) -> tuple[WeightUpdate, Canary]:
        from safetensors.torch import load_file

        try:
            os.link(folder / WEIGHTS_FILE, file)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} was removed before its weights were served.") from None
        rank, base = self._settings.lora.max_rank, self._learner.base
        update = WeightUpdate(
            version=version,
            digests=digest_tensors(load_file(file), kind="crc32c" if rank else None),
            location=InFile(file=file),
            tied=self._learner.tied,
            adapter=None if adapter is None else AdapterUpdate(rank=rank, base=base, name=adapter),
        )
        rows = read_json_object(folder / CANARY_FILE)["logprobs"]
        logprobs = [np.asarray(row, dtype=np.float32) for row in rows]
        return update, Canary(sequences=self._learner.canary_sequences, logprobs=logprobs)
