"""The watchdog: when, what and how often it reports; nothing blocks it."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rl_async_trainer.liveness import watchdog
from rl_async_trainer.liveness.watchdog import Watchdog
from rl_core.testing import FakeClock, wait_until
from rl_metrics.hang import HANG_FILE, HangReport, read_hang_report

FAR_S = 60.0


class Watched:
    """A watchdog with a deadline of 100 s and its dependencies."""

    def __init__(self, folder: Any, collect: Callable[[], Any] | None = None, **changes: Any) -> None:
        self.clock = FakeClock()
        self.path = folder / HANG_FILE
        self.hangs: list[HangReport] = []
        self.num_collected = 0
        self.dog = Watchdog(
            changes.pop("deadline_s", 100.0),
            collect=collect or self.collect,
            path=self.path,
            on_hang=self.hangs.append,
            **({"clock": self.clock} | changes),
        )

    async def collect(self) -> HangReport:
        self.num_collected += 1
        return HangReport(at="now", run="run", no_progress_s=0.0)

    def check(self) -> HangReport | None:
        """Check in a thread while the event loop runs."""

        async def check() -> HangReport | None:
            self.dog._loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(1) as thread:
                return await asyncio.get_running_loop().run_in_executor(thread, self.dog.check)

        return asyncio.run(check())


def test_nothing_is_reported_while_there_is_progress(tmp_path):
    watched = Watched(tmp_path)
    for number in range(5):
        watched.clock.advance(99)
        assert watched.dog.check() is None
        watched.dog.progress(f"step {number}")
    assert watched.hangs == []
    assert not watched.path.exists()


def test_a_hang_is_written_and_told_once_until_there_is_progress_again(tmp_path):
    watched = Watched(tmp_path)
    watched.dog.progress("step 7")
    watched.clock.advance(100)
    report = watched.check()
    assert (report.no_progress_s, report.last_progress) == (100.0, "step 7")
    assert read_hang_report(watched.path) == report
    watched.clock.advance(1000)
    assert watched.dog.check() is None
    assert watched.hangs == [report]

    watched.dog.progress("group p-1")
    watched.clock.advance(99)
    assert watched.dog.check() is None
    watched.clock.advance(1)
    assert watched.check().last_progress == "group p-1"
    assert (len(watched.hangs), watched.num_collected) == (2, 2)


def test_a_collector_that_never_ends_does_not_hang_the_watchdog(tmp_path):
    async def collect() -> HangReport:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if watched.hangs:
                    raise

    watched = Watched(tmp_path, collect, collect_deadline_s=0.5)
    watched.clock.advance(100)
    report = watched.check()
    assert "did not report within 0.5 s" in report.summary
    assert "in collect" in report.roles[0].stack
    assert report.roles[0].is_answering
    assert read_hang_report(watched.path).causes == report.causes


def test_a_collector_that_fails_is_said_to_have(tmp_path):
    async def collect() -> HangReport:
        raise RuntimeError("the queue is closed")

    watched = Watched(tmp_path, collect)
    watched.clock.advance(100)
    assert watched.check().causes == ("the roles could not report: RuntimeError: the queue is closed",)
    assert len(watched.hangs) == 1


def test_progress_while_the_roles_are_asked_means_that_there_was_no_hang(tmp_path):
    async def collect() -> HangReport:
        watched.dog.progress("a late group")
        return await watched.collect()

    watched = Watched(tmp_path, collect)
    watched.clock.advance(100)
    assert watched.check() is None
    assert watched.hangs == []


def test_a_report_that_cannot_be_written_is_told_all_the_same(tmp_path):
    watched = Watched(tmp_path / "is not there")
    watched.clock.advance(100)
    assert "cannot be written: No such file" in watched.check().summary
    assert len(watched.hangs) == 1


def test_a_disk_that_does_not_answer_does_not_keep_the_report(tmp_path, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(watchdog, "write_hang_report", lambda path, report: may_end.wait(FAR_S))
    monkeypatch.setattr(watchdog, "WRITE_S", 0.01)
    watched = Watched(tmp_path)
    watched.clock.advance(100)
    assert "could not be written in time" in watched.check().summary
    may_end.set()


@pytest.mark.parametrize("blocks_in", ["work", "collector"])
def test_a_blocked_event_loop_is_reported_with_its_stacks(tmp_path, blocks_in):
    """Uses the real thread and clock; the block ends once the hang is reported."""

    def block_the_loop() -> None:
        wait_until(lambda: watched.hangs, "the report", deadline_s=FAR_S)

    async def collect() -> HangReport:
        block_the_loop()
        return await watched.collect()

    watched = Watched(tmp_path, collect, deadline_s=0.2, collect_deadline_s=0.1, clock=time.monotonic)

    async def work() -> None:
        async with watched.dog:
            if blocks_in == "work":
                await asyncio.sleep(0)
                block_the_loop()
            await asyncio.to_thread(wait_until, lambda: watched.hangs, "the hang to be told", deadline_s=FAR_S)

    asyncio.run(work())
    assert len(watched.hangs) == 1
    report = read_hang_report(watched.path)
    assert "the event loop of controller is blocked" in report.summary
    assert not report.roles[0].is_answering
    assert "in block_the_loop" in report.roles[0].stack
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_work_that_ends_while_the_event_loop_is_asked_ends_the_watchdog_and_is_no_hang(tmp_path):
    watched = Watched(tmp_path, deadline_s=0.05, clock=time.monotonic)
    asked = threading.Event()

    async def work() -> None:
        async with watched.dog:
            loop = asyncio.get_running_loop()
            call, loop.call_soon_threadsafe = loop.call_soon_threadsafe, lambda *_: asked.set()
            assert asked.wait(FAR_S), "the loop was not asked"  # it is blocked, as the watchdog will find
            loop.call_soon_threadsafe = call

    asyncio.run(work())
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())
    assert watched.hangs == []
    assert not watched.path.exists()


def test_a_hang_is_noticed_by_itself_even_if_all_worker_threads_of_the_event_loop_hang(tmp_path):
    watched = Watched(tmp_path, deadline_s=0.05, clock=time.monotonic)
    may_end = threading.Event()

    async def work() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        hanging = asyncio.ensure_future(asyncio.to_thread(may_end.wait, FAR_S))
        async with watched.dog, asyncio.timeout(FAR_S / 2):
            while not watched.hangs:
                await asyncio.sleep(0.01)
        may_end.set()
        await hanging

    asyncio.run(work())
    assert len(watched.hangs) == 1
    assert watched.hangs[0].no_progress_s >= 0.05
