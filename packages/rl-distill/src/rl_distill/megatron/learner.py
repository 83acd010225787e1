"""The Megatron learner: megatron-core's model, data parallelism, schedule and optimizer, on packed trajectories."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rl_core.batch import Batch
from rl_core.ragged import Ragged
from rl_distill.checkpoint import LearnerState, read_checkpoint, write_checkpoint
from rl_distill.learner import LearnerOptions, MetricSums, Objective, StepResult
from rl_distill.megatron.convert import from_megatron, to_megatron, whole_policy
from rl_distill.megatron.cpu import install_cpu_compatibility
from rl_distill.megatron.layout import packed_layout
from rl_distill.megatron.model import Scored
from rl_distill.megatron.optimizer import MegatronAdam
from rl_distill.megatron.parallel import Rank, initialize_rank, learner_device
from rl_distill.megatron.rotary import rotary_frequencies
from rl_distill.megatron.setup import build_policy
from rl_distill.packing import Pack, pack_batch, scored_tokens, unpack_values
from rl_distill.schedule import learning_rate_at
from rl_distill.stepping import (
    check_finite,
    check_open,
    check_trainable,
    metric_means,
    open_policy,
    parameter_dtype,
)


@dataclass(slots=True)
class _Gathered:
    """What the micro-batches of a step gave."""

    losses: list[Tensor] = field(default_factory=list)
    metrics: list[MetricSums] = field(default_factory=list)


class MegatronLearner:
    """Trains a policy with megatron-core, on a GPU or a CPU; see `rl_distill.learner.Learner`."""

    def __init__(self, policy: Path | Mapping[str, Any], options: LearnerOptions, *, rank: Rank | None = None) -> None:
        """Build the policy on this process's device.

        Args:
            policy: A Hugging Face folder with safetensors, or a config.json's content for random weights.
            options: How to train.
            rank: This process among the learner's; None for a single one.

        Raises:
            SettingsError: The architecture or a setting is not supported.
            DataError: A file or tensor of the folder is missing or torn.
            MissingExtraError: megatron-core is not installed.
        """
        self._options = options
        self._source = open_policy(policy)
        dtype = parameter_dtype(options)
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        install_cpu_compatibility()
        initialize_rank(rank or Rank(), seed=options.seed)
        self._device = learner_device()
        self._frequencies = rotary_frequencies(self._source.config).to(self._device)
        self._shard = whole_policy(self._source.config)
        self._model = build_policy(self._source, self._shard, dtype=dtype, seed=options.seed, device=self._device)
        self._adam = MegatronAdam(self._model, options)
        self._model.config.finalize_model_grads_func = _finalize_without_division
        self._model.config.grad_scale_func = None
        self._step = 0
        self._is_open = True

    @property
    def step(self) -> int:
        """Optimizer steps done so far."""
        return self._step

    @property
    def num_parameters(self) -> int:
        """Parameters of the policy; a tied head counts once."""
        check_open(self._is_open)
        return sum(parameter.numel() for parameter in self._model.parameters())

    @property
    def tied(self) -> Mapping[str, str]:
        """Names served from another tensor."""
        return self._source.config.tied

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Ragged:
        """Logprobs of all tokens, float32, in the batch's row order, first token 0."""
        check_open(self._is_open)
        packs = self._packs(batch)

        def scatter(pack: Pack, scored: Tensor, scores: Scored, **_: object) -> Tensor:
            return _spread(scores.logprobs, scored, pack)

        values = self._run(packs, scatter, temperature=temperature, mask=None)
        return unpack_values(packs, values, batch)

    def train_step(
        self, batch: Batch, objective: Objective, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> StepResult:
        """One optimizer step on the whole batch; logprobs are those of `loss_mask`, others stay 0.

        Raises:
            ShapeError: loss_weights is missing or all zero.
            NonFiniteError: Loss or gradients are not finite; the weights are unchanged.
        """
        check_open(self._is_open)
        check_trainable(batch)
        step = self._step + 1
        gathered = _Gathered()

        def evaluate(pack: Pack, scored: Tensor, scores: Scored) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            entropy = _spread(scores.entropy, scored, pack) if with_entropy else None
            loss, sums = objective(_spread(scores.logprobs, scored, pack), entropy, pack.micro_batch)
            gathered.losses.append(loss.detach())
            gathered.metrics.append(sums)
            return loss, torch.zeros((), dtype=torch.int), {}

        self._model.zero_grad_buffer()
        self._adam.zero_grad()
        mask = "loss_mask" if "loss_mask" in batch else None
        self._run(self._packs(batch), evaluate, temperature=temperature, mask=mask, with_gradients=True)
        loss = sum(float(value) for value in gathered.losses)
        check_finite("the loss", loss, step=step)
        learning_rate = learning_rate_at(step, self._options)
        grad_norm = self._adam.grad_norm()
        check_finite("the gradient norm", grad_norm, step=step)
        self._adam.step(grad_norm, learning_rate=learning_rate)
        self._step = step
        return StepResult(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            metrics=metric_means(gathered.metrics),
        )

    def export_weights(self) -> Mapping[str, Tensor]:
        """All weights by Hugging Face name; views where the layout allows, valid until the next step."""
        check_open(self._is_open)
        return self._from_megatron({name: p.detach() for name, p in self._parameters().items()})

    def save(self, directory: Path) -> None:
        """Write a checkpoint into an empty directory.

        Raises:
            CheckpointError: The directory has files in it.
        """
        check_open(self._is_open)
        parameters = self._parameters()
        master = self._adam.master_weights(parameters)
        state = LearnerState(
            step=self._step,
            weights=self.export_weights(),
            exp_avg=self._from_megatron(self._adam.moments(parameters, "exp_avg")),
            exp_avg_sq=self._from_megatron(self._adam.moments(parameters, "exp_avg_sq")),
            master=None if master is None else self._from_megatron(master),
        )
        write_checkpoint(directory, state, source=self._source, options=self._options)

    def load(self, directory: Path) -> None:
        """Continue from `save`.

        Raises:
            CheckpointError: Missing, torn, or of another model; the learner is unchanged.
        """
        check_open(self._is_open)
        config = self._source.config
        state = read_checkpoint(directory, config=config, dtype=self._options.dtype)
        parameters = self._parameters()
        with torch.no_grad():
            for name, tensor in to_megatron(state.weights, config, self._shard).items():
                parameters[name].copy_(tensor)
        moments = {
            "exp_avg": to_megatron(state.exp_avg, config, self._shard),
            "exp_avg_sq": to_megatron(state.exp_avg_sq, config, self._shard),
        }
        master = None if state.master is None else to_megatron(state.master, config, self._shard)
        self._adam.load(parameters, step=state.step, moments=moments, master=master)
        self._step = state.step

    def close(self) -> None:
        """Free the model; the process groups stay, for others in the process may use them."""
        if self._is_open:
            self._is_open = False
            del self._model, self._adam

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name.removeprefix("module."): p for name, p in self._unwrapped().named_parameters()}

    def _unwrapped(self) -> torch.nn.Module:
        return self._model.module  # type: ignore[no-any-return]

    def _from_megatron(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return from_megatron([state], self._source.config, self._shard)

    def _packs(self, batch: Batch) -> list[Pack]:
        return pack_batch(batch, max_tokens=self._options.micro_batch_tokens, device=self._device)

    def _run(
        self, packs: list[Pack], evaluate: Any, *, temperature: float, mask: str | None, with_gradients: bool = False
    ) -> list[Any]:
        """megatron's schedule over the packs; `evaluate` sees the scores of each.

        Returns:
            What `evaluate` gave for each pack, without gradients; with them, nothing of use.
        """
        if not packs:
            return []

        def forward_step(source: Iterator[Pack], model: torch.nn.Module) -> tuple[Any, Any]:
            pack = next(source)
            scored = scored_tokens(pack, mask=mask)
            output = self._score(model, pack, scored, temperature)
            return output, partial(_call_evaluate, evaluate, pack, scored)

        with nullcontext() if with_gradients else torch.no_grad():
            return get_forward_backward_func()(  # type: ignore[no-any-return]
                forward_step_func=forward_step,
                data_iterator=iter(packs),
                model=self._model,
                num_microbatches=len(packs),
                seq_length=max(int(pack.offsets[-1]) for pack in packs),
                micro_batch_size=1,
                forward_only=not with_gradients,
                collect_non_loss_data=not with_gradients,
            )

    def _score(self, model: torch.nn.Module, pack: Pack, scored: Tensor, temperature: float) -> Any:
        config, micro_batch = self._source.config, pack.micro_batch
        layout = packed_layout(
            micro_batch.position_ids,
            pack.offsets,
            frequencies=self._frequencies,
            head_counts=(config.num_heads, config.num_key_value_heads),
        )
        return model(
            micro_batch.input_ids, micro_batch.position_ids, layout=layout, scored=scored, temperature=temperature
        )


def _call_evaluate(evaluate: Any, pack: Pack, scored: Tensor, scores: Scored, non_loss_data: bool = False) -> Any:  # noqa: ARG001 - megatron passes it
    return evaluate(pack, scored, scores)


def _spread(values: Tensor, scored: Tensor, pack: Pack) -> Tensor:
    """[T] with the values at the scored tokens and 0 elsewhere."""
    out = torch.zeros(len(pack.micro_batch.input_ids), dtype=values.dtype, device=values.device)
    return out.index_copy(0, scored, values)


def _finalize_without_division(model: list[Any], _num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Sum gradients over ranks; loss_weights already normalise over the global batch."""
    finalize_model_grads(model, None, **kwargs)
