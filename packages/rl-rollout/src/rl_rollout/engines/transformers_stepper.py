"""A Hugging Face causal model as a `Stepper`. Importing this imports torch and transformers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers import __version__ as transformers_version
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from rl_core.errors import EngineError
from rl_core.weights import WeightReceipt, WeightUpdate, probe_tensor, tensor_crc32c
from rl_rollout.engines.model_folder import end_token_ids, has_tokenizer, max_positions
from rl_rollout.engines.options import TransformersOptions
from rl_rollout.engines.protocol import EngineTraits, SamplingParams, Structure, TokenScores
from rl_rollout.engines.sampling import draw_tokens, processed_logprobs
from rl_rollout.engines.stepper import Sample
from rl_rollout.engines.weight_checks import check_update, each_expert, update_tensors


class TransformersStepper:
    """A model and the batches under way; samples admitted together are one batch with a KV cache of its own."""

    def __init__(self, model_dir: Path, options: TransformersOptions) -> None:
        """Load the model; no code of the folder runs.

        Raises:
            EngineError: transformers cannot load it.
        """
        self._options = options
        dtype: torch.dtype = getattr(torch, options.dtype)
        try:
            with _no_progress_bar():
                model = AutoModelForCausalLM.from_pretrained(
                    model_dir, dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # of many kinds for a damaged folder
            raise EngineError(
                f"{model_dir}: transformers cannot load the model ({type(error).__name__}: {error})."
            ) from error
        self._model = model.to(options.device).eval().requires_grad_(False)
        self._end_token_ids = frozenset(end_token_ids(model_dir))
        self._seeds = np.random.default_rng(options.seed)
        self._waiting: list[Sample] = []
        self._batches: list[_Batch] = []
        self._version = 0
        vocab_size: int = self._model.get_input_embeddings().weight.shape[0]
        self._traits = EngineTraits(
            name=f"transformers {transformers_version} ({options.device}, {options.dtype})",
            max_model_len=options.max_model_len or max_positions(model_dir),
            vocab_size=vocab_size,
            max_top_k=vocab_size,
            can_sleep=torch.device(options.device).type == "cuda",
            can_match_text=has_tokenizer(model_dir),
        )

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
        self._form_batches()
        finished: list[Sample] = []
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
        tensors = update_tensors(update)
        live = each_expert(self._model.state_dict())
        check_update(update, tensors, {name: tuple(live[name].shape) for name in live if name not in update.tied})
        arrived = {name: tensor_crc32c(tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            live[name].copy_(tensor)
        for batch in self._batches:
            batch.cache = None
            for sample in batch.samples:
                sample.num_preempted += 1
        self._version = update.version
        served = {name: probe_tensor(tensor) for name, tensor in each_expert(self._model.state_dict()).items()}
        return WeightReceipt(version=update.version, arrived=arrived, live=served)

    def reset_prefix_cache(self) -> None:
        """See `Stepper.reset_prefix_cache`; nothing is kept from one batch to the next."""

    def sleep(self) -> None:
        """See `Stepper.sleep`: the weights go to the host."""
        self._model.to("cpu")
        torch.cuda.empty_cache()

    def wake(self) -> None:
        """See `Stepper.wake`."""
        self._model.to(self._options.device)

    def prepare(self, structure: Structure) -> None:
        """See `Stepper.prepare`; its traits have none."""

    def close(self) -> None:
        """See `Stepper.close`."""
        self._batches.clear()
        self._waiting.clear()
        del self._model

    def _form_batches(self) -> None:
        room = self._options.max_num_seqs - sum(len(batch.samples) for batch in self._batches)
        if room <= 0 or not self._waiting:
            return
        taken, self._waiting = self._waiting[:room], self._waiting[room:]
        for is_scoring in (False, True):
            samples = [sample for sample in taken if (sample.sampling is None) is is_scoring]
            if samples:
                self._batches.append(_Batch(samples))

    def _advance(self, batch: "_Batch") -> list[Sample]:
        logits = batch.forward(self._model)
        if batch.is_scoring:
            return batch.finish_scoring(logits)
        sampling = [sample.sampling or SamplingParams(max_tokens=1) for sample in batch.samples]
        logprobs = processed_logprobs(logits[:, -1], sampling)
        positions = [len(sample.token_ids) for sample in batch.samples]
        tokens = draw_tokens(logprobs, sampling, [sample.seed or 0 for sample in batch.samples], positions)
        chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        self._append(batch.samples, tokens.tolist(), chosen.tolist())
        finished = [sample for sample in batch.samples if sample.finish_reason is not None]
        batch.keep([index for index, sample in enumerate(batch.samples) if sample.finish_reason is None])
        return finished

    def _append(self, samples: Sequence[Sample], tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        for sample, token, logprob in zip(samples, tokens, logprobs, strict=True):
            sampling = sample.sampling or SamplingParams(max_tokens=1)
            sample.token_ids.append(token)
            sample.logprobs.append(logprob if sampling.temperature else 0.0)
            sample.policy_versions.append(self._version)
            if token in self._end_token_ids or token in sampling.stop_token_ids:
                sample.finish_reason = "stop"
            elif len(sample.token_ids) == sampling.max_tokens:
                sample.finish_reason = "length"


class _Batch:
    """Samples that advance together, left-padded to the longest, with their KV cache."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
        self.cache: DynamicCache | None = None
        self.is_scoring = samples[0].sampling is None
        self._mask = torch.empty(0)

    def forward(self, model: torch.nn.Module) -> torch.Tensor:
        """[N, T, V] logits of what is new: everything after the start or an update of the weights, else one token."""
        device = next(model.parameters()).device
        if self.cache is None:
            rows = [sample.input_ids + sample.token_ids for sample in self.samples]
            width = max(len(row) for row in rows)
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
            lengths = torch.tensor([len(row) for row in rows], device=device)
            self._mask = (torch.arange(width, device=device) >= width - lengths.unsqueeze(-1)).long()
            self.cache = DynamicCache(config=model.config)
        else:
            ids = torch.tensor([[sample.token_ids[-1]] for sample in self.samples], device=device)
            self._mask = torch.cat([self._mask, torch.ones_like(ids)], dim=-1)
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits: torch.Tensor = model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self.cache,
            logits_to_keep=0 if self.is_scoring else 1,
        ).logits
        return logits

    def keep(self, indices: list[int]) -> None:
        """Drop all samples but these from the batch and its cache."""
        if len(indices) == len(self.samples):
            return
        self.samples = [self.samples[index] for index in indices]
        if self.cache is not None and indices:
            kept = torch.tensor(indices, device=self._mask.device)
            self.cache.batch_select_indices(kept)
            self._mask = self._mask[kept]

    def finish_scoring(self, logits: torch.Tensor) -> list[Sample]:
        """Give each sample its scores; the batch is empty afterwards."""
        finished, self.samples = self.samples, []
        for sample, row in zip(finished, logits, strict=True):
            sample.scores = _scores(row[-len(sample.input_ids) :], sample)
            sample.finish_reason = "stop"
        return finished


def _scores(logits: torch.Tensor, sample: Sample) -> TokenScores:
    """Of a sample's tokens, from [T, V] logits after each."""
    logprobs = logits[:-1].float().log_softmax(-1)
    tokens = torch.tensor(sample.input_ids[1:], device=logits.device, dtype=torch.int64).unsqueeze(-1)
    likeliest = logprobs.topk(sample.top_k, dim=-1).indices
    token_ids = torch.cat([tokens, likeliest], dim=-1)
    return TokenScores.after_first(token_ids.cpu().numpy(), logprobs.gather(-1, token_ids).cpu().numpy())


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A run shows its own; transformers' would draw over it."""
    was_enabled = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            enable_progress_bar()
