"""The learner's side of a step, wherever it runs."""

import math
from dataclasses import dataclass

from rl_core.data import IntArray
from rl_core.weights import BFLOAT16_TOLERANCES, ProofTolerances
from rl_distill.learners import Learners
from rl_distill.skipping import SkippedUpdates
from rl_rollout.prompts import PromptSet
from rl_trainer_parts.learning.mixtures import routes_anew
from rl_trainer_parts.settings.schema import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningParts:
    """Everything a learning step needs.

    Attributes:
        settings: The user's settings.
        learners: Policy, reference and critic.
        skipped: Counts skipped updates, whose loss or gradients were not finite.
    """

    settings: Settings
    learners: Learners
    skipped: SkippedUpdates


def canary_sequences(settings: Settings, prompts: PromptSet) -> list[IntArray]:
    """The first prompts, used for the canary."""
    return [prompts[index].input_ids for index in range(min(settings.trainer.canary_prompts, len(prompts)))]


def proof_tolerances(settings: Settings) -> ProofTolerances:
    """Tolerances between engine and learner.

    In float32, both almost always route a mixture's tokens to the same experts. In a coarser dtype some tokens go to
    other experts; unless the learner replays the engine's routing, canary logprobs may then differ by any amount.
    """
    is_exact = settings.vllm.dtype == settings.optimizer.dtype == "float32"
    default = ProofTolerances() if is_exact else BFLOAT16_TOLERANCES
    canary = default.canary if settings.trainer.proof_tolerance is None else settings.trainer.proof_tolerance
    if not is_exact and settings.trainer.proof_tolerance is None and routes_anew(settings):
        canary = math.inf
    return ProofTolerances(probe=default.probe, canary=canary)
