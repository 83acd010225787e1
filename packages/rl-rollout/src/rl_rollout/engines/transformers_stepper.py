"""A Hugging Face causal model as a `Stepper`. Importing this imports torch and transformers."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import structlog
import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from rl_core.devices import own_device
from rl_core.errors import EngineError
from rl_core.weights import (
    POLICY_ADAPTER,
    PassingChecksums,
    TokenScores,
    WeightReceipt,
    WeightUpdate,
    folder_views,
    probe_tensor,
)
from rl_core.weights.broadcast import SourceGroups, WeightSources
from rl_rollout.engines.images import MAX_IMAGES
from rl_rollout.engines.model_folder import end_token_ids, has_tokenizer, max_positions
from rl_rollout.engines.options import TransformersOptions
from rl_rollout.engines.protocol import BASE, EngineTraits, SamplingParams, Structure
from rl_rollout.engines.requests import missing_adapter
from rl_rollout.engines.stepper import Sample
from rl_rollout.engines.transformers_images import image_inputs, next_positions, with_embeddings
from rl_rollout.engines.weight_checks import (
    announced_tensors,
    base_tensors,
    check_adapter,
    check_first_weights,
    check_update,
    folder_probes,
    require_explained,
    tensor_shapes,
    update_tensors,
)

if TYPE_CHECKING:
    from rl_rollout.engines.transformers_adapters import ModelAdapters


log = structlog.get_logger(__name__)


class TransformersStepper:
    """A model and its running batches. Samples admitted together form one batch with its own KV cache."""

    def __init__(
        self,
        model_dir: Path,
        options: TransformersOptions,
        *,
        adapters: "Callable[[PreTrainedModel, tuple[str, ...]], ModelAdapters] | None" = None,
    ) -> None:
        """Load the model. No code in the folder runs.

        Args:
            model_dir: The model's folder.
            options: The engine's options.
            adapters: Makes a model ready for adapters. None disables them.

        Raises:
            EngineError: transformers cannot load it.
        """
        self._options = options
        dtype: torch.dtype = getattr(torch, options.dtype)
        try:
            with _no_progress_bar():
                config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
                config._attn_implementation = config._experts_implementation = None  # a folder chooses no kernels
                has_vision = bool(getattr(config, "vision_config", None))
                has_images = has_vision and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
                kind: Any = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
                model = kind.from_pretrained(
                    model_dir,
                    config=config,
                    dtype=dtype,
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                )
        except Exception as error:  # a damaged folder raises many types
            raise EngineError(
                f"{model_dir}: transformers cannot load the model ({type(error).__name__}: {error})."
            ) from error
        self._device = own_device() if options.device == "auto" else torch.device(options.device)
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._end_token_ids = frozenset(end_token_ids(model_dir))
        self._seeds = np.random.default_rng(options.seed)
        self._waiting: list[Sample] = []
        self._batches: list[_Batch] = []
        self._dropped: list[tuple[torch.nn.Parameter, torch.Size]] = []
        self._adapters = None if adapters is None else adapters(self._model, options.lora_target_modules)
        self._groups = SourceGroups(rank=1, num_workers=1, device=self._device)
        self._sources = WeightSources(lambda plan: [self._groups.ask(plan)])
        self._served_base = _Served(0)
        self._served: dict[str, _Served] = {}
        vocab_size: int = self._model.get_input_embeddings().weight.shape[0]
        self._traits = EngineTraits(
            name=f"transformers {transformers_version} ({self._device}, {options.dtype})",
            max_model_len=options.max_model_len or max_positions(model_dir),
            vocab_size=vocab_size,
            max_top_k=vocab_size,
            can_sleep=self._device.type != "cpu",
            can_match_text=has_tokenizer(model_dir),
            max_lora_rank=options.max_lora_rank,
            max_adapters=options.max_adapters,
            max_images=MAX_IMAGES if has_images and options.image_folder is not None else 0,
        )
        probes = folder_probes(model_dir, tensor_shapes(model_dir))
        tied: Mapping[str, str] = getattr(self._model, "all_tied_weights_keys", None) or {}
        probes |= {name: probes[source] for name, source in tied.items() if source in probes}
        live = {name: probe_tensor(tensor) for name, tensor in self._base().items()}
        require_explained(check_first_weights(probes, live, model_dir=model_dir, dtype=options.dtype), model_dir)
        _choose_attention(self._model)
        self._way = _choose_way(self._model)
        attention = self._model.config._attn_implementation
        log.info("class_computes", architecture=type(self._model).__name__, attention=attention, batches=self._way)

    @property
    def traits(self) -> EngineTraits:
        """See `Stepper.traits`."""
        return self._traits

    def admit(self, samples: Sequence[Sample]) -> None:
        """See `Stepper.admit`."""
        for sample in samples:
            if sample.seed is None:
                sample.seed = int(self._seeds.integers(2**63))
        self._waiting.extend(samples)

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        """See `Stepper.step`."""
        finished = self._end_unserved()
        self._form_batches()
        for batch in self._batches:
            finished.extend(self._advance(batch))
        self._batches = [batch for batch in self._batches if batch.samples]
        return finished

    def remove(self, samples: Sequence[Sample]) -> None:
        """See `Stepper.remove`."""
        leaving = set(samples)
        self._waiting = [sample for sample in self._waiting if sample not in leaving]
        for batch in self._batches:
            batch.keep([index for index, sample in enumerate(batch.samples) if sample not in leaving])
        self._batches = [batch for batch in self._batches if batch.samples]

    @torch.inference_mode()
    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See `Stepper.update_weights`."""
        live = self._base()
        shapes = {name: tuple(live[name].shape) for name in live if name not in update.tied}
        adapter: Mapping[str, torch.Tensor] = {}
        with PassingChecksums(update.kinds) as sums:
            tensors = announced_tensors(update) if update.is_sent else update_tensors(update)
            if update.adapter is None:
                check_update(update, tensors, shapes)
                for name, tensor in sums.passing(self._arriving(update, tensors)):
                    live[name].copy_(tensor)
            else:
                check_adapter(update, tensors, shapes, self._traits, self._served)
                adapter = dict(sums.passing(self._arriving(update, tensors)))
            self._serve(update, adapter)
            self._forget_old()
            return self._receipt(update, sums, adapter)

    def _serve(self, update: WeightUpdate, adapter: Mapping[str, torch.Tensor]) -> None:
        """Serve an update's adapter, or no adapter after an update of all weights."""
        if update.adapter is None:
            self._served_base, self._served = _Served(update.version), {}
            if self._adapters is not None:
                self._adapters.keep(())
        elif self._adapters is not None:
            self._adapters.replace(update.adapter.name, adapter)
            self._served[update.adapter.name] = _Served(update.version)

    def drop_adapter(self, name: str) -> None:
        """See `Stepper.drop_adapter`."""
        if name not in self._served or self._adapters is None:
            raise missing_adapter(name, self._served)
        del self._served[name]
        self._adapters.keep(self._served)
        self._forget_old()

    def _arriving(
        self, update: WeightUpdate, tensors: Mapping[str, torch.Tensor]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        return self._groups.receive(self._sources.announce(update)) if update.is_sent else tensors.items()

    def sleep(self, level: Literal[1, 2]) -> None:
        """See `Stepper.sleep`. Weights move to the host or are dropped. At level 2, buffers stay in place."""
        if level == 1:
            self._model.to("cpu")
        else:
            self._dropped = [(parameter, parameter.shape) for parameter in self._model.parameters()]
            for parameter, _ in self._dropped:
                parameter.data = parameter.new_empty(0)
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()

    def wake(self) -> None:
        """See `Stepper.wake`. Dropped weights are NaN, so that a missing update cannot go unnoticed."""
        for parameter, shape in self._dropped:
            parameter.data = parameter.new_full(shape, torch.nan)
        self._dropped = []
        self._model.to(self._device)

    def prepare(self, structure: Structure) -> None:
        """See `Stepper.prepare`. Its traits list no structures."""

    def close(self) -> None:
        """See `Stepper.close`."""
        self._groups.close()
        self._batches.clear()
        self._waiting.clear()
        del self._model

    def _base(self) -> dict[str, torch.Tensor]:
        """Return the weights by the names that learners publish."""
        return folder_views(self._model, base_tensors(self._model.state_dict()))

    def _served_to(self, adapter: str | None) -> "_Served":
        return self._served.get(adapter or POLICY_ADAPTER, self._served_base)

    def _end_unserved(self) -> list[Sample]:
        """End samples whose adapter is not served."""
        samples = [*self._waiting, *(sample for batch in self._batches for sample in batch.samples)]
        served = {None, BASE, *self._served}
        ended = [sample for sample in samples if sample.adapter not in served]
        for sample in ended:
            sample.fail(str(missing_adapter(str(sample.adapter), self._served)))
        if ended:
            self.remove(ended)
        return ended

    def _with_adapter(self, name: str | None) -> AbstractContextManager[None]:
        """Return a context in which the model computes with this adapter; see `GenerateRequest.adapter`."""
        if self._adapters is None or not self._served:
            return nullcontext()
        if (name or POLICY_ADAPTER) not in self._served:
            return self._adapters.left_out()
        self._adapters.activate(name or POLICY_ADAPTER)
        return nullcontext()

    def _forget_old(self) -> None:
        """Drop caches computed with replaced weights."""
        for batch in self._batches:
            if batch.served is not self._served_to(batch.adapter):
                batch.cache = None
                for sample in batch.samples:
                    sample.num_preempted += 1

    def _receipt(
        self, update: WeightUpdate, sums: PassingChecksums, adapted: Mapping[str, torch.Tensor]
    ) -> WeightReceipt:
        arrived, live = sums.with_probes(self._base())
        problems = [
            f"{len(batch.samples)} samples continue with the cache of version {batch.served.version}."
            for batch in self._batches
            if batch.cache is not None and batch.served is not self._served_to(batch.adapter)
        ]
        if self._adapters is not None:
            problems += self._adapters.problems()
            if update.adapter is not None:
                live |= self._adapters.live(update.adapter.name, adapted)
        return WeightReceipt(version=update.version, arrived=arrived, live=live, problems=tuple(problems))

    def _form_batches(self) -> None:
        room = self._options.max_num_seqs - sum(len(batch.samples) for batch in self._batches)
        if room <= 0 or not self._waiting:
            return
        taken, self._waiting = self._waiting[:room], self._waiting[room:]
        alike: dict[tuple[bool, str | None], list[Sample]] = {}
        for sample in taken:
            alike.setdefault((sample.sampling is None, sample.adapter), []).append(sample)
        self._batches.extend(_Batch(samples, self._way) for samples in alike.values())

    def _advance(self, batch: "_Batch") -> list[Sample]:
        with self._with_adapter(batch.adapter):
            logits = batch.forward(self._model, self._served_to(batch.adapter))
        if batch.is_scoring:
            return batch.finish_scoring(logits)
        sampling = [sample.sampling or SamplingParams(max_tokens=1) for sample in batch.samples]
        logprobs = processed_logprobs(logits[:, -1], sampling)
        positions = [len(sample.token_ids) for sample in batch.samples]
        tokens = draw_tokens(logprobs, sampling, [sample.seed or 0 for sample in batch.samples], positions)
        chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        _add_nucleus(batch.samples, logprobs)
        self._append(batch.samples, tokens.tolist(), chosen.tolist())
        finished = [sample for sample in batch.samples if sample.finish_reason is not None]
        batch.keep([index for index, sample in enumerate(batch.samples) if sample.finish_reason is None])
        return finished

    def _append(self, samples: Sequence[Sample], tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        for sample, token, logprob in zip(samples, tokens, logprobs, strict=True):
            sampling = sample.sampling or SamplingParams(max_tokens=1)
            sample.token_ids.append(token)
            sample.logprobs.append(logprob if sampling.temperature else 0.0)
            sample.policy_versions.append(self._served_to(sample.adapter).version)
            if token in self._end_token_ids or token in sampling.stop_token_ids:
                sample.finish_reason = "stop"
            elif len(sample.token_ids) == sampling.max_tokens:
                sample.finish_reason = "length"


@dataclass(frozen=True, slots=True, eq=False)
class _Served:
    """One set of weights, or adapter, by identity. The same version may be published twice."""

    version: int


class _Batch:
    """Samples that advance together, left-padded to the longest, with their KV cache."""

    def __init__(self, samples: list[Sample], way: "_Way") -> None:
        self.samples, self._way = samples, way
        self.cache: DynamicCache | None = None
        self.served = _Served(0)
        self.is_scoring = samples[0].sampling is None
        self.adapter = samples[0].adapter
        self._mask = torch.empty(0)
        self._offsets: torch.Tensor | int = 0

    def forward(self, model: torch.nn.Module, served: "_Served") -> torch.Tensor:
        """Return [N, T, V] logits of new tokens: at least the last of each sample; when scoring, all."""
        device = next(model.parameters()).device
        if self._way != "cached":
            self.served = served
            groups = [self.samples] if self._way == "padded" else [[sample] for sample in self.samples]
            parts = [self._logits(model, *_padded(_rows(group), device), group, use_cache=False) for group in groups]
            width = max(part.shape[1] for part in parts)
            return torch.cat([torch.nn.functional.pad(part, (0, 0, width - part.shape[1], 0)) for part in parts])
        if self.cache is None:
            ids, self._mask = _padded(_rows(self.samples), device)
            self.cache, self.served = DynamicCache(config=model.config), served
            return self._logits(model, ids, self._mask, self.samples, past_key_values=self.cache)
        ids = torch.tensor([sample.token_ids[-1:] for sample in self.samples], device=device)
        self._mask = torch.cat([self._mask, torch.ones_like(ids)], dim=-1)
        return self._logits(model, ids, self._mask, (), past_key_values=self.cache)

    def _logits(
        self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, whole: Sequence[Sample], **more: Any
    ) -> torch.Tensor:
        """Return [N, T, V] logits, only the last ones where the class can leave out the others.

        Args:
            model: The model.
            ids: [N, T] tokens.
            mask: [N, S] of these tokens, and of those in the cache before them.
            whole: The samples, if ids are all of their tokens; none if they are only new ones.
            more: More arguments of the model.
        """
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        optional: dict[str, Any] = {"logits_to_keep": 0 if self.is_scoring else 1}
        if "past_key_values" in more or not mask.all():  # some classes do not count whole rows from 0
            optional["position_ids"] = positions if whole else positions + self._offsets
        taken = inspect.signature(model.forward).parameters
        more |= {name: value for name, value in optional.items() if name in taken}
        of_images = image_inputs(model, whole, ids, mask) if any(sample.images for sample in whole) else {}
        if whole:
            self._offsets = next_positions(of_images, mask)
        with with_embeddings(model, ids, of_images.get("input_ids")):
            logits: torch.Tensor = model(**({"input_ids": ids, "attention_mask": mask} | more | of_images)).logits
        return logits

    def keep(self, indices: list[int]) -> None:
        """Keep only these samples in the batch and its cache."""
        if len(indices) == len(self.samples):
            return
        self.samples = [self.samples[index] for index in indices]
        if self.cache is None or not indices:
            return
        if all(hasattr(layer, "batch_select_indices") for layer in self.cache.layers):
            kept = torch.tensor(indices, device=self._mask.device)
            self.cache.batch_select_indices(kept)
            self._mask = self._mask[kept]
            self._offsets = self._offsets[kept] if isinstance(self._offsets, torch.Tensor) else self._offsets
        else:  # a layer's state cannot be taken apart, and is computed again
            self.cache = None

    def finish_scoring(self, logits: torch.Tensor) -> list[Sample]:
        """Assign each sample its scores, and empty the batch."""
        finished, self.samples = self.samples, []
        for sample, row in zip(finished, logits, strict=True):
            sample.scores = _scores(row[-len(sample.input_ids) :], sample)
            sample.finish_reason = "stop"
        return finished


def _add_nucleus(samples: Sequence[Sample], logprobs: torch.Tensor) -> None:
    """Note the tokens from which each sample's next one is drawn, from [N, V] logprobs, if requested."""
    if most := max(sample.max_nucleus for sample in samples):
        top = logprobs.topk(min(most + 1, logprobs.shape[-1]), dim=-1)
        for sample, ids, values in zip(samples, top.indices.cpu().numpy(), top.values.cpu().numpy(), strict=True):
            if sample.max_nucleus:
                sample.add_nucleus(ids[: sample.max_nucleus + 1], values[: sample.max_nucleus + 1])


def _scores(logits: torch.Tensor, sample: Sample) -> TokenScores:
    """Return the scores of a sample's tokens, from [T, V] logits after each."""
    logprobs = logits[:-1].float().log_softmax(-1)
    tokens = torch.tensor(sample.input_ids[1:], device=logits.device, dtype=torch.int64).unsqueeze(-1)
    likeliest = logprobs.topk(sample.top_k, dim=-1).indices
    token_ids = torch.cat([tokens, likeliest], dim=-1)
    return TokenScores.after_first(token_ids.cpu().numpy(), logprobs.gather(-1, token_ids).cpu().numpy())


_Way = Literal["cached", "padded", "alone"]
"""How a batch advances: with a cache; recomputed, with its rows padded on the left; or recomputed row by row."""

ROUNDING_FLOAT32, ROUNDING_BFLOAT16 = 1e-4, 0.05
"""Maximum mean difference of logprobs, in nats, by rounding alone; in tests, it is at most 3e-6 and 0.03."""


def _rows(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.input_ids + sample.token_ids for sample in samples]


def _padded(rows: Sequence[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N, T] ids of rows, padded on the left, and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, (torch.arange(width, device=device) >= width - lengths.unsqueeze(-1)).long()


@torch.inference_mode()
def _choose_way(model: PreTrainedModel) -> _Way:
    """Return the fastest way to advance a batch that gives the logits of its rows alone."""
    vocab_size = model.config.get_text_config().vocab_size
    samples = [
        Sample(input_ids=[token % vocab_size for token in tokens], sampling=SamplingParams(max_tokens=4), seed=0)
        for tokens in ((1, 2, 3, 4, 5), (6, 7), (3, 8, 9))
    ]
    ways: tuple[_Way, ...] = ("cached", "padded")
    for way in ways:
        batch, worst = _Batch(list(samples), way), 0.0
        try:
            for _ in range(2):  # at first three samples, then two of them
                found = batch.forward(model, _Served(0))[:, -1].float().log_softmax(-1)
                own = _Batch(batch.samples, "alone").forward(model, _Served(0))[:, -1].float().log_softmax(-1)
                worst = max(worst, float((found - own).abs().mean()))
                for sample in samples:
                    sample.token_ids.append(1)
                batch.keep([0, 2])
        except Exception as error:  # a class may refuse it in any way
            log.info("batches_advance_otherwise", than=way, error=f"{type(error).__name__}: {error}")
            worst = float("inf")
        for sample in samples:
            sample.token_ids.clear()
        if worst <= _most(model):
            return way
        log.warning("slow_batches", architecture=type(model).__name__, cannot=way)
    return "alone"


@torch.inference_mode()
def _choose_attention(model: PreTrainedModel) -> None:
    """Compute attention as the class itself does where torch's kernel differs, for example without a cap of scores."""
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    chosen, ignored = model.config._attn_implementation, set[str]()

    def noting(*args: Any, **others: Any) -> Any:
        ignored.update(name for name in ("softcap", "s_aux") if others.get(name) is not None)
        return sdpa_attention_forward(*args, **others)

    def logprobs() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return logits.float().log_softmax(-1)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = noting
    try:
        fast = logprobs()
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        model.set_attn_implementation("eager")
        difference = float((fast - logprobs()).abs().mean())
    except Exception as error:  # a class may lack it
        log.info("attention_not_compared", architecture=type(model).__name__, error=f"{type(error).__name__}: {error}")
        return
    if difference <= _most(model) and not ignored:
        model.set_attn_implementation(chosen)


def _most(model: PreTrainedModel) -> float:
    return ROUNDING_FLOAT32 if model.dtype == torch.float32 else ROUNDING_BFLOAT16


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bar, which would overwrite the run's own."""
    was_enabled = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            enable_progress_bar()


def processed_logprobs(logits: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the logprobs of each row's sampling distribution: temperature, then top_k, then top_p.

    Args:
        logits: [N, V].
        sampling: One per row. Temperature 0 leaves the row unchanged.

    Returns:
        [N, V] float32; -inf for tokens that cannot be sampled.
    """
    temperatures = torch.tensor([params.temperature or 1.0 for params in sampling], device=logits.device)
    scaled = logits.float() / temperatures.unsqueeze(-1)
    if any(params.top_k is not None or params.top_p < 1 for params in sampling):
        scaled = torch.stack([_filtered(row, params) for row, params in zip(scaled, sampling, strict=True)])
    return scaled.log_softmax(-1)


def draw_tokens(
    logprobs: torch.Tensor, sampling: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """Sample one token per row: the most likely at temperature 0, else determined by seed and position.

    Args:
        logprobs: [N, V] float32 of `processed_logprobs`.
        sampling: One per row.
        seeds: One per row.
        positions: Index of the token in its response, one per row.

    Returns:
        [N] int64.
    """
    greedy = logprobs.argmax(-1)
    if all(params.temperature == 0 for params in sampling):
        return greedy
    uniforms = [_uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    cumulative = logprobs.double().exp().cumsum(-1)
    marks = torch.tensor(uniforms, dtype=torch.float64, device=logprobs.device).unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, marks, right=True).squeeze(-1)
    # A mark beyond the last token that can be drawn is due to rounding.
    last = logprobs.shape[-1] - 1 - torch.isfinite(logprobs).flip(-1).int().argmax(-1)
    is_greedy = torch.tensor([params.temperature == 0 for params in sampling], device=logprobs.device)
    return torch.where(is_greedy, greedy, torch.minimum(drawn, last))


def _uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) from a counter-based generator."""
    key = seed % 2**64
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


def _filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return [V] logits, with -inf for tokens that top_k or top_p excludes."""
    if params.top_k is not None and params.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        is_out = probabilities.cumsum(-1) - probabilities >= params.top_p
        logits = logits.masked_fill(torch.zeros_like(is_out).scatter(0, order, is_out), -torch.inf)
    return logits
