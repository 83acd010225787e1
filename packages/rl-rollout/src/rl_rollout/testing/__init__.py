"""Conformance suite of engines: checks that every `RolloutEngine` must pass, for your own tests.

    class TestMyEngine(EngineConformance):
        @pytest.fixture
        def model_dir(self): ...  # with a tokenizer

        @pytest.fixture
        def engine(self, model_dir): ...  # started, serving model_dir in float32, max_model_len 64 or more

`AdapterConformance` checks an engine with room for adapters of every linear layer except the head.
Each check runs its own event loop on the engine.
"""

from rl_rollout.testing.conformance import EngineConformance
from rl_rollout.testing.reference_model import begin, generate, joined, make_tiny_model, reference_logprobs, refuses
from rl_rollout.testing.update_checks import AdapterConformance

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
