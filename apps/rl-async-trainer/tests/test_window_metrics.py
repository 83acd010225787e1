"""Metrics of a rollouter's engines and sessions."""

from dataclasses import replace

import numpy as np

from rl_async_trainer.roles.rollouter import window_metrics
from rl_core import Prompt
from rl_core.data import Timings
from rl_core.testing import make_trajectory
from rl_rollout import GroupResult, SessionResult
from rl_rollout.engines.replicas.replica import EngineLoad
from rl_rollout.loops import with_reward
from rl_rollout.rewards import RewardResult
from rl_rollout.rewards.scorer import Scored
from rl_rollout.rollouter.rollouter import RolloutWindow
from rl_trainer_parts.reporting.step_metrics import slowest_session

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


def test_tool_calls_of_the_sessions_are_counted() -> None:
    window = RolloutWindow()
    for uid, calls in (("p0", {"ok": 2}), ("p1", {"malformed_call": 2})):
        row = replace(make_trajectory(uid, 0, reward=0.0), extras={"tool_calls": calls})
        session = SessionResult(trajectories=(row,))
        prompt = Prompt(uid=uid, input_ids=np.array([1], np.int32))
        window.add(GroupResult(prompt=prompt, sessions=(session,)), took_s=1.0, is_refused=False)
    metrics = window_metrics(window, [], elapsed_s=1.0)
    assert (metrics["tools/calls/ok"], metrics["tools/calls/malformed_call"], metrics["tools/ok_share"]) == (2, 2, 0.5)


def test_a_reward_that_timed_out_counts_in_the_times_although_its_session_is_dropped() -> None:
    prompt = Prompt(uid="p", input_ids=np.array([1], dtype=np.int32))

    def session(index: int, scored: Scored) -> SessionResult:
        return with_reward([replace(make_trajectory("p", index), timings=Timings(generate_s=1.0))], scored)

    sessions = (
        session(0, Scored(result=RewardResult(reward=1.0), reward_s=2.0)),
        session(1, Scored(failure="did not return within 30 s", reward_s=30.0, wait_s=4.0)),
        SessionResult(trajectories=session(2, Scored(failure="aborted")).trajectories, failure="aborted"),
    )
    window = RolloutWindow()
    window.add(GroupResult(prompt=prompt, sessions=sessions), took_s=1.0, is_refused=False)
    metrics = window_metrics(window, [], elapsed_s=1.0)
    scores = {name: value for name, value in metrics.items() if "compute_score" in name}
    assert scores == {
        "agent_loop/compute_score/min": 2.0,
        "agent_loop/compute_score/mean": 16.0,
        "agent_loop/compute_score/max": 30.0,
        "agent_loop/slowest/compute_score": 30.0,
    }
    assert (metrics["timing_s/reward"], metrics["timing_s/reward_wait"]) == (16.0, 2.0)
    assert slowest_session(window.timed)["session_index"] == 1
    assert metrics["fully_async/count/total_generated_samples"] == 1.0  # only what can train
