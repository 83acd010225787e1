"""Conformance suite of engines: what every `RolloutEngine` must do, for tests of your own.

    class TestMyEngine(EngineConformance):
        @pytest.fixture
        def model_dir(self): ...  # with a tokenizer

        @pytest.fixture
        def engine(self, model_dir): ...  # started, serving model_dir in float32, max_model_len 64 or more

`AdapterConformance` is the same for an engine with room for adapters of every linear layer but the head.
Each check runs an event loop of its own on the engine it is given.
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
    """All checks."""


class AdapterConformance(AdapterChecks):
    """All checks of adapters."""
