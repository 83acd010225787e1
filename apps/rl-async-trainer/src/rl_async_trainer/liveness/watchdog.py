"""Detect a run without progress and explain it in hang.json, even if the event loop is blocked.

A task checks the clock while the event loop runs, and a thread checks that the task is still running.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal

from rl_core.cluster import RoleReport, process_stacks
from rl_metrics.hang import HangReport, write_hang_report

Phase = Literal["armed", "collecting", "reported"]
MAX_LOOK_S = 5.0
LAST_WRITE_S = 1.0
"""Time for a report in progress when the work ends, so that an unresponsive disk does not block the exit."""
NAME = "controller"


@dataclass(slots=True)
class _Watched:
    """State that both sides share, under one lock.

    Attributes:
        progress_at: Time of the last progress, on the watchdog's clock.
        last: Description of the last progress.
        beat_at: When the event loop last ran.
        collecting_at: When the collection of evidence started.
        phase: Whether a hang was detected since the last progress.
    """

    progress_at: float
    beat_at: float
    last: str = "start"
    collecting_at: float = 0.0
    phase: Phase = "armed"


class Watchdog:
    """Reports once after a time without progress; progress arms it again.

    Use it as `async with` around the work. `progress` can be called from any thread.
    """

    def __init__(
        self,
        deadline_s: float,
        *,
        collect: Callable[[], Awaitable[HangReport]],
        path: Path,
        on_hang: Callable[[HangReport], None],
        clock: Callable[[], float] = time.monotonic,
        collect_deadline_s: float = 60.0,
    ) -> None:
        """Set the deadline and the report's path.

        Args:
            deadline_s: Maximum time without progress.
            collect: Collects every role's report; the time without progress is filled in.
            path: Path of the report, hang.json in the run's folder.
            on_hang: Called once per hang, after the report is written: on the event loop, or in the watchdog's thread
                if the loop is blocked. It must not raise.
            clock: Returns seconds.
            collect_deadline_s: Maximum time for `collect`; after that only this process's stacks are reported.
        """
        self._deadline_s = deadline_s
        self._collect = collect
        self._path = path
        self._on_hang = on_hang
        self._clock = clock
        self._collect_deadline_s = collect_deadline_s
        self._lock = threading.Lock()
        self._watched = _Watched(progress_at=clock(), beat_at=clock())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._has_ended = threading.Event()

    @property
    def no_progress_s(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._watched.progress_at

    @property
    def last_progress(self) -> str:
        """Description of the last progress."""
        return self._watched.last

    def progress(self, what: str) -> None:
        """Record progress: a session, a step, a weight update, a checkpoint, or a batch of validation."""
        with self._lock:
            watched = self._watched
            watched.progress_at, watched.last, watched.phase = self._clock(), what, "armed"

    async def __aenter__(self) -> "Watchdog":
        with self._lock:
            self._watched = _Watched(progress_at=self._clock(), beat_at=self._clock())
        self._task = asyncio.create_task(self._run(), name="watchdog")
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._has_ended.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._thread is not None:
            self._thread.join(LAST_WRITE_S)

    async def check(self) -> HangReport | None:
        """Check the clock once, on the event loop; return the report of a newly detected hang."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._watched.beat_at = self._clock()
            if self._watched.phase != "armed" or self._clock() < self._watched.progress_at + self._deadline_s:
                return None
            self._watched.phase, self._watched.collecting_at = "collecting", self._clock()
        collected = await self._collected()
        if not self._take("collecting"):
            return None  # progress was made, or the thread reported first
        report = replace(collected, no_progress_s=self.no_progress_s, last_progress=self.last_progress)
        report = await self._written_aside(report)
        self._on_hang(report)
        return report

    def check_loop(self) -> HangReport | None:
        """Check once, in a thread, whether the event loop still runs; return the report if it does not."""
        with self._lock:
            watched, now = self._watched, self._clock()
            is_stuck = watched.phase == "armed" and now >= max(watched.beat_at, watched.progress_at) + self._deadline_s
            longest_s = self._collect_deadline_s + self._look_s
            is_stuck |= watched.phase == "collecting" and now >= watched.collecting_at + 2 * longest_s
            stuck_s = now - watched.beat_at
            phase = watched.phase
        if not is_stuck or not self._take(phase):
            return None
        report = self._written(
            self._own_report(f"the event loop of {NAME} has been blocked for {stuck_s:.0f} s", stuck_s)
        )
        self._on_hang(report)
        return report

    # -- inside

    @property
    def _look_s(self) -> float:
        return min(self._deadline_s / 20, MAX_LOOK_S)

    def _take(self, phase: Phase) -> bool:
        """Mark the hang as reported; return False if another reporter or progress came first."""
        with self._lock:
            is_mine = self._watched.phase == phase
            if is_mine:
                self._watched.phase = "reported"
            return is_mine

    async def _run(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(self._look_s)

    def _look(self) -> None:
        while not self._has_ended.wait(self._look_s):
            self.check_loop()

    async def _collected(self) -> HangReport:
        """Return the collector's result, or a report of this process alone if the collector fails."""
        collecting = asyncio.ensure_future(self._collect())
        try:
            await asyncio.wait([collecting], timeout=self._collect_deadline_s)
        finally:
            collecting.cancel()
        if not collecting.done():
            collecting.add_done_callback(_forget)
            return self._own_report(f"the roles did not report within {self._collect_deadline_s:g} s", None)
        if collecting.cancelled():
            return self._own_report("the request to the roles was cancelled", None)
        failure = collecting.exception()
        if failure is not None:
            return self._own_report(f"the roles could not report: {type(failure).__name__}: {failure}", None)
        return collecting.result()

    def _own_report(self, cause: str, stuck_s: float | None) -> HangReport:
        """A report of this process alone.

        Args:
            cause: Why the other roles are missing.
            stuck_s: How long its event loop has been blocked; None if it runs.
        """
        own = RoleReport(
            name=NAME, since_s=stuck_s or 0.0, is_answering=stuck_s is None, stack=process_stacks(self._loop)
        )
        return HangReport(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            run=str(self._path.parent),
            no_progress_s=self.no_progress_s,
            last_progress=self.last_progress,
            roles=(own,),
            causes=(cause,),
        )

    async def _written_aside(self, report: HangReport) -> HangReport:
        """Write the report in a new thread, because the event loop's worker threads may all be blocked."""
        written: Future[HangReport] = Future()
        threading.Thread(target=lambda: written.set_result(self._written(report)), daemon=True).start()
        done, _ = await asyncio.wait([asyncio.wrap_future(written)], timeout=self._collect_deadline_s)
        if done:
            return written.result()
        return replace(report, causes=(*report.causes, f"{self._path} could not be written in time"))

    def _written(self, report: HangReport) -> HangReport:
        try:
            write_hang_report(self._path, report)
        except OSError as error:  # a full disk may have caused the hang
            return replace(report, causes=(*report.causes, f"{self._path} cannot be written: {error.strerror}"))
        return report


def _forget(collecting: "asyncio.Future[HangReport]") -> None:
    """Ignore the error of an abandoned call."""
    if not collecting.cancelled():
        collecting.exception()
