"""The Megatron learner: megatron-core's models, parallelism, schedules and optimizer, on packed trajectories."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from rl_core.data import Batch, Ragged
from rl_core.errors import DataError, NotReadyError
from rl_core.record_fields import converts_arguments
from rl_core.weights import PEFT_PREFIX
from rl_distill.architecture.lora_targets import adapted_modules, adapter_shapes, adapter_size
from rl_distill.checkpoints.adapter_checkpoint import TensorFingerprint, TrainedAdapter
from rl_distill.checkpoints.checkpoint import critic_shapes
from rl_distill.checkpoints.peft_folder import AdapterFolder
from rl_distill.learner import LearnerOptions, MetricSums, MicroBatch, Objective, StepResult, ValueLoss
from rl_distill.megatron.model import Head
from rl_distill.megatron.ranked_model import RankedModel, TrainedModel
from rl_distill.megatron.ranks import LearnerRanks
from rl_distill.options import LoraOptions
from rl_distill.stepping import check_open


class MegatronLearner(TrainedModel):
    """Trains a policy with megatron-core; see `rl_distill.learner.Learner`."""

    kind, replays = "policy", True

    def __init__(
        self,
        policy: Path | str | Mapping[str, Any],
        options: LearnerOptions,
        *,
        ranks: LearnerRanks | None = None,
        name: str | None = None,
        lora: LoraOptions = LoraOptions(),  # noqa: B008 - frozen
    ) -> None:
        """Build the policy on every rank: see `RankedModel`.

        Args:
            policy: Its folder, or a config.json's content; the weights under the adapter, where there is one.
            options: How to train.
            ranks: Where; None for this process alone.
            name: Of the model on its ranks; None for what it is.
            lora: The adapter that trains in the place of the weights; rank 0 trains all of these.
        """
        self._lora = lora
        self._base_digest = ""
        super().__init__(policy, options, ranks=ranks, name=name)
        if lora.rank and lora.path is not None:
            self._check_base(lora.path)

    @property
    def num_trained(self) -> int:
        """Parameters that train: an adapter's, or all."""
        return adapter_size(self._source.config, self._lora) if self._lora.rank else self.num_parameters

    def export_adapter(self) -> Mapping[str, Tensor]:
        """See `rl_distill.learner.Learner`."""
        if not self._lora.rank:
            raise NotReadyError("this learner trains all weights, and has no adapter. Give it a lora.rank above 0.")
        return self._export("adapter", [PEFT_PREFIX + name for name in self._saved_shapes()])

    def export_base(self) -> Mapping[str, Tensor]:
        """See `rl_distill.learner.Learner`."""
        return self._export("base", self._shapes())

    def reference(self) -> "BaseReference":
        """The policy without its adapter, on the same weights; valid while the policy is.

        Raises:
            NotReadyError: The policy trains all weights: only a `MegatronReference` keeps what it began as.
        """
        if not self._lora.rank:
            raise NotReadyError(
                "a policy that trains all weights does not keep those that it began with. Make a "
                "MegatronReference of its folder."
            )
        return BaseReference(self)

    def _saved_shapes(self) -> dict[str, tuple[int, ...]]:
        return adapter_shapes(self._source.config, self._lora) if self._lora.rank else self._shapes()

    def _trained_adapter(self) -> TrainedAdapter | None:
        if not self._lora.rank:
            return None
        modules = tuple(adapted_modules(self._source.config, self._lora))
        return TrainedAdapter(options=self._lora, modules=modules, base_digest=self._digest_of_base())

    def _digest_of_base(self) -> str:
        if not self._base_digest:  # it never changes
            self._base_digest = TensorFingerprint(self.export_base().items()).digest
        return self._base_digest

    def _check_base(self, adapter: Path) -> None:
        """Refuse an adapter that says that it was trained on another base, in this learner's dtype."""
        said = AdapterFolder(adapter).base_digest
        if said is not None and said[0] == self._options.dtype and said[1] != self._digest_of_base():
            self.close()
            raise DataError(
                f"{adapter} was trained on a base model with other weights than this policy's. Begin with the policy "
                "that it was trained on, or with the adapter merged into that (`export --merge`)."
            )

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Ragged:
        """Logprobs of all tokens, float32, in the batch's row order, first token 0."""
        return self._score(batch, temperature=temperature)

    def train_step(
        self,
        batch: Batch,
        objective: Objective,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_tokens: bool = False,
    ) -> StepResult:
        """One optimizer step on the whole batch; logprobs are those of `loss_mask`, others stay 0.

        Raises:
            ShapeError: loss_weights is missing or all zero.
        """
        return self._train(
            batch, objective, temperature=temperature, with_entropy=with_entropy, with_tokens=with_tokens
        )

    @converts_arguments
    def load_teacher_heads(self, folders: Sequence[Path]) -> None:
        """Read the teachers' output matrices, for objectives that compare whole distributions.

        Args:
            folders: Hugging Face folders, in the order of the column `teacher_index`.

        Raises:
            SettingsError: A teacher knows fewer tokens than the policy.
            DataError: A file or tensor is missing or torn.
        """
        check_open(self._is_open)
        self._ranks.call_all("run", self._name, "load_teacher_heads", (list(folders),), {})


class BaseReference:
    """The weights under a policy's adapter, as a reference that takes no memory; its routers choose by themselves."""

    def __init__(self, policy: MegatronLearner) -> None:
        """Take a policy with an adapter."""
        self._policy = policy

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Ragged:
        """Logprobs of all tokens, float32, in the batch's row order, first token 0."""
        return self._policy._score(batch.only({"input_ids"}), temperature=temperature, is_base=True)

    def offload(self) -> int:
        """Nothing: what there is to free is the policy's."""
        return 0

    def close(self) -> None:
        """Leave the policy as it is."""


class MegatronReference(RankedModel):
    """A policy that never trains: no gradients, no optimizer."""

    kind, trains = "reference", False

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Ragged:
        """Logprobs of all tokens, float32, in the batch's row order, first token 0."""
        return self._score(batch, temperature=temperature)


def _objective_of_values(
    values: Tensor,
    entropy: Tensor | None,  # noqa: ARG001 - a critic has none
    micro_batch: MicroBatch,
    *,
    loss: ValueLoss,
) -> tuple[Tensor, MetricSums]:
    """A critic's loss as an objective; at the module's level, for it travels to ranks."""
    return loss(values, micro_batch)


class MegatronCritic(TrainedModel):
    """Trains a critic: a policy's layers under a value head, which starts at 0 where the folder has none.

    See `rl_distill.learner.Critic`.
    """

    kind: ClassVar[str] = "critic"
    head: ClassVar[Head] = "value"

    def values(self, batch: Batch) -> Ragged:
        """Values of the states before each token, float32, in the batch's row order, first token 0."""
        return self._score(batch)

    def train_step(self, batch: Batch, objective: ValueLoss) -> StepResult:
        """One optimizer step on the whole batch; values are those of `loss_mask`, others stay 0.

        Raises:
            ShapeError: loss_weights is missing or all zero.
        """
        return self._train(batch, partial(_objective_of_values, loss=objective))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return critic_shapes(self._source.config)
