"""vLLM's core as a `Stepper`. Importing this module imports vLLM, which takes seconds."""

import gc
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Literal

import numpy as np
import structlog
import torch
from vllm import SamplingParams as VLLMSamplingParams
from vllm import __version__ as vllm_version
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import LogprobsTensors

from rl_core.data import FinishReason as OurFinishReason
from rl_core.data import FloatArray
from rl_core.errors import EngineError
from rl_core.gpus import GpuUse
from rl_core.weights import (
    InFile,
    InProcess,
    TokenScores,
    WeightReceipt,
    WeightUpdate,
)
from rl_core.weights.broadcast import WeightSources
from rl_rollout.engines.images import MAX_IMAGES
from rl_rollout.engines.model_folder import end_token_ids, has_tokenizer
from rl_rollout.engines.options import VLLMOptions
from rl_rollout.engines.protocol import EngineTraits, Structure
from rl_rollout.engines.stepper import Sample
from rl_rollout.engines.vllm.adapters import PublishedAdapters
from rl_rollout.engines.vllm.engine_arguments import engine_arguments
from rl_rollout.engines.vllm.environment import kept_process_group, unchanged_process
from rl_rollout.engines.vllm.expert_capture import WITH_EXPERTS, ExpertRows
from rl_rollout.engines.vllm.image_models import ImageFeatures, register_architectures, serve_our_images
from rl_rollout.engines.vllm.live_weights import LiveParts, join_arrived, join_parts
from rl_rollout.engines.vllm.round_trip import prove_round_trip
from rl_rollout.engines.vllm.structures import STRUCTURES, StructuredOutputs, constrain, failure_of
from rl_rollout.engines.vllm.worker_processes import unlink_queues, watch_workers, worker_environment
from rl_rollout.engines.weight_checks import (
    LiveNames,
    check_adapter,
    check_first_weights,
    check_update,
    folder_probes,
    require_explained,
    tensor_shapes,
    update_shapes,
    workers_source,
)

log = structlog.get_logger(__name__)

FINISH_REASONS: Mapping[FinishReason, OurFinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}
MAX_IDLE_STEPS = 100
"""Maximum number of steps without computation while samples run. Beyond it, the scheduler is stuck."""

MAX_SCORING_STEPS = 2
"""Number of steps' worth of tokens that vLLM gets for scoring at once, so that later requests do not wait longer."""

_engines_in_process: set[int] = set()


