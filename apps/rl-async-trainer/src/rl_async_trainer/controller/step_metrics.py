"""Metrics of a step, gathered from learner, rollouter, queue and scheduler."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rl_async_trainer.messages import TrainedStep
from rl_core.weights import PublishReport
from rl_distill.learner_host import PackedWeights
from rl_metrics.reductions import memory_metrics, summarize_speed
from rl_rollout.schedule import Scheduler

BYTES_PER_GIB = 2**30

ADDED_UP = ("fully_async/count/total_generated_samples", "fully_async/count/stale_trajectory_processed")
"""Counts reported per step and for the whole launch."""


class StepMetrics:
    """Step metrics of one launch."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start counting.

        Args:
            clock: Returns seconds.
        """
        self._clock = clock
        self._last_end = clock()
        self._waited_s = 0.0
        self._dropped: Counter[str] = Counter()
        self._updates: dict[str, float] = {}
        self._so_far = dict.fromkeys(ADDED_UP, 0.0)

    def step_ended(self) -> float:
        """Return the seconds since the previous step."""
        now = self._clock()
        wall_s, self._last_end = now - self._last_end, now
        return wall_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count seconds of waiting for the next step's groups."""
        began = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - began

    def dropped(self, reason: str, count: int = 1) -> None:
        """Count groups that are dropped or generated again."""
        self._dropped[reason] += count

    def saved(self, took_s: float) -> None:
        """Record that a checkpoint is complete."""
        self._updates["timing_s/save_checkpoint"] = took_s

    def published(self, packed: PackedWeights, report: PublishReport) -> None:
        """Record that the engines serve new weights."""
        self._updates |= {
            "weights/num_tensors": float(report.num_tensors),
            "weights/size_gb": report.size_bytes / 2**30,
            "weights/probe_max_diff": report.probe_max_diff,
            "weights/canary_max_diff": report.canary_max_diff,
            "timing_s/update_weights": packed.pack_s + report.update_s + report.proof_s,
            "fully_async/weight_update/pack_s": packed.pack_s,
            "fully_async/weight_update/update_s": report.update_s,
            "fully_async/weight_update/proof_s": report.proof_s,
            "fully_async/weight_update/drain_s": report.drain_s,
            "fully_async/weight_update/stall_s": report.stall_s,
        }

    def of_step(
        self,
        report: TrainedStep,
        window: Mapping[str, float],
        *,
        wall_s: float,
        scheduler: Scheduler,
        stats: Mapping[str, float],
        restarts: Mapping[str, int],
    ) -> dict[str, float]:
        """Metrics of the step just trained.

        Args:
            report: The learner's report.
            window: The rollouter's activity since the previous step.
            wall_s: Seconds since the previous step.
            scheduler: The scheduler, after the step.
            stats: The queue's statistics.
            restarts: Restarts of each role so far.
        """
        metrics = dict(window) | dict(report.metrics) | self._updates
        self._updates, waited_s, self._waited_s = {}, self._waited_s, 0.0
        for name in ADDED_UP:
            self._so_far[name] += metrics.get(name, 0.0)
        metrics |= self._so_far
        metrics |= {
            **summarize_speed(
                num_tokens=int(metrics.get("perf/total_num_tokens", 0)),
                num_trajectories=report.num_trajectories,
                step_s=wall_s,
            ),
            "timing_s/step": wall_s,
            "timing_s/wait_rollouts": metrics.get("timing_s/wait_rollouts", 0.0) + waited_s,
            "fully_async/trainer/idle_ratio": min(max(1.0 - report.busy_s / max(wall_s, 1e-9), 0.0), 1.0),
            "fully_async/count/current_param_version": float(scheduler.served_version),
            "fully_async/count/dropped_stale_samples": float(self._dropped["stale"]),
            "fully_async/count/staleness_samples": float(scheduler.num_inflight + scheduler.num_ready),
            "fully_async/queue/ready_groups": float(scheduler.num_ready),
            "fully_async/queue/inflight_groups": float(scheduler.num_inflight),
            "fully_async/queue/issued_groups": float(scheduler.num_waiting),
            "fully_async/queue/rows": stats.get("rows", 0.0),
            "fully_async/queue/bytes": stats.get("size_bytes", 0.0),
            "memory/queue_gb": stats.get("size_bytes", 0.0) / BYTES_PER_GIB,
            **{f"queue/{name}": value for name, value in stats.items()},
            **memory_metrics(),
        }
        metrics |= {f"fully_async/count/dropped/{reason}": float(n) for reason, n in sorted(self._dropped.items())}
        metrics |= {f"fully_async/restarts/{role}": float(count) for role, count in restarts.items()}
        return metrics
