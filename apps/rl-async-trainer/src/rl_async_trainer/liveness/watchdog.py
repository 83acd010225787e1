"""Detect a run without progress and explain it in hang.json, even if the event loop is blocked.

Everything happens in a thread; only the roles are asked on the event loop.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_core.cluster import RoleReport, process_stacks
from rl_metrics.hang import HangReport, write_hang_report

MAX_LOOK_S = 5.0
PING_S = 10.0
"""Maximum time for the event loop to run a callback; after that it counts as blocked."""
WRITE_S = 60.0
"""Maximum time to write a report: a full or unresponsive disk may have caused the hang."""
LAST_WRITE_S = 1.0
"""Time for a report in progress when the work ends, so that an unresponsive disk does not block the exit."""
NAME = "controller"


class Watchdog:
    """Reports once after a time without progress; progress arms it again.

    Use it as `async with` around the work. `progress` can be called from any thread.
    """

    def __init__(
        self,
        deadline_s: float,
        *,
        collect: Callable[[], Coroutine[Any, Any, HangReport]],
        path: Path,
        on_hang: Callable[[HangReport], None],
        clock: Callable[[], float] = time.monotonic,
        collect_deadline_s: float = 60.0,
    ) -> None:
        """Set the deadline and the report's path.

        Args:
            deadline_s: Maximum time without progress.
            collect: Collects every role's report, on the event loop; the time without progress is filled in.
            path: Path of the report, hang.json in the run's folder.
            on_hang: Called once per hang in the watchdog's thread, after the report is written. It must not raise.
            clock: Returns seconds.
            collect_deadline_s: Maximum time for `collect`; after that only this process's stacks are reported.
        """
        self._deadline_s = deadline_s
        self._collect = collect
        self._path = path
        self._on_hang = on_hang
        self._clock = clock
        self._collect_deadline_s = collect_deadline_s
        self._progress = clock(), "start"
        self._reported: tuple[float, str] | None = None
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._has_ended: Future[None] = Future()

    def progress(self, what: str) -> None:
        """Record progress: a session, a step, a weight update, a checkpoint, or a batch of validation."""
        self._progress = self._clock(), what  # one assignment, which other threads see at once

    async def __aenter__(self) -> "Watchdog":
        self._loop = asyncio.get_running_loop()
        self.progress("start")
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._has_ended.set_result(None)
        self._thread.join(LAST_WRITE_S)

    def check(self) -> HangReport | None:
        """Check the clock once, in the watchdog's thread; return the report of a newly detected hang."""
        progress = self._progress
        if progress is self._reported or self._clock() < progress[0] + self._deadline_s:
            return None
        report = self._collected()
        if self._progress is not progress or self._has_ended.done():
            return None
        self._reported = progress
        no_progress_s = self._clock() - progress[0]
        report = self._written(replace(report, no_progress_s=no_progress_s, last_progress=progress[1]))
        self._on_hang(report)
        return report

    # -- inside

    def _run(self) -> None:
        while not wait({self._has_ended}, min(self._deadline_s / 20, MAX_LOOK_S)).done:
            self.check()

    def _collected(self) -> HangReport:
        """Return the collector's result, or a report of this process alone if the collector fails."""
        if self._is_blocked():
            return self._own_report(None)
        if self._has_ended.done():  # the event loop may be closed
            return self._own_report("have ended")
        collecting = asyncio.run_coroutine_threadsafe(self._collect(), self._loop)
        ends: set[Future[Any]] = {collecting, self._has_ended}
        wait(ends, self._collect_deadline_s, FIRST_COMPLETED)
        if not collecting.done() or collecting.cancelled():
            collecting.cancel()
            silent = f"did not report within {self._collect_deadline_s:g} s"
            return self._own_report(None if not self._has_ended.done() and self._is_blocked() else silent)
        if (failure := collecting.exception()) is not None:
            return self._own_report(f"could not report: {type(failure).__name__}: {failure}")
        return collecting.result()

    def _is_blocked(self) -> bool:
        """Whether the event loop runs nothing; False once the work has ended."""
        has_run: Future[None] = Future()
        self._loop.call_soon_threadsafe(has_run.set_result, None)
        ends = {has_run, self._has_ended}
        return not wait(ends, min(PING_S, self._collect_deadline_s), FIRST_COMPLETED).done

    def _own_report(self, failure: str | None) -> HangReport:
        """A report of this process alone.

        Args:
            failure: Why the other roles are missing; None if this process's event loop is blocked.
        """
        silent_s = 0.0 if failure else min(PING_S, self._collect_deadline_s)
        blocked = f"the event loop of {NAME} is blocked: it ran nothing for {silent_s:g} s"
        stack = process_stacks(self._loop)
        return HangReport(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            run=str(self._path.parent),
            no_progress_s=0.0,
            roles=(RoleReport(name=NAME, since_s=silent_s, is_answering=failure is not None, stack=stack),),
            causes=(f"the roles {failure}" if failure else blocked,),
        )

    def _written(self, report: HangReport) -> HangReport:
        """Write the report in a new thread, and give up an unresponsive disk."""
        failure = "could not be written in time"

        def write() -> None:
            nonlocal failure
            try:
                write_hang_report(self._path, report)
                failure = ""
            except OSError as error:
                failure = f"cannot be written: {error.strerror}"

        writing = threading.Thread(target=write, daemon=True)
        writing.start()
        writing.join(WRITE_S)
        return replace(report, causes=(*report.causes, f"{self._path} {failure}")) if failure else report