class VLLMStepper:
    """One vLLM core, driven step by step.

    Requests and tokens go directly to and from the core. vLLM's front end, made for text and streams, takes as long as
    the model when responses are short.
    """

    def __init__(self, model_dir: Path, options: VLLMOptions) -> None:
        """Load the model.

        Raises:
            EngineError: This process cannot run the engine.
        """
        _require_room()
        self._owns_process_group = not torch.distributed.is_initialized()
        self._is_cpu = current_platform.is_cpu()
        self._seeds = np.random.default_rng(options.seed)
        self._end_token_ids = end_token_ids(model_dir)
        self._shapes = tensor_shapes(model_dir)
        self._running: dict[str, tuple[Sample, Any]] = {}
        self._to_score: deque[Sample] = deque()
        self._num_scoring_tokens = 0
        self._max_scoring_tokens = MAX_SCORING_STEPS * options.max_num_batched_tokens
        self._num_requests = 0
        self._num_idle_steps = 0
        self._version = 0
        self._num_ranks = options.tensor_parallel_size
        self._sources = WeightSources(lambda plan: self._core.collective_rpc("ask_weights", args=(plan,)))
        self._engine = self._start_engine(model_dir, options)
        _engines_in_process.add(id(self))
        self._client: Any = self._engine.engine_core
        self._core: Any = self._client.engine_core
        self._workers_end = self._take_workers()
        try:
            self._images = ImageFeatures(self._engine.model_config) if options.image_folder is not None else None
            self._live_names = self._prove_first_weights(model_dir, options.dtype)
            self._core.collective_rpc("score_in_pieces")
            if self._is_cpu:
                self._core.collective_rpc("draw_by_seed_and_position")
            max_adapters = options.max_adapters if options.max_lora_rank else 0
            self._adapters = PublishedAdapters(self._core, self._shapes, max_adapters=max_adapters)
            self._experts = self._capture_experts(options)
        except Exception:
            self.close()
            raise
        model_config = self._engine.model_config
        device = current_platform.device_type
        self._traits = EngineTraits(
            name=f"vllm {vllm_version} ({device}, {options.dtype})",
            max_model_len=model_config.max_model_len - 1,
            vocab_size=model_config.get_vocab_size(),
            can_sleep=options.can_sleep and not self._is_cpu,
            max_top_k=min(options.max_top_k, model_config.get_vocab_size()),
            can_match_text=has_tokenizer(model_dir),
            structures=STRUCTURES if has_tokenizer(model_dir) else (),
            max_lora_rank=options.max_lora_rank,
            max_adapters=options.max_adapters,
            max_images=0 if self._images is None else MAX_IMAGES,
        )
        self._structures = StructuredOutputs(model_dir, self._traits.vocab_size, self._end_token_ids)
        self._core.structured_output_manager.backend = self._structures
        self._core.structured_output_manager._use_async_grammar_compilation = False

    @property
    def traits(self) -> EngineTraits:
        """See `Stepper.traits`."""
        return self._traits

    def admit(self, samples: Sequence[Sample]) -> None:
        """See `Stepper.admit`. Sequences to score wait here for their turn."""
        for sample in samples:
            if sample.sampling is None:
                self._to_score.append(sample)
            else:
                self._add(sample)

    def step(self) -> list[Sample]:
        """See `Stepper.step`."""
        self._add_scoring()
        finished = self._without_adapter()
        outputs, is_executed = self._core.step_fn()
        self._core.post_step(is_executed)
        self._watch_progress(is_executed)
        taken = [self._take(output) for of_client in (outputs or {}).values() for output in of_client.outputs]
        return [*finished, *(sample for sample in taken if sample is not None)]

    def remove(self, samples: Sequence[Sample]) -> None:
        """See `Stepper.remove`."""
        leaving = set(samples)
        self._to_score = deque(sample for sample in self._to_score if sample not in leaving)
        ids = [request_id for request_id, (sample, _) in self._running.items() if sample in leaving]
        self._core.abort_requests(ids)
        for request_id in ids:
            self._drop(request_id)

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See `Stepper.update_weights`."""
        tensors = update_shapes(update)
        if update.adapter is None:
            check_update(update, tensors, self._shapes)
        else:
            check_adapter(update, tensors, self._shapes, self._traits, self._adapters.names)
            self._adapters.check_modules(tensors)
        adapter_id = self._adapters.id_of(update)
        ranks = self._replace_weights(update, adapter_id)
        running = list(self._running.values())
        affected = self._adapters.affected(update, running)
        if affected is running:
            self.reset_prefix_cache()
        else:
            self._adapters.restart(affected)
        self._version = update.version
        self._adapters.replaced(update, affected)
        sent = {name: digest.probe for name, digest in update.served.items()}
        sent |= {name: sent[source] for name, source in update.tied.items() if source in sent}
        live = self._probe_live_weights(sent, adapter_id)
        live |= {name: live[of] for name, of in update.tied.items() if name not in live and of in live}
        changed = [problem for rank in self._core.collective_rpc("changed_buffers") for problem in rank]
        return WeightReceipt(
            version=update.version,
            arrived=join_arrived(ranks, {name: digest.checksum for name, digest in update.digests.items()}),
            live=live,
            problems=(*self._adapters.problems(running, affected), *changed),
            unnamed=self._live_names.by_round_trip,
        )

    def _probe_live_weights(self, sent: Mapping[str, FloatArray], adapter_id: int | None) -> dict[str, FloatArray]:
        """Return the probe of each tensor as the ranks serve it together, by Hugging Face name."""
        renamed = self._live_names.renamed
        names = [*self._shapes, *(sent.keys() - self._shapes.keys())]
        parts: list[LiveParts] = self._core.collective_rpc(
            "probe_live_weights", args=(names, bool(renamed), adapter_id)
        )
        for of_rank in parts:
            for own, name in renamed.items():
                of_rank[name] = [*of_rank.get(name, ()), *of_rank.get(own, ())]
        return join_parts(parts, sent)

    def drop_adapter(self, name: str) -> None:
        """See `Stepper.drop_adapter`."""
        self._adapters.drop(name, list(self._running.values()))

    def _replace_weights(self, update: WeightUpdate, adapter_id: int | None) -> list[dict[str, str]]:
        """Replace the weights. Return the checksums of the tensors as they arrived at each rank."""
        what, details = "adapter", list[Any]([update.version, adapter_id])
        if update.adapter is None:
            what, details = "all_weights", [list(update.tied), update.kinds]
        with self._source(update) as source:
            arrived: list[dict[str, str]] = self._core.collective_rpc(f"replace_{what}", args=(source, *details))
            return arrived

    def _source(self, update: WeightUpdate) -> AbstractContextManager[object]:
        """Return from where the workers read an update; its senders are asked first."""
        if isinstance(update.location, InProcess | InFile):
            return workers_source(update.location, is_shared=self._num_ranks > 1)
        return nullcontext(self._sources.announce(update))

    def reset_prefix_cache(self) -> None:
        """Drop the cached prefixes of earlier prompts. Running requests compute theirs again."""
        self._core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if self._images is not None:
            self._core.scheduler.reset_encoder_cache()  # the core's own method warns while requests run
            self._core.model_executor.reset_encoder_cache()

    def gpu_use(self) -> list[GpuUse]:
        """Return the use of each rank's GPU since the last call; empty on CPUs."""
        return [use for rank in self._core.collective_rpc("gpu_use") for use in rank]

    def sleep(self, level: Literal[1, 2]) -> None:
        """See `Stepper.sleep`. Weights move to the host or are dropped, and the KV cache is freed."""
        self.reset_prefix_cache()
        self._core.collective_rpc("note_buffers", args=(tuple(self._shapes),))
        self._core.model_executor.sleep(level)

    def wake(self) -> None:
        """See `Stepper.wake`."""
        self._core.model_executor.wake_up()

    def prepare(self, structure: Structure) -> None:
        """See `Stepper.prepare`."""
        self._structures.prepare(structure)

    def close(self) -> None:
        """See `Stepper.close`."""
        self._workers_end.set()
        with kept_process_group(is_kept=not self._owns_process_group):
            self._client.shutdown()
        _engines_in_process.discard(id(self))
        self._running.clear()
        self._to_score.clear()
        del self._engine, self._client, self._core
        gc.collect()

    def _start_engine(self, model_dir: Path, options: VLLMOptions) -> LLMEngine:
        num_threads = options.num_threads or torch.get_num_threads()
        environment = worker_environment(self._num_ranks, num_threads=num_threads, is_cpu=self._is_cpu)
        with unchanged_process(num_threads), environment:
            serve_our_images()
            register_architectures(model_dir)
            try:
                return LLMEngine.from_engine_args(engine_arguments(model_dir, options, self._shapes))
            except Exception as error:  # vLLM's models raise any type
                with kept_process_group(is_kept=not self._owns_process_group):
                    cleanup_dist_env_and_memory()
                raise EngineError(
                    f"{model_dir}: vLLM cannot load the model ({type(error).__name__}: {error}). The transformers "
                    "engine may serve it."
                ) from error

    def _prove_first_weights(self, model_dir: Path, dtype: str) -> LiveNames:
        """Compare the live layers with the folder that vLLM loaded. Prove that updates reach those without a name."""
        if (quantization := self._engine.model_config.quantization) is not None:
            log.warning("first_weights_not_proven", folder=str(model_dir), quantization=str(quantization))
            return LiveNames()
        probes = folder_probes(model_dir, self._shapes)
        parts = self._core.collective_rpc("probe_live_weights", args=([*probes], True))
        found = check_first_weights(probes, join_parts(parts, probes), model_dir=model_dir, dtype=dtype)
        if found.unnamed or found.unexplained:
            found = prove_round_trip(self._core.collective_rpc, found, model_dir=model_dir, shapes=self._shapes)
        return require_explained(found, model_dir)

    def _take_workers(self) -> Event:
        """Watch the workers' processes until the event, and unlink all shared resources that could outlive them."""
        executor = self._core.model_executor
        if self._num_ranks > 1:
            self._core.collective_rpc("unlink_shared")
            unlink_queues([executor.rpc_broadcast_mq, *executor.response_mqs])
        return watch_workers(executor)

    def _capture_experts(self, options: VLLMOptions) -> ExpertRows | None:
        """Record the experts of tokens, if the model is a mixture of experts."""
        config = self._engine.model_config
        if not (options.capture_experts and config.is_moe):
            return None
        if not (self._is_cpu or options.enforce_eager):
            raise EngineError(
                "vLLM's CUDA graphs do not report their experts. Set enforce_eager = true, or capture_experts = "
                "false: training then chooses experts again."
            )
        self._core.collective_rpc("capture_experts")
        shape = config.get_total_num_hidden_layers(), config.get_num_experts_per_tok()
        ask = partial(self._core.collective_rpc, "captured_experts")
        return ExpertRows(self._core.scheduler, lambda rows: ask(args=(rows,))[0], shape)

    def _without_adapter(self) -> list[Sample]:
        """End samples whose adapter is missing. Otherwise, vLLM would fail the step for all samples."""
        absences = self._adapters.absences([sample for sample, _ in self._running.values()])
        for sample, reason in absences.items():
            sample.fail(reason)
        if absences:
            self.remove([*absences])
        return [*absences]

    def _add_scoring(self) -> None:
        """Send sequences to score to vLLM, as many as its next steps can process, at least one."""
        while self._to_score and self._num_scoring_tokens < self._max_scoring_tokens:
            sample = self._to_score.popleft()
            self._num_scoring_tokens += len(sample.input_ids)
            self._add(sample)

    def _add(self, sample: Sample) -> None:
        self._num_requests += 1
        request = EngineCoreRequest(
            request_id=str(self._num_requests),
            prompt_token_ids=sample.input_ids,
            mm_features=self._images.of(sample, self._version) if sample.images and self._images else None,
            sampling_params=self._sampling_params(sample),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._adapters.request_of(sample),
            cache_salt=None,
            data_parallel_rank=None,
        )
        core_request, wave = self._core.preprocess_add_request(request)
        self._core.add_request(core_request, wave)
        self._running[request.request_id] = (sample, core_request)

    def _drop(self, request_id: str) -> None:
        sample, core_request = self._running.pop(request_id)
        sample.num_preempted = core_request.num_preemptions
        if sample.sampling is None:
            self._num_scoring_tokens -= len(sample.input_ids)
        if self._experts is not None and (sample.sampling is not None or sample.with_experts):
            sample.routed_experts = self._experts.pop(request_id, len(sample.input_ids) + len(sample.token_ids))

    def _sampling_params(self, sample: Sample) -> VLLMSamplingParams:
        sampling = sample.sampling
        if sampling is None:
            return VLLMSamplingParams(
                max_tokens=1,
                temperature=0.0,
                prompt_logprobs=sample.top_k,
                detokenize=False,
                extra_args={WITH_EXPERTS: True} if sample.with_experts else None,
            )
        seed = sample.seed
        if self._is_cpu and seed is None:
            seed = int(self._seeds.integers(2**63))
        params = VLLMSamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            seed=None if self._is_cpu else seed,
            extra_args={"seed": seed} if self._is_cpu else None,
            stop_token_ids=[*self._end_token_ids, *sampling.stop_token_ids],
            logprobs=self._num_logprobs(sample) if sampling.temperature else None,
            detokenize=False,
            skip_clone=True,
        )
        if sampling.structure is not None:
            constrain(params, sampling.structure)
        return params

    def _num_logprobs(self, sample: Sample) -> int:
        """Return the number of logprobs to request beside the token's: one more than it may keep, to notice others."""
        return min(sample.max_nucleus + 1, self._traits.vocab_size) if sample.max_nucleus else 0

    def _take(self, output: EngineCoreOutput) -> Sample | None:
        """Add new tokens to their sample. Return the sample when it is finished."""
        entry = self._running.get(output.request_id)
        if entry is None:
            return None
        sample, core_request = entry
        if sample.sampling is None:
            sample.scores = _scores(output, sample.top_k)
        else:
            sample.token_ids.extend(output.new_token_ids)
            version = self._adapters.version_of(sample)
            sample.policy_versions.extend([version] * len(output.new_token_ids))
            if output.new_logprobs is not None:
                sample.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
                first = slice(1, 1 + self._num_logprobs(sample))  # other samples' requests may add columns
                if sample.max_nucleus:
                    kept = zip(output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs, strict=True)
                    for ids, values in kept:
                        sample.add_nucleus(ids[first], values[first])
        if output.finish_reason is None:
            return None
        self._drop(output.request_id)
        sample.failure = failure_of(core_request) or sample.failure
        if output.finish_reason not in FINISH_REASONS and sample.failure is None:
            raise RuntimeError(f"vLLM ended a request with {output.finish_reason!s}: {output.stop_reason}")
        sample.finish_reason = FINISH_REASONS.get(output.finish_reason, "abort")
        return sample

    def _watch_progress(self, is_executed: bool) -> None:
        self._num_idle_steps = 0 if is_executed or not self._running else self._num_idle_steps + 1
        if self._num_idle_steps > MAX_IDLE_STEPS:
            raise RuntimeError(
                f"vLLM's scheduler made {MAX_IDLE_STEPS} empty steps while {len(self._running)} samples were waiting; "
                "its KV cache may be too small for one of them."
            )


def _require_room() -> None:
    if _engines_in_process:
        raise EngineError(
            "this process already has a vLLM engine, and vLLM's state is global. Close it first, or run one of the "
            "two in its own process (rl_rollout.engines.process)."
        )
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise EngineError(
            "a vLLM engine shares torch.distributed with the learner in its process, which must have a world size of "
            f"1; found {torch.distributed.get_world_size()}. Run the engine in its own process."
        )


def _scores(output: EngineCoreOutput, top_k: int) -> TokenScores:
    scores = output.new_prompt_logprobs_tensors
    if scores is None:  # a sequence of one token
        scores = LogprobsTensors.empty_cpu(0, top_k + 1)
    return TokenScores.after_first(scores.logprob_token_ids.numpy(), scores.logprobs.numpy())
