"""Run training jobs in this process, and time everything that only reports on them.

    python _metrics_timing.py JOBS

JOBS is JSON, a list of jobs: the output file for timings, and the arguments of `rl-sync-trainer`.
Calls are timed where they enter metrics and trackers; a nested call counts as part of the outer one. The trackers' own
threads count with their processor time, which they take from the main job. Two times are reported separately: closing
the trackers, which waits for the last report and happens once, after the last step; and the engine's time for probes at
validations, which is generation like the validations' responses.
"""

import functools
import json
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import rl_distill.megatron.rank_batches as rank_batches
import rl_sync_trainer.loop as sync_loop
import rl_sync_trainer.stages as sync_evaluation
import rl_sync_trainer.stages as sync_stages
import rl_trainer_parts.rollouts.setup as flow
from rl_metrics.reductions import Recorder
from rl_metrics.run_files import EventLog
from rl_metrics.trackers import BackgroundTracker, Fanout
from rl_sync_trainer.main import main
from rl_trainer_parts.reporting.rollout_rows import RolloutWriter
from rl_trainer_parts.reporting.token_probes import TokenProbes

ENTRIES: tuple[tuple[Any, str], ...] = (
    (sync_loop, "record_step"),
    (sync_loop, "draft_rollouts"),
    (sync_stages, "record_rollouts"),
    (flow, "rollout_extras"),
    (rank_batches, "unpack_trained"),
    (sync_evaluation, "answers_of"),
    (sync_evaluation, "summarize_answers"),
    (sync_evaluation, "draw_samples"),
    *((Recorder, name) for name in ("record", "record_all", "record_values", "reduce", "histograms")),
    *((Fanout, name) for name in ("log", "log_late", "log_histograms", "log_generations")),
    (EventLog, "write"),
    (RolloutWriter, "write"),
)
"""Calls through which the main job enters metrics and trackers."""


class Clock:
    """Seconds by call on the main thread, and of the trackers' threads."""

    def __init__(self) -> None:
        """Start without calls."""
        self.called_s: dict[str, float] = defaultdict(float)
        self.threads_s = 0.0
        self._inside = threading.local()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, timed unless it is within another."""

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "depth", 0):
                return call(*args, **kwargs)
            self._inside.depth = 1
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.called_s[name] += time.perf_counter() - began
                self._inside.depth = 0

        return wrapper

    def awaited(self, name: str, call: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """Return the coroutine function, timed with everything it waits for."""

        @functools.wraps(call)
        async def wrapper(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            try:
                await call(*args, **kwargs)
            finally:
                self.called_s[name] += time.perf_counter() - began

        return wrapper

    def of_thread(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return the work of a thread, with its processor time counted."""

        @functools.wraps(work)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inside.depth = 1
            try:
                return work(*args, **kwargs)
            finally:
                self.threads_s += time.thread_time()

        return wrapper


class Timing:
    """Install the clocks of the main job's calls, once."""

    def __init__(self) -> None:
        """Install them."""
        self._clock, self._end = clock, end = Clock(), Clock()
        for owner, name in ENTRIES:
            setattr(owner, name, clock.timed(f"{getattr(owner, '__name__', owner)}.{name}", getattr(owner, name)))
        BackgroundTracker._work = clock.of_thread(BackgroundTracker._work)  # type: ignore[method-assign]
        TokenProbes.ask = end.awaited("probes", TokenProbes.ask)  # type: ignore[method-assign,assignment]
        Fanout.close = end.timed("close", Fanout.close)  # type: ignore[method-assign]

    def run(self, words: list[str]) -> tuple[int, dict[str, Any]]:
        """Run the trainer; return its exit status and the timings."""
        for clock in (self._clock, self._end):
            clock.called_s.clear()
            clock.threads_s = 0.0
        before_s = children_cpu_s()
        status = main(words)
        return status, {
            "called_s": dict(self._clock.called_s),
            "threads_s": self._clock.threads_s,
            "closing_s": self._end.called_s["close"],
            "probes_s": self._end.called_s["probes"],
            "children_cpu_s": children_cpu_s() - before_s,
        }


def children_cpu_s() -> float:
    """Return the processor time of finished child processes."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def run(jobs: list[tuple[str, list[str]]]) -> int:
    """Run the jobs until one fails, and write the timings; return the exit status."""
    timing = Timing()
    for report_file, words in jobs:
        status, found = timing.run(words)
        if status:
            return status
        Path(report_file).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1])))
