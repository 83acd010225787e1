"""The Megatron learner: trains packed trajectories with megatron-core's models, parallelism and optimizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from rl_core.data import Batch, Ragged
from rl_core.errors import DataError, NotReadyError, SettingsError
from rl_core.record_fields import converts_arguments
from rl_core.weights import PEFT_PREFIX
from rl_distill.architecture.lora_targets import adapter_size
from rl_distill.architecture.policy_config import ModelBackend, PolicyConfig
from rl_distill.checkpoints.checkpoint import critic_shapes
from rl_distill.checkpoints.peft_folder import AdapterFolder
from rl_distill.learner import (
    FIRST_ADAPTER,
    ForwardBackwardResult,
    LearnerOptions,
    MetricSums,
    MicroBatch,
    Objective,
    OptimStepResult,
    StepResult,
    ValueLoss,
)
from rl_distill.megatron.model import Head
from rl_distill.megatron.rank_trainer import RankTrainer
from rl_distill.megatron.ranked_model import RankedModel, TrainedModel, joined
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.options import AdamOptions, LoraOptions
from rl_distill.prefixes import ROUTED_EXPERTS
from rl_distill.stepping import check_loss_weights, check_temperature

__all__ = ["BaseReference", "MegatronCritic", "MegatronLearner", "MegatronReference"]


class MegatronLearner(TrainedModel):
    """A policy trained with megatron-core. Implements `rl_distill.learner.MultiAdapterLearner`.

    Attributes:
        adapter: Name of the selected adapter.
    """

    kind, replays = "policy", True

    def __init__(
        self,
        policy: Path | str | Mapping[str, Any],
        options: LearnerOptions,
        *,
        ranks: LearnerRanks | None = None,
        name: str | None = None,
        backend: ModelBackend = "auto",
        lora: LoraOptions = LoraOptions(),  # noqa: B008 - frozen
        average_decay: float = 0.0,
    ) -> None:
        """Build the policy on every rank; see `RankedModel`.

        Args:
            policy: Hugging Face folder, or the content of a config.json; with an adapter, its base model.
            options: Learner options.
            ranks: Ranks that hold the model; None to use this process alone.
            name: Name of the model on its ranks; None uses `kind`.
            backend: What computes the model: our layers, or transformers' class.
            lora: Adapter that trains instead of the weights; rank 0 trains all weights.
            average_decay: Share that each step keeps of a moving average of the trained weights; 0 keeps no average.
        """
        self._average_decay = average_decay
        self._lora = self._first_lora = lora
        self.adapter, self._waiting_adapters = FIRST_ADAPTER, dict[str, LoraOptions]()
        super().__init__(policy, options, ranks=ranks, name=name, backend=backend)
        digest = None if lora.path is None or not lora.rank else AdapterFolder(lora.path).base_digest
        if digest is not None and digest[0] == options.dtype and digest[1] != self._base_digest:
            self.close()  # digests of another dtype cannot be compared
            raise DataError(
                f"{lora.path} was trained on a base model whose weights differ from this policy's. Start from that "
                "base model, or from the adapter merged into it (`export --merge`)."
            )

    @property
    def num_trained(self) -> int:
        """Number of trained parameters: those of the adapter, or all."""
        return adapter_size(self._source.config, self._lora) if self._lora.rank else self.num_parameters

    def export_adapter(self) -> Mapping[str, Tensor]:
        """Return A and B of the adapter; see `rl_distill.learner.AdapterLearner`."""
        if not self._lora.rank:
            raise NotReadyError("this learner trains all weights and has no adapter. Set lora.rank above 0.")
        return self._export("adapter", [PEFT_PREFIX + name for name in self._saved_shapes()])

    def add_adapter(
        self, name: str, *, seed: int | None = None, rank: int | None = None, frozen: Sequence[str] = ()
    ) -> None:
        """Start another adapter and select it; see `rl_distill.learner.MultiAdapterLearner`."""
        if not self._lora.rank:
            raise NotReadyError("this learner trains all weights and has no adapter. Set lora.rank above 0.")
        if name in {self.adapter, *self._waiting_adapters}:
            raise SettingsError(f"there is already an adapter {name!r}. Choose another name, or drop it first.")
        most = self._lora.rank
        if rank is not None and (not 1 <= rank <= most or (self._lora.path is not None and rank != most)):
            ranks = f"from 1 to {most}" if self._lora.path is None else f"{most}, that of {self._lora.path}"
            raise SettingsError(f"the rank of adapter {name!r} must be {ranks}; found {rank}.")
        lora, rank = self._first_lora.padded_from(rank or most), rank or most
        seed = self._options.seed if seed is None else seed
        self._switch_adapter(name, lora, seed=seed, rank=rank, frozen=tuple(frozen))

    def select_adapter(self, name: str) -> None:
        """Continue another adapter; see `rl_distill.learner.MultiAdapterLearner`."""
        if name != self.adapter:
            self._check_waits(name)
            self._switch_adapter(name, self._waiting_adapters[name])

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter; see `rl_distill.learner.MultiAdapterLearner`."""
        self._check_waits(name)
        self._call_all(RankTrainer.drop_adapter, name)
        del self._waiting_adapters[name]

    def _switch_adapter(self, name: str, lora: LoraOptions, **start: Any) -> None:
        found = self._call_all(RankTrainer.select_adapter, name, lora=lora, **start)
        self.step, self._num_waiting = found[0]
        self._waiting_adapters[self.adapter] = self._lora
        self._waiting_adapters.pop(name, None)
        self.adapter, self._lora = name, lora

    def _check_waits(self, name: str) -> None:
        if name not in self._waiting_adapters:
            found = ", ".join(sorted(self._waiting_adapters)) or "none"
            raise SettingsError(f"no adapter {name!r} waits; {self.adapter!r} is selected, and these wait: {found}.")

    def export_base(self) -> Mapping[str, Tensor]:
        """Return the frozen weights under the adapter; see `rl_distill.learner.AdapterLearner`."""
        return self._export("base", self._shapes())

    def reference(self) -> "BaseReference":
        """Return the policy without its adapter, on the same weights; valid until the policy is closed.

        Raises:
            NotReadyError: The policy trains all weights, so its initial weights are not kept. Use a
                `MegatronReference`.
        """
        if not self._lora.rank:
            raise NotReadyError(
                "a policy that trains all weights does not keep its initial weights. Build a MegatronReference from "
                "its folder."
            )
        return BaseReference(self)

    def train_step(
        self,
        batch: Batch,
        objective: Objective,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_tokens: bool = False,
    ) -> StepResult:
        """Take one optimizer step on the whole batch; logprobs are computed where `loss_mask` is True, else 0.

        Raises:
            ShapeError: loss_weights is missing or entirely zero.
        """
        return self._train(
            batch, objective, temperature=temperature, with_entropy=with_entropy, with_tokens=with_tokens
        )

    def forward_backward(
        self,
        batch: Batch,
        objective: Objective,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_tokens: bool = False,
    ) -> ForwardBackwardResult:
        """Add the gradients of a batch to those that wait; see `rl_distill.learner.AccumulatingLearner`."""
        check_temperature(temperature)
        check_loss_weights(batch, who="forward_backward")
        shares, rows = self._shares(batch)
        wanted = {"temperature": temperature, "with_entropy": with_entropy, "with_tokens": with_tokens}
        results = self._call_shares(RankTrainer.forward_backward, shares, objective, **wanted)
        self._num_waiting += 1
        return joined(batch, rows, results)

    def optim_step(self, options: AdamOptions | None = None) -> OptimStepResult:
        """Take one optimizer step with the gradients that wait; see `rl_distill.learner.AccumulatingLearner`."""
        result = self._call_all(RankTrainer.optim_step, options)[0]
        self.step, self._num_waiting = result.step, 0
        return result

    def zero_grad(self) -> None:
        """Discard the gradients that wait for `optim_step`."""
        self._call_all(RankTrainer.zero_grad)
        self._num_waiting = 0

    @converts_arguments
    def load_teacher_heads(self, folders: Sequence[Path]) -> None:
        """Load the teachers' output matrices for objectives that compare whole distributions.

        Args:
            folders: Hugging Face folders, indexed by the column `teacher_index`.

        Raises:
            SettingsError: A teacher's vocabulary is smaller than the policy's.
            DataError: A file or tensor is missing or incomplete.
        """
        self._call_all(RankTrainer.load_teacher_heads, list(folders))


