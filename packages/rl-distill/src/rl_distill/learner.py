"""What every learner does: logprobs, optimizer steps, weights, checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Protocol

import torch

from rl_core.data import Batch, Ragged
from rl_core.record_fields import record
from rl_core.weights import WeightUpdate
from rl_core.weights.broadcast import SenderOptions
from rl_distill.checkpoints.pending_save import PendingSave
from rl_distill.options import LearnerOptions

__all__ = [
    "AdapterLearner",
    "Learner",
    "LearnerOptions",
    "MetricSums",
    "MicroBatch",
    "Objective",
    "PendingSave",
    "RankedLearner",
    "StepResult",
]

MetricSums = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""For each metric the pair (weighted sum, weight), both scalar tensors, so that micro-batches and ranks add up. Of a
metric whose name ends in `_min` or `_max` the pair (extreme, number of values); the extreme of all counts."""


@record
class MicroBatch:
    """Whole trajectories packed end to end; everything is on the learner's device.

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
`loss_weights`, metric sums). policy_logprobs[t] belongs to token t; it is 0 at the first token of each trajectory."""


ValueLoss = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, MetricSums]]
"""(values [T], micro-batch) -> (loss, metric sums), as an `Objective` of a critic."""


@record
class StepResult:
    """What one optimizer step did.

    Attributes:
        step: Optimizer steps done, this one among them.
        loss: The objective over the whole global batch.
        grad_norm: Global norm before clipping.
        learning_rate: Used by this step.
        metrics: Weighted means of the objective's metric sums, and its extremes.
        is_applied: False where loss or gradient norm is not finite: the step was skipped, the weights stay.
        broken_rows: Rows of the batch in which something is not finite, where that was found out.
        tokens: Of each trained token of the batch, aligned with input_ids and 0 elsewhere, float32: "policy_logprobs",
            before the update, and "entropy". Empty unless they were asked for.
        computed_tokens: Tokens that the step computed; less than the batch has where rows begin alike.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
    is_applied: bool = True
    broken_rows: tuple[int, ...] = ()
    tokens: Mapping[str, Ragged] = field(default_factory=dict)
    computed_tokens: int = 0


class Scorer(Protocol):
    """A policy that says how likely tokens are to it."""

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Ragged:
        """Logprobs of the tokens of each trajectory, float32, aligned with input_ids, first token 0."""
        ...

    def offload(self) -> int:
        """Free memory until the next call, which brings everything back; gives the bytes freed, over all ranks."""
        ...

    def close(self) -> None:
        """Free everything. Can be called twice."""
        ...


class Learner(Scorer, Protocol):
    """A policy in training. One caller at a time."""

    @property
    def step(self) -> int:
        """Optimizer steps done so far."""
        ...

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
        """One optimizer step on the whole batch; the batch needs `loss_weights`.

        A step whose loss or gradients are not finite is skipped: see `StepResult.is_applied`.

        Args:
            batch: Whole groups.
            objective: What is minimised.
            temperature: That the batch was sampled with.
            with_entropy: The objective is given the entropy.
            with_tokens: The result has `StepResult.tokens`.

        Raises:
            ShapeError: A needed column is missing or nothing in the batch trains.
        """
        ...

    def export_weights(self) -> Mapping[str, torch.Tensor]:
        """All weights by Hugging Face name, an adapter merged into them; may be views, valid until the next step."""
        ...

    @property
    def tied(self) -> Mapping[str, str]:
        """Names served from another tensor, such as {"lm_head.weight": "model.embed_tokens.weight"}."""
        ...

    def save(self, directory: Path, *, in_background: bool = False) -> PendingSave:
        """Write a checkpoint into an empty directory.

        `policy/` is a Hugging Face folder of the weights, `state/` has float32 weights and Adam's moments in torch's
        distributed format, which loads under any parallel layout, and `learner.json` the step; it is written last. Of
        an adapter, `adapter/` in peft's format takes the place of `policy/`, and `state/` has nothing of the base.

        Args:
            directory: Is made where it does not exist.
            in_background: Return when the state is copied; what is returned then says when it is written.

        Raises:
            CheckpointError: The directory has files in it.
        """
        ...

    def load(self, directory: Path) -> None:
        """Continue from `save`.

        Raises:
            CheckpointError: Missing, torn, or of another model.
        """
        ...


class AdapterLearner(Learner, Protocol):
    """A policy with a trained adapter."""

    def export_adapter(self) -> Mapping[str, torch.Tensor]:
        """A and B of each adapted matrix by peft's name, B multiplied by the scaling: W + B @ A is the policy."""
        ...

    def export_base(self) -> Mapping[str, torch.Tensor]:
        """The weights under the adapter by Hugging Face name, which never change."""
        ...


class RankedLearner(Learner, Protocol):
    """A policy whose ranks can send what they hold to engines."""

    def offer_weights(self, options: SenderOptions, *, version: int) -> WeightUpdate:
        """Have every rank send its part of the weights to who asks, until they change.

        Raises:
            WeightProofError: What the ranks hold does not make up a tensor; the message names it.
        """
        ...

    def expect_engines(self, num_receivers: int) -> None:
        """Change how many engines the ranks expect; for any thread."""
        ...


class Critic(Protocol):
    """A critic in training. One caller at a time; what is not here is as `Learner`'s."""

    @property
    def step(self) -> int:
        """Optimizer steps done so far."""
        ...

    def values(self, batch: Batch) -> Ragged:
        """Values of the states before each token of each trajectory, float32, first token 0."""
        ...

    def train_step(self, batch: Batch, objective: ValueLoss) -> StepResult:
        """One optimizer step on the whole batch; otherwise as `Learner.train_step`."""
        ...

    def save(self, directory: Path, *, in_background: bool = False) -> PendingSave:
        """As `Learner.save`; `policy/` is a Hugging Face token classifier with one label."""
        ...

    def load(self, directory: Path) -> None:
        """As `Learner.load`."""
        ...

    def offload(self) -> int:
        """As `Learner.offload`."""
        ...

    def close(self) -> None:
        """Free everything. Can be called twice."""
        ...
