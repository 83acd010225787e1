"""Ctrl-C and SIGTERM: the first requests a stop, the second ends the run."""

import asyncio
import os
import selectors
import signal
import subprocess
import sys
import threading

import pytest

from rl_core.errors import DeadlineError
from rl_trainer_parts.run.stopping import StopRequestedError, StopSignal

TWICE = """
import asyncio, os, signal
from rl_trainer_parts.run.stopping import StopSignal

async def main():
    with StopSignal():
        os.kill(os.getpid(), signal.SIGINT)
        print("asked", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("not reached", flush=True)

try:
    asyncio.run(main())
finally:
    print("not reached either", flush=True)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_cancels_the_work_and_waits_for_its_end(number: int, status: int) -> None:
    ended = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    async def main() -> StopSignal:
        with StopSignal() as stop:
            stop.check()
            with pytest.raises(StopRequestedError):
                await stop.run(work(), what="work", deadline_s=60)
            assert ended == ["cleaned up"]
            with pytest.raises(StopRequestedError):
                stop.check()
            return stop

    stop = asyncio.run(main())
    assert stop.number == number
    assert stop.exit_status == status


def test_the_first_signal_is_told_at_once_also_while_the_loop_is_busy() -> None:
    told = []

    async def main() -> None:
        with StopSignal(lambda: told.append("first")):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
                assert told == ["first"]

    asyncio.run(main())


def test_work_without_a_signal_gives_its_result_or_error() -> None:
    async def four() -> int:
        await asyncio.sleep(0)
        return 4

    async def fail() -> None:
        raise ValueError("its own")

    async def main() -> None:
        with StopSignal() as stop:
            assert await stop.run(four(), what="work", deadline_s=60) == 4
            with pytest.raises(ValueError, match="its own"):
                await stop.run(fail(), what="work", deadline_s=60)
            assert stop.number is None

    asyncio.run(main())


def test_work_that_fails_of_the_signal_counts_as_stopped() -> None:
    async def die_with_its_process() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("the child was killed by SIGINT")

    async def main() -> None:
        with StopSignal() as stop:
            with pytest.raises(StopRequestedError) as raised:
                await stop.run(die_with_its_process(), what="engine to start", deadline_s=60)
            assert isinstance(raised.value.__cause__, OSError)
            assert stop.exit_status == 130

    asyncio.run(main())


def test_work_begun_after_a_signal_does_not_go_on() -> None:
    reached = []

    async def work() -> None:
        await asyncio.Event().wait()
        reached.append("the end")

    async def main() -> None:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(StopRequestedError):
                await stop.run(work(), what="work", deadline_s=60)

    asyncio.run(main())
    assert reached == []


def test_a_signal_that_interrupts_no_call_wakes_a_loop_that_sleeps() -> None:
    """Another thread receives the signal, as if it arrived between the last check and the sleep."""
    falls_asleep = threading.Event()
    too_late: list[str] = []

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is None or timeout > 0:
                falls_asleep.set()
            return super().select(timeout)

    def take_signal() -> None:
        falls_asleep.wait(60)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    async def main() -> None:
        with StopSignal() as stop:
            thread = threading.Thread(target=take_signal)
            thread.start()
            asyncio.get_running_loop().call_later(20, too_late.append, "only a timer woke the loop")
            with pytest.raises(StopRequestedError):
                await stop.run(asyncio.Event().wait(), what="work", deadline_s=60)
            thread.join(60)
            assert not too_late

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(Selector())) as runner:
        runner.run(main())


def test_a_signal_to_a_fork_stops_the_fork_alone() -> None:
    async def main() -> None:
        with StopSignal() as stop:
            pid = os.fork()
            if not pid:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(stop.number or 0)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == signal.SIGTERM
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            stop.check()
            with pytest.raises(DeadlineError, match=r"waited 0\.01 s for the work"):
                await stop.run(asyncio.Event().wait(), what="work", deadline_s=0.01)

    asyncio.run(main())


def test_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def main() -> None:
        with StopSignal():
            assert signal.getsignal(signal.SIGTERM) != before[1]

    asyncio.run(main())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_signal_ends_the_process_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 143
    assert done.stdout == "asked\n"


def test_work_that_takes_too_long_is_cancelled_and_named() -> None:
    ended: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hang")

    async def main() -> None:
        with StopSignal() as stop:
            await stop.run(hang(), what="rollouts of step 3", deadline_s=0.01)

    with pytest.raises(DeadlineError, match=r"0\.01 s for the rollouts of step 3"):
        asyncio.run(main())
    assert ended == ["hang"]


def test_a_run_pauses_itself() -> None:
    async def main() -> None:
        with StopSignal() as stop:
            waiting = asyncio.create_task(stop.wait())
            await asyncio.sleep(0)
            stop.pause("the reward is 0")
            stop.pause("another reason")
            await waiting
            with pytest.raises(StopRequestedError):
                stop.check()
            assert (stop.number, stop.pause_reason, stop.exit_status) == (None, "the reward is 0", 3)

    asyncio.run(main())


def test_a_signal_outweighs_a_pause() -> None:
    async def main() -> None:
        with StopSignal() as stop:
            stop.pause("the reward is 0")
            os.kill(os.getpid(), signal.SIGINT)
            await stop.wait()
            assert stop.exit_status == 130

    asyncio.run(main())


def test_a_terminal_that_closes_may_say_so_twice() -> None:
    async def main() -> StopSignal:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(stop.wait(), 60)
            return stop

    assert asyncio.run(main()).exit_status == 129


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    async def main() -> StopSignal:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            return stop

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(main()).number is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
