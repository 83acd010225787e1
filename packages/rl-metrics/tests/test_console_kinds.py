"""Kinds of consoles: plain lines with reminders, quiet, JSON, and the choice of the kind."""

import io
import json
import sys
import threading

from rich.console import Console

from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers import ConsoleTracker

SAMPLE = GenerationSample(prompt_uid="p", input="1", output="2", score=0.0, policy_version=(0, 0), source="x")
DEADLINE_S = 60.0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def written(kind, clock=None):
    """Return the output of a console for a short run."""
    file = io.StringIO()
    tracker = ConsoleTracker(console=Console(file=file, width=80), kind=kind, clock=clock or Clock())
    with tracker.phase("starting \x1b[2J"):
        tracker.say("engine: \x9b31m")
    tracker.begin("GRPO", total_steps=2)
    tracker.log_generations(0, "validation/generations", [SAMPLE])
    tracker.log(1, {"critic/rewards/mean": 0.5, "actor/entropy": float("nan")})
    tracker.say("health: warning: collapse", style="yellow")
    tracker.log(2, {"critic/rewards/mean": 0.75})
    tracker.summary("run finished", {"steps": 2, "wall_s": 1.5, "folder": "r\x7f"})
    tracker.close()
    return file.getvalue()


def test_json_is_an_object_a_line_with_all_metrics():
    text = written("json")
    assert text.isprintable() or set(text) - set(filter(str.isprintable, text)) == {"\n"}
    lines = [json.loads(line) for line in text.splitlines()]
    assert {type(line.pop("time")) for line in lines} == {float}
    assert lines[:4] == [
        {"event": "phase_began", "phase": r"starting \x1b[2J"},
        {"event": "message", "text": r"engine: \x9b31m"},
        {"event": "phase_ended", "phase": r"starting \x1b[2J", "outcome": "0.0 s"},
        {"event": "began", "title": "GRPO", "total_steps": 2, "done_steps": 0},
    ]
    steps = [line for line in lines if line["event"] == "step"]
    assert steps[0]["metrics"] == {"critic/rewards/mean": 0.5, "actor/entropy": None}
    assert (steps[1]["step"], steps[1]["total_steps"]) == (2, 2)
    rows = {"steps": 2, "wall_s": 1.5, "folder": "r\x7f"}
    assert lines[-1] == {"event": "summary", "title": "run finished", "rows": rows}


def test_quiet_is_findings_and_the_end():
    assert written("quiet").splitlines() == [
        "health: warning: collapse",
        "run finished",
        "  steps   2",
        "  wall_s  1.5",
        r"  folder  r\x7f",
    ]


def test_off_is_nothing(capfd):
    tracker = ConsoleTracker(kind="off")
    tracker.say("hello", style="red")
    tracker.summary("end", {"a": 1})
    tracker.close()
    assert capfd.readouterr() == ("", "")


def test_force_color_makes_no_terminal_of_a_file(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    tracker = ConsoleTracker()
    tracker.begin("x", total_steps=2)
    tracker.close()
    assert sys.stdout.getvalue() == "x: 2 steps\n"


class Seen(io.StringIO):
    """A buffer that signals the first write."""

    def __init__(self):
        super().__init__()
        self.was_written = threading.Event()

    def write(self, text):
        self.was_written.set()
        return super().write(text)


def test_a_part_that_takes_long_is_told_of_again():
    file, clock = Seen(), Clock()
    tracker = ConsoleTracker(console=Console(file=file, width=80), clock=clock)
    with tracker.phase("rollouts of step 1", is_brief=True, detail=lambda: "3 of 8"):
        for clock.now in (31.0, 61.0):
            assert file.was_written.wait(DEADLINE_S)
            file.was_written.clear()
    tracker.close()
    assert file.getvalue().splitlines()[0] == "still rollouts of step 1 ... 31 s, 3 of 8"


def test_a_part_is_told_of_each_time_that_it_has_taken_twice_as_long(monkeypatch):
    file, clock = io.StringIO(), Clock()
    monkeypatch.setattr(ConsoleTracker, "_tick_until_closed", lambda _: None)
    tracker = ConsoleTracker(console=Console(file=file, width=80), clock=clock)
    with tracker.phase("rollouts", is_brief=True):
        for clock.now in range(300):
            tracker._tick()
    assert file.getvalue().splitlines() == [f"still rollouts ... {seconds} s" for seconds in (30, 60, 120, 240)]
