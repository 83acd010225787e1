"""Metrics of a step: counts of the launch, and shares of the time."""

import pytest

from rl_async_trainer.controller.step_metrics import StepMetrics
from rl_async_trainer.messages import TrainedStep
from rl_core.testing import FakeClock
from rl_rollout.schedule import ScheduleOptions, Scheduler

GENERATED = "fully_async/count/total_generated_samples"
STALE = "fully_async/count/stale_trajectory_processed"


def of_step(
    metrics: StepMetrics, scheduler: Scheduler, *, generated: float = 0.0, stale: float = 0.0, wall_s: float = 10.0
) -> dict[str, float]:
    report = TrainedStep(metrics={STALE: stale}, num_trajectories=4, kl={}, busy_s=6.0)
    window = {GENERATED: generated}
    return metrics.of_step(report, window, wall_s=wall_s, scheduler=scheduler, stats={}, restarts={"learner": 1})


def test_counts_of_steps_are_added_up() -> None:
    metrics, scheduler = StepMetrics(), Scheduler(ScheduleOptions(groups_per_step=2, num_steps=4))
    first = of_step(metrics, scheduler, generated=5, stale=0)
    second = of_step(metrics, scheduler, generated=3, stale=2)
    third = of_step(metrics, scheduler, generated=0, stale=1)
    assert [found[GENERATED] for found in (first, second, third)] == [5, 8, 8]
    assert [found[STALE] for found in (first, second, third)] == [0, 2, 3]


def test_groups_in_flight_and_ready_are_those_that_can_grow_stale() -> None:
    metrics, scheduler = StepMetrics(), Scheduler(ScheduleOptions(groups_per_step=2, num_steps=4))
    scheduler.issued(["a", "b", "c", "d", "e"])
    scheduler.started(["a", "b", "c", "d"])
    scheduler.settled("b", oldest_version=0)
    found = of_step(metrics, scheduler)
    assert found["fully_async/count/staleness_samples"] == 4
    assert found["fully_async/queue/inflight_groups"] == 3
    scheduler.settled("a", oldest_version=0)
    scheduler.trained(["a", "b"])
    assert of_step(metrics, scheduler)["fully_async/count/staleness_samples"] == 2


def test_of_the_idle_time_the_wait_for_rollouts_is_told_apart() -> None:
    """8 s with 6 s of work; of the other 2 s, 1.5 s are a wait for groups."""
    clock = FakeClock()
    metrics, scheduler = StepMetrics(clock), Scheduler(ScheduleOptions(groups_per_step=2, num_steps=4))
    with metrics.waiting():
        clock.advance(1.5)
    clock.advance(6.5)
    first = of_step(metrics, scheduler, wall_s=metrics.step_ended())
    assert first["timing_s/step"] == first["perf/time_per_step"] == 8  # as in a synchronous step
    assert first["fully_async/trainer/idle_ratio"] == pytest.approx(0.25)
    assert first["timing_s/wait_rollouts"] == 1.5
    clock.advance(6)
    second = of_step(metrics, scheduler, wall_s=metrics.step_ended())
    assert (second["fully_async/trainer/idle_ratio"], second["timing_s/wait_rollouts"]) == (0, 0)
