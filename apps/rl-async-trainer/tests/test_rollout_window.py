"""What a rollouter says of its engines."""

from rl_async_trainer.roles.rollout_window import RolloutWindow
from rl_rollout.engines.engine_load import EngineLoad

RESTARTS = "fully_async/restarts/engines"


def load(index: int, num_restarts: int) -> EngineLoad:
    return EngineLoad(
        index=index,
        state="serving",
        num_running=0,
        busy_s=0.0,
        idle_s=0.0,
        num_tokens=0,
        num_requests=0,
        num_restarts=num_restarts,
    )


def test_restarts_of_engines_are_summed_over_them() -> None:
    window = RolloutWindow()
    assert window.take([load(0, 0), load(1, 0)])["metrics"][RESTARTS] == 0
    assert window.take([load(0, 2), load(1, 1)])["metrics"][RESTARTS] == 3
    assert window.take([load(0, 2), load(1, 1)])["metrics"][RESTARTS] == 3
