"""Metrics of a rollouter's engines."""

from rl_async_trainer.roles.rollouter import window_metrics
from rl_rollout.engines.engine_load import EngineLoad
from rl_rollout.rollouter.window import RolloutWindow

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
    started, died = [load(0, 0), load(1, 0)], [load(0, 2), load(1, 1)]
    for before, after, restarts in (([], started, 0), (started, died, 3), (died, died, 3)):
        assert window_metrics(RolloutWindow(loads=before), after, elapsed_s=1.0)[RESTARTS] == restarts
