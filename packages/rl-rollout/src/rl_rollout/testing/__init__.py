"""Conformance suite of engines: what every `RolloutEngine` must do, for tests of your own.

    class TestMyEngine(EngineConformance):
        @pytest.fixture
        def model_dir(self): ...

        @pytest.fixture
        def engine(self, model_dir): ...  # started, serving model_dir in float32, max_model_len 64 or more

Each check runs an event loop of its own on the engine it is given.
"""

from rl_rollout.testing.engine_calls import PROMPT, begin, generate, joined, long_request, refuses, short_request
from rl_rollout.testing.generation_checks import GenerationChecks
from rl_rollout.testing.reference_model import (
    TIED_HEAD,
    canary_of,
    make_tiny_model,
    perturbed,
    reference_logprobs,
    token_logprobs,
)
from rl_rollout.testing.scoring_checks import ScoringChecks, check_token_scores
from rl_rollout.testing.update_checks import UpdateChecks

__all__ = [
    "PROMPT",
    "TIED_HEAD",
    "EngineConformance",
    "GenerationChecks",
    "ScoringChecks",
    "UpdateChecks",
    "begin",
    "canary_of",
    "check_token_scores",
    "generate",
    "joined",
    "long_request",
    "make_tiny_model",
    "perturbed",
    "reference_logprobs",
    "refuses",
    "short_request",
    "token_logprobs",
]


class EngineConformance(GenerationChecks, ScoringChecks, UpdateChecks):
    """All checks."""
