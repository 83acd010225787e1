"""Protocols of learners: logprobs, optimizer steps, weights, checkpoints."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from rl_core.data import Batch, Ragged
from rl_core.record_fields import record
from rl_core.weights import WeightUpdate
from rl_core.weights.broadcast import SenderOptions
from rl_distill.background import PendingSave
from rl_distill.options import AdamOptions, LearnerOptions

__all__ = [
    "FIRST_ADAPTER",
    "AccumulatingLearner",
    "AdapterLearner",
    "ForwardBackwardResult",
    "Learner",
    "LearnerOptions",
    "MetricSums",
    "MicroBatch",
    "MultiAdapterLearner",
    "Objective",
    "OptimStepResult",
    "PendingSave",
    "RankedLearner",
    "StepResult",
]

FIRST_ADAPTER = "default"
"""Name of the adapter that a learner starts with, as in peft."""

MetricSums = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Metric sums of micro-batches and ranks, by name.

For each metric, the pair (weighted sum, weight), both scalar tensors, summed over micro-batches and ranks. A metric
whose name ends in `_min` or `_max` has the pair (extreme, number of values), and is reduced to the extreme.
"""


@record
class MicroBatch:
    """Complete trajectories packed end to end, with all tensors on the learner's device.

    Attributes:
        input_ids: [T] int64.
        position_ids: [T] int64, from 0 in each trajectory.
        offsets: [S + 1] int64; trajectory i is [offsets[i]:offsets[i + 1]].
        columns: Token columns [T] of the batch by name (loss_mask, loss_weights, advantages, ...), as
            float32 or bool, aligned with input_ids.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    offsets: torch.Tensor
    columns: Mapping[str, torch.Tensor]


Objective = Callable[[torch.Tensor, torch.Tensor | None, MicroBatch], tuple[torch.Tensor, MetricSums]]
"""(policy_logprobs [T], entropy [T] or None, micro-batch) -> (loss summed over the micro-batch's tokens with
`loss_weights`, metric sums). policy_logprobs[t] belongs to token t; it is 0 at the first token of each trajectory.
In batches with the column `target_ids`, policy_logprobs are [T] or [T, K]: those of these ids. In batches with
`nucleus_ids`, logprobs and entropy are those of the distributions that top-k and top-p truncated to these tokens."""


ValueLoss = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, MetricSums]]
"""(values [T], micro-batch) -> (loss, metric sums): the `Objective` of a critic."""


@record
class ForwardBackwardResult:
    """Result of a forward and backward pass over a batch.

    Attributes:
        loss: Loss over the whole batch.
        metrics: Weighted means and extremes of the objective's metrics.
        broken_rows: Rows of the batch with a value that is not finite, where they could be identified.
        tokens: float32 columns aligned with input_ids, 0 outside `loss_mask`: "policy_logprobs", before the update, and
            "entropy". Empty unless requested.
        computed_tokens: Tokens that the pass computed; fewer than the batch has if rows share prefixes.
    """

    loss: float
    metrics: Mapping[str, float]
    broken_rows: tuple[int, ...] = ()
    tokens: Mapping[str, Ragged] = field(default_factory=dict)
    computed_tokens: int = 0


@record
class OptimStepResult:
    """Result of one optimizer step on the gradients of any number of batches.

    Attributes:
        step: Optimizer steps taken so far, including this one if it was applied.
        grad_norm: Global norm before clipping; NaN if the loss is not finite.
        learning_rate: Learning rate of this step.
        is_applied: False if the loss or gradient norm is not finite; the step was then skipped and the weights are
            unchanged.
    """

    step: int
    grad_norm: float
    learning_rate: float
    is_applied: bool = True


@record
class StepResult(ForwardBackwardResult):
    """Result of one optimizer step on a global batch; see also `OptimStepResult`.

    Attributes:
        step: Optimizer steps taken so far, including this one if it was applied.
        grad_norm: Global norm before clipping.
        learning_rate: Learning rate of this step.
        is_applied: False if the step was skipped.
    """

    step: int
    grad_norm: float
    learning_rate: float
    is_applied: bool = True


class Model(Protocol):
    """A model of a run."""

    def offload(self) -> int:
        """Free memory until the next call, which restores everything; return the bytes freed over all ranks."""
        ...

    def close(self) -> None:
        """Free everything. Can be called twice."""
        ...


class Scorer(Model, Protocol):
    """A model that computes logprobs of tokens."""

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Ragged:
        """Return float32 logprobs of the tokens of each trajectory, aligned with input_ids; 0 at the first token.

        A batch with the column `target_ids` gets the logprobs of these instead, without meaning where an id is -1.
        With `nucleus_ids`, the distributions are truncated to these tokens.
        """
        ...


class Trained(Model, Protocol):
    """A model in training. Call it from one thread at a time."""

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        ...

    def save(self, directory: Path, *, in_background: bool = False) -> PendingSave:
        """Write a checkpoint into an empty directory.

        `policy/` is a Hugging Face folder of the weights; a critic's is a token classifier with one label. `state/` has
        float32 weights and Adam's moments in torch's distributed format, which loads under any parallel layout.
        `learner.json` has the step and is written last. With an adapter, `adapter/` in peft's format replaces
        `policy/`, and `state/` has no base weights.

        Args:
            directory: Created if it does not exist.
            in_background: Return as soon as the state is copied; use the returned handle to wait for the write.

        Raises:
            CheckpointError: The directory is not empty.
        """
        ...

    def load(self, directory: Path) -> None:
        """Resume from a checkpoint that `save` wrote.

        Raises:
            CheckpointError: The checkpoint is missing, incomplete or of another model.
        """
        ...


class Learner(Scorer, Trained, Protocol):
    """A policy in training."""

    @property
    def num_parameters(self) -> int:
        """Parameters of the policy."""
        ...

    def train_step(
        self,
        batch: Batch,
        objective: Objective,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_tokens: bool = False,
    ) -> StepResult:
        """Take one optimizer step on the whole batch, which needs the column `loss_weights`.

        A step whose loss or gradient norm is not finite is skipped; see `StepResult.is_applied`.

        Args:
            batch: Complete groups.
            objective: Loss to minimise.
            temperature: Sampling temperature of the batch.
            with_entropy: Pass the entropy to the objective.
            with_tokens: Fill `StepResult.tokens`.

        Raises:
            ShapeError: A needed column is missing, or no token of the batch trains.
        """
        ...

    def export_weights(self) -> Mapping[str, torch.Tensor]:
        """Return all weights by Hugging Face name, adapter merged; may be views, valid until the next step."""
        ...

    @property
    def tied(self) -> Mapping[str, str]:
        """Return names that share another's tensor, such as {"lm_head.weight": "model.embed_tokens.weight"}."""
        ...


