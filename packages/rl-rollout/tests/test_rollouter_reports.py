"""Reports of the engines below a rollouter."""

from rl_rollout.engines.replicas.replica import EngineLoad
from rl_rollout.rollouter.rollouter import engine_reports

SPEAKS = "engine[0] is serving in pid 7; pending calls: generate.\nits event loop is responsive\nthread MainThread ..."
SILENT = (
    "rank[1] is serving in pid 8; pending calls: train.\nIt has not answered since 12:00:00, 4.0 s: C code holds its "
    "interpreter, it is stopped, or it gets no CPU time."
)


def load(index: int, state: str, running: int) -> EngineLoad:
    return EngineLoad(
        index=index,
        state=state,  # type: ignore[arg-type]
        num_running=running,
        busy_s=0.0,
        idle_s=0.0,
        num_tokens=0,
        num_requests=0,
        num_restarts=0,
    )


def test_engines_have_the_state_of_their_load_and_those_without_a_process_are_left_out():
    loads = [load(0, "draining", 3), load(2, "restarting", 0), load(3, "serving", 1)]
    first, second = engine_reports(loads, {0: SPEAKS, 2: SILENT}, asked_s=8.0)
    assert (first.name, first.state, first.counts, first.is_answering) == ("engine[0]", "serving", {"running": 3}, True)
    assert (second.name, second.state, second.is_answering, second.since_s) == ("engine[2]", "restarting", False, 8.0)
    assert first.stack == SPEAKS
