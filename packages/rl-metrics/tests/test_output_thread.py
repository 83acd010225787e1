"""Output never blocks: text that a stopped terminal does not accept is dropped, and the run continues."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest

from rl_core.testing import wait_until
from rl_metrics.trackers.console import MAX_QUEUED, ConsoleTracker, OutputThread, RunConsole

PROGRAM = """
from rl_metrics.trackers.console import ConsoleTracker
tracker = ConsoleTracker()
tracker.begin("GRPO", total_steps=3)
for step in (1, 2, 3):
    tracker.log(step, {"critic/score/mean": 0.5})
tracker.summary("run finished", {"steps": 3})
"""


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):  # the test may have closed it
            os.close(descriptor)


def read_all(reader, into):
    while content := os.read(reader, 1 << 16):
        into.append(content)


def test_writes_come_in_their_order(pipe):
    reader, writer = pipe
    stream = OutputThread(writer)
    for number in range(1000):
        assert stream.write(f"{number}\n") == len(f"{number}\n")
    assert stream.drain()
    assert os.read(reader, 1 << 16).decode().split() == [str(number) for number in range(1000)]


def test_a_reader_that_sleeps_holds_nobody_up_and_gets_whole_writes_when_it_wakes(pipe):
    reader, writer = pipe
    stream = OutputThread(writer)
    lines = [f"{number:09}" + "x" * 990 + "\n" for number in range(3 * MAX_QUEUED)]
    for line in lines:
        stream.write(line)
    assert not stream.drain(0.0)
    found = []
    thread = threading.Thread(target=read_all, args=(reader, found))
    thread.start()
    assert stream.drain(60.0)
    stream.write("again\n")
    assert stream.drain(60.0)
    os.close(writer)
    thread.join(60.0)
    *kept, again = b"".join(found).decode().splitlines(keepends=True)
    found_lines = {*kept}
    assert kept == [line for line in lines if line in found_lines]  # whole lines, in order
    assert MAX_QUEUED <= len(kept) < len(lines)
    assert again == "again\n"


def test_a_reader_that_is_gone_is_told_once(pipe):
    reader, writer = pipe
    os.close(reader)
    stream = OutputThread(writer)
    stream.write("lost")
    wait_until(stream.drain, "the thread", deadline_s=60.0)
    with pytest.raises(BrokenPipeError):
        stream.write("told")
    stream.write("not told again")
    assert stream.drain(60.0)


def test_a_live_display_on_a_terminal_that_is_held():
    master, slave = os.openpty()
    try:
        stream = OutputThread(slave)
        assert stream.isatty()
        tracker = ConsoleTracker(console=RunConsole(file=stream, force_terminal=True, force_interactive=True, width=80))
        tracker.begin("GRPO", total_steps=100_000)
        step = 0
        while not stream._writes.full():
            step += 1
            tracker.say("x" * 4000)
            tracker.log(step, {"critic/score/mean": 0.5})
        tracker.end()
    finally:
        os.close(master)  # from now on, writes fail
        assert stream.drain(60.0)
        os.close(slave)


def test_a_program_that_ends_has_said_everything():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert "GRPO 3/3  reward 0.500" in done.stdout
    assert done.stdout.rstrip().endswith("steps  3")


def test_output_that_a_test_or_a_notebook_takes_stays_as_it_is(capsys):
    ConsoleTracker().say("hello")
    assert capsys.readouterr().out == "hello\n"