@dataclass(frozen=True, slots=True)
class BaseReference:
    """The weights under a policy's adapter, as a reference that needs no extra memory. Routers choose their experts.

    Attributes:
        policy: A policy that has an adapter.
    """

    policy: MegatronLearner

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Ragged:
        """Return float32 logprobs of all tokens in the batch's row order; 0 at the first token of each trajectory."""
        batch = batch.only(batch.names - {ROUTED_EXPERTS})  # it routes for itself
        return self.policy._score(batch, temperature=temperature, weights="reference")

    def offload(self) -> int:
        """Do nothing and return 0, because the memory belongs to the policy."""
        return 0

    def close(self) -> None:
        """Do nothing; the policy stays open."""


class MegatronReference(RankedModel):
    """A frozen policy, without gradients or optimizer."""

    kind, trains = "reference", False


def _objective_of_values(
    values: Tensor,
    entropy: Tensor | None,  # noqa: ARG001 - a critic has none
    micro_batch: MicroBatch,
    *,
    loss: ValueLoss,
) -> tuple[Tensor, MetricSums]:
    """Call a critic's loss as an objective. A module-level function, so that ranks in other processes unpickle it."""
    return loss(values, micro_batch)


class MegatronCritic(TrainedModel):
    """A critic: a policy's layers under a value head, initialized to 0 if the folder has none.

    Implements `rl_distill.learner.Critic`.
    """

    kind: ClassVar[str] = "critic"
    head: ClassVar[Head] = "value"

    def values(self, batch: Batch) -> Ragged:
        """Return float32 values of the state before each token in the batch's row order; 0 at the first token."""
        return self._score(batch)

    def train_step(self, batch: Batch, objective: ValueLoss) -> StepResult:
        """Take one optimizer step on the whole batch; values are computed where `loss_mask` is True, else 0.

        Raises:
            ShapeError: loss_weights is missing or entirely zero.
        """
        return self._train(batch, partial(_objective_of_values, loss=objective))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return critic_shapes(self._source.config)


class MegatronTeacherModel(MegatronReference):
    """A frozen policy that scores tokens for distillation."""

    kind = "teacher"

    @property
    def config(self) -> PolicyConfig:
        """The model's configuration."""
        return self._source.config
