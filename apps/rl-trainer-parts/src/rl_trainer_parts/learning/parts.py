"""What the learner's side of a step works with, wherever it runs."""

import math
from dataclasses import dataclass, replace

from rl_core.data import IntArray
from rl_core.weights import BFLOAT16_TOLERANCES, ProofTolerances
from rl_distill.learners import Learners
from rl_distill.objectives import AdaptiveKL, DistillationObjective, PolicyObjective, SampledLogprobs, TokenSelection
from rl_distill.skipping import SkippedUpdates
from rl_rollout.prompts import PromptSet
from rl_trainer_parts.learning.objective import sampled_logprobs
from rl_trainer_parts.rollouts.engines import routes_anew
from rl_trainer_parts.settings.schema import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningParts:
    """What a step learns with.

    Attributes:
        settings: As the user set them.
        learners: Policy, reference and critic.
        objective: What the learner minimises.
        kl: The KL's coefficient at the start of the run, and how it goes on.
        select_tokens: Chooses the tokens that the policy loss treats apart, where it does.
        skipped: Counts updates that were not finite.
    """

    settings: Settings
    learners: Learners
    objective: PolicyObjective | DistillationObjective
    kl: AdaptiveKL
    select_tokens: TokenSelection | None
    skipped: SkippedUpdates

    @property
    def recomputes_old_logprobs(self) -> bool:
        """True when the learner scores a batch before it trains on it."""
        return self.settings.algorithm.old_logprobs == "recompute"

    @property
    def sampled_logprobs(self) -> SampledLogprobs:
        """Column of the logprobs of the policy that sampled, as the update knows them."""
        return sampled_logprobs(self.settings)

    def objective_at(self, kl_coefficient: float) -> PolicyObjective | DistillationObjective:
        """The objective with the present coefficient of the KL, where that is in the loss."""
        if self.settings.algorithm.kl_in != "loss":
            return self.objective
        if isinstance(self.objective, PolicyObjective):
            return self.objective.with_kl_coefficient(kl_coefficient)
        policy = self.objective.policy
        return replace(self.objective, policy=policy and policy.with_kl_coefficient(kl_coefficient))


def canary_sequences(settings: Settings, prompts: PromptSet) -> list[IntArray]:
    """The first prompts, as many as the settings say."""
    return [prompts[index].input_ids for index in range(min(settings.trainer.canary_prompts, len(prompts)))]


def proof_tolerances(settings: Settings) -> ProofTolerances:
    """How far an engine may be from the learner.

    A mixture that both compute in float32 nearly always takes the same experts. In a coarser dtype some are others, and
    where the learner does not replay the engine's, canary logprobs may be off by any amount.
    """
    is_exact = settings.engine.dtype == settings.learner.dtype == "float32"
    default = ProofTolerances() if is_exact else BFLOAT16_TOLERANCES
    canary = default.canary if settings.trainer.proof_tolerance is None else settings.trainer.proof_tolerance
    if not is_exact and settings.trainer.proof_tolerance is None and routes_anew(settings):
        canary = math.inf
    return ProofTolerances(probe=default.probe, canary=canary)