class AccumulatingLearner(Learner, Protocol):
    """A learner whose optimizer steps can use the gradients of several batches.

    `train_step` is `forward_backward` and `optim_step`. It is refused, as are `save` and `load`, while gradients of
    `forward_backward` wait for `optim_step`.
    """

    def forward_backward(
        self,
        batch: Batch,
        objective: Objective,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_tokens: bool = False,
    ) -> ForwardBackwardResult:
        """Add the gradients of a batch to those that wait for `optim_step`. Arguments are those of `train_step`.

        A batch whose `loss_weights` are all 0 adds zeros. An error leaves the gradients that wait unchanged, unless it
        stops the learner, as errors of ranks in other processes do.

        Raises:
            ShapeError: A needed column is missing.
        """
        ...

    def optim_step(self, options: AdamOptions | None = None) -> OptimStepResult:
        """Take one optimizer step with the gradients that wait, zeros if there are none, and clear them.

        The step is skipped if one of their losses or the gradient norm is not finite; see
        `OptimStepResult.is_applied`.

        Args:
            options: Settings of this step; None uses those of `LearnerOptions`.
        """
        ...

    def zero_grad(self) -> None:
        """Discard the gradients that wait for `optim_step`."""
        ...


class AdapterLearner(Learner, Protocol):
    """A learner that trains an adapter."""

    def export_adapter(self) -> Mapping[str, torch.Tensor]:
        """Return A and B of each adapted matrix by peft's name, B scaled: W + B @ A is the policy."""
        ...

    def export_base(self) -> Mapping[str, torch.Tensor]:
        """Return the frozen weights under the adapter by Hugging Face name."""
        ...


