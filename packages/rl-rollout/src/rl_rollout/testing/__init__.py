"""Conformance suite of engines: checks that every `RolloutEngine` must pass, for your own tests.

    class TestMyEngine(EngineConformance):
        @pytest.fixture
        def model_dir(self): ...  # with a tokenizer

        @pytest.fixture
        def engine(self, model_dir): ...  # started, serving model_dir in float32, max_model_len 64 or more

`AdapterConformance` checks an engine with room for adapters of every linear layer except the head.
Each check runs its own event loop on the engine.
"""

from rl_rollout.testing.adapter_checks import AdapterChecks
from rl_rollout.testing.client_checks import ClientChecks
from rl_rollout.testing.engine_calls import begin, generate, joined, refuses
from rl_rollout.testing.generation_checks import GenerationChecks
from rl_rollout.testing.reference_model import make_tiny_model, reference_logprobs
from rl_rollout.testing.scoring_checks import ScoringChecks
from rl_rollout.testing.update_checks import UpdateChecks

__all__ = [
    "AdapterConformance",
    "EngineConformance",
    "begin",
    "generate",
    "joined",
    "make_tiny_model",
    "reference_logprobs",
    "refuses",
]


class EngineConformance(GenerationChecks, ClientChecks, ScoringChecks, UpdateChecks):
    """All checks of engines."""


class AdapterConformance(AdapterChecks):
    """All checks of adapters."""
