"""The models of a run: a policy and, if the algorithm needs them, a reference and a critic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from rl_core import Batch, Ragged, RowKey
from rl_core.data import ExpertArray, FloatArray, ImageSpan, IntArray, image_extras
from rl_core.errors import SettingsError
from rl_core.gpus import GpuUse, own_gpu_use
from rl_core.record_fields import converts_arguments
from rl_core.weights import (
    AdapterUpdate,
    Canary,
    ProofTolerances,
    PublishReport,
    TensorDigest,
    TensorTransport,
    WeightTransport,
    WeightUpdate,
    digest_tensors,
    prove_canary,
)
from rl_core.weights.broadcast import DirectTransport, WeightSender
from rl_distill.background import saved_together
from rl_distill.learner import AdapterLearner, Critic, Learner, PendingSave, RankedLearner, Scorer
from rl_distill.options import LoraOptions
from rl_distill.products import chosen_products
from rl_distill.teacher.self_teaching import ScoreTokens

__all__ = ["Learners", "chosen_products"]

CRITIC_FOLDER = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learners:
    """The models of a run outside the engines.

    Attributes:
        policy: The trained policy.
        reference: Frozen copy of the initial policy; None if neither a KL term nor the teacher needs it.
        critic: Estimates values; None if the advantage estimator does not use them.
        close: Closes the models and their ranks.
        stacks: Returns the current stack of each rank that has its own process, within the given seconds. Thread-safe.
        check_alive: Calls each rank, and raises an error if one died.
        gpu_use: Returns the use of each rank's GPU since the last call; by default, of this process's.
        lora: The policy's adapter and what engines receive of it; rank 0 if all weights are trained.
        self_teacher: `score` of the policy, its average or its reference; None if the policy does not teach itself.
    """

    policy: Learner
    reference: Scorer | None
    critic: Critic | None
    close: Callable[[], None]
    stacks: Callable[[float], list[str]] = lambda _: []
    check_alive: Callable[[], None] = lambda: None
    gpu_use: Callable[[], list[GpuUse]] = lambda: own_gpu_use("learner")
    lora: LoraOptions = field(default_factory=LoraOptions)
    self_teacher: ScoreTokens | None = None
    _base: dict[str, TensorDigest] = field(default_factory=dict, init=False, repr=False)

    @converts_arguments
    def save(self, folder: Path, *, in_background: bool = False) -> PendingSave:
        """Save the policy into an empty folder, and the critic into its subfolder."""
        pending = [self.policy.save(folder, in_background=in_background)]
        if self.critic is not None:
            pending.append(self.critic.save(folder / CRITIC_FOLDER, in_background=in_background))
        return saved_together(*pending)

    @converts_arguments
    def load(self, folder: Path) -> None:
        """Resume from a checkpoint that `save` wrote.

        Raises:
            CheckpointError: The checkpoint is missing, incomplete or of another model.
        """
        self.policy.load(folder)
        if self.critic is not None:
            self.critic.load(folder / CRITIC_FOLDER)

    @converts_arguments
    def load_teacher_heads(self, folders: Sequence[Path]) -> None:
        """Load the teachers' output matrices into the policy, in the order of `teacher_index`.

        Raises:
            SettingsError: The learner does not support teacher heads, or a teacher has a smaller vocabulary than the
                policy.
        """
        load = getattr(self.policy, "load_teacher_heads", None)
        if load is None:
            raise SettingsError(
                f'distribution = "full" needs a learner that supports teacher heads; found {self.policy}.'
            )
        load(folders)

    def canary(
        self,
        sequences: Sequence[IntArray],
        *,
        images: Sequence[tuple[ImageSpan, ...]] = (),
        replays: bool = False,
    ) -> Canary:
        """Return fixed sequences with their logprobs under the current weights.

        Args:
            sequences: Token ids.
            images: Images of each sequence; empty if none has any.
            replays: Omit the logprobs; `proven` computes them with the experts that an engine chose.
        """
        logprobs = None if replays else self._canary_logprobs(sequences, [None] * len(sequences), images)
        return Canary(sequences=list(sequences), logprobs=logprobs, images=tuple(images) if any(images) else ())

    def proven(self, canary: Canary, report: PublishReport, *, tolerances: ProofTolerances) -> PublishReport:
        """Complete the proof of the current weights, and return the report; see `prove_canary`.

        Raises:
            WeightProofError: A logprob differs by more than the tolerance.
        """
        return prove_canary(canary, report, self._canary_logprobs, tolerances=tolerances)

    def _canary_logprobs(
        self,
        sequences: Sequence[IntArray],
        experts: Sequence[ExpertArray | None],
        images: Sequence[tuple[ImageSpan, ...]] = (),
    ) -> list[FloatArray]:
        keys = [RowKey(f"canary-{index}", 0, 0) for index in range(len(sequences))]
        columns = {"input_ids": Ragged.from_rows(sequences, dtype="int32")}
        known = [of_sequence for of_sequence in experts if of_sequence is not None]
        if known:
            columns["routed_experts"] = Ragged(np.concatenate(known), columns["input_ids"].offsets)
        extras = [image_extras(spans) for spans in images] or None
        return list(self.policy.logprobs(Batch(keys, columns, extras=extras)))

    def pack(
        self, transport: WeightTransport, *, version: int, steps_on: bool = False, leaves: bool = False
    ) -> WeightUpdate:
        """Pack the policy's current weights for engines: all of them, or only the adapter if engines serve it.

        Args:
            transport: Packs the weights.
            version: Policy version of the weights.
            steps_on: The learner trains while engines load the weights; tensors that are handed over within the process
                are copied.
            leaves: The learner is offloaded before engines load the weights; such copies are made in host memory.
        """
        adapter: AdapterUpdate | None = None
        if self.lora.rank and self.lora.serving == "adapter":
            policy = cast("AdapterLearner", self.policy)
            if not self._base:
                self._base.update(digest_tensors(policy.export_base()))
            tensors, adapter = policy.export_adapter(), AdapterUpdate(rank=self.lora.rank, base=dict(self._base))
        elif isinstance(transport, DirectTransport):
            return cast("RankedLearner", self.policy).offer_weights(transport.options, version=version)
        else:
            tensors = self.policy.export_weights()
        if isinstance(transport, TensorTransport) and leaves:
            tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        elif isinstance(transport, TensorTransport) and steps_on:
            tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        also = {} if adapter is None else {"adapter": adapter}  # transports without this argument send all weights
        return transport.pack(tensors, version=version, tied=self.policy.tied, **also)

    def expect_engines(self, transport: WeightTransport, count: int) -> None:
        """Set the number of engines that fetch weights over the network. Thread-safe."""
        if isinstance(transport, WeightSender):
            transport.expect(count)
        if isinstance(transport, DirectTransport):
            cast("RankedLearner", self.policy).expect_engines(count)

    def offload(self) -> None:
        """Free the models' memory until their next use."""
        for model in (self.policy, self.reference, self.critic):
            if model is not None:
                model.offload()