class MultiAdapterLearner(AdapterLearner, AccumulatingLearner, Protocol):
    """A learner that trains several adapters over one base in turn, each as if it were alone.

    All methods of the learner act on the selected adapter, and exported views are valid while it is selected. The
    others keep A, B, moments, step and waiting gradients in host memory.
    """

    @property
    def adapter(self) -> str:
        """Name of the selected adapter; at first `FIRST_ADAPTER`."""
        ...

    def add_adapter(
        self, name: str, *, seed: int | None = None, rank: int | None = None, frozen: Sequence[str] = ()
    ) -> None:
        """Start an adapter as the learner started its first one, and select it.

        Args:
            name: A name that no other adapter has.
            seed: Seed of A; None uses the learner's.
            rank: Rank up to the learner's, which is the default. A and B are padded with zeros, which stay zero, and
                the product is scaled for this rank.
            frozen: Shell patterns of Hugging Face names, such as "*.mlp.*", of matrices whose A and B stay zero.

        Raises:
            SettingsError: Another adapter has this name, or the rank is too high.
            NotReadyError: The learner trains all weights.
        """
        ...

    def select_adapter(self, name: str) -> None:
        """Continue another adapter.

        Raises:
            SettingsError: No adapter has this name.
        """
        ...

    def load(self, directory: Path, *, with_optimizer: bool = True) -> None:
        """Resume from a checkpoint that `save` wrote, or start at step 0 with its weights."""
        ...

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            SettingsError: No adapter has this name, or it is selected.
        """
        ...


class RankedLearner(Learner, Protocol):
    """A learner whose ranks send their weights directly to engines."""

    def offer_weights(self, options: SenderOptions, *, version: int) -> WeightUpdate:
        """Let engines fetch each rank's part of the weights, until the weights change.

        Raises:
            WeightProofError: The ranks' parts of a tensor do not cover it; the message names the tensor.
        """
        ...

    def expect_engines(self, num_receivers: int) -> None:
        """Set how many engines the ranks expect. Thread-safe."""
        ...


class Critic(Trained, Protocol):
    """A critic in training. Arguments and errors are those of `Learner`."""

    def values(self, batch: Batch) -> Ragged:
        """Return float32 values of the state before each token of each trajectory; 0 at the first token."""
        ...

    def train_step(self, batch: Batch, objective: ValueLoss) -> StepResult:
        """Take one optimizer step on the whole batch; see `Learner.train_step`."""
        ...


Totals = Mapping[str, tuple[float, float]]


def metric_totals(sums: Iterable[MetricSums | Totals]) -> dict[str, tuple[float, float]]:
    """Return (weighted sum, weight) of each metric over micro-batches, or (extreme, weight) of an extreme."""
    return _joined({name: (float(value), float(weight)) for name, (value, weight) in part.items()} for part in sums)


def metric_values(totals: Iterable[Totals]) -> dict[str, float]:
    """Return weighted means and extremes over ranks, without metrics of weight 0."""
    joined = _joined(totals)
    return {name: value if _extreme(name) else value / weight for name, (value, weight) in joined.items() if weight}


def _extreme(name: str) -> np.ufunc | None:
    """Return the function that merges two extremes, keeping NaN; None for a metric that is a mean."""
    return np.maximum if name.endswith("_max") else np.minimum if name.endswith("_min") else None


def _joined(totals: Iterable[Totals]) -> dict[str, tuple[float, float]]:
    joined: dict[str, tuple[float, float]] = {}
    for part in totals:
        for name, (value, weight) in part.items():
            before, weight_before = joined.get(name, (0.0, 0.0))
            extreme = _extreme(name)
            if extreme is None:
                value += before
            elif not weight:
                value = before
            elif weight_before:
                value = float(extreme(before, value))
            joined[name] = (value, weight_before + weight)
    return joined
