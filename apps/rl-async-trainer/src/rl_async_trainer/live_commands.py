"""`status` and `scale`: commands that speak to a live run."""

import argparse
from pathlib import Path
from typing import Any

from rl_async_trainer.control_socket import ask_run
from rl_trainer.command_line import say

STATUS_DEADLINE_S = 60.0
SCALE_DEADLINE_S = 1800.0


def status(words: list[str]) -> int:
    """`status RUN`."""
    parser = argparse.ArgumentParser(prog="rl-async-trainer status", description="What a live run does.")
    parser.add_argument("run", type=Path, help="the run's folder")
    options = parser.parse_args(words)
    for line in _status_lines(ask_run(options.run, {"do": "status"}, deadline_s=STATUS_DEADLINE_S)):
        say(line)
    return 0


def scale(words: list[str]) -> int:
    """`scale RUN --engines N`."""
    parser = argparse.ArgumentParser(
        prog="rl-async-trainer scale", description="Add engines to a live run, or take some away."
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--engines", type=int, required=True, help="how many engines there shall be")
    options = parser.parse_args(words)
    count = ask_run(options.run, {"do": "scale", "engines": options.engines}, deadline_s=SCALE_DEADLINE_S)
    say(f"the run has {count} engine(s) now")
    return 0


def _status_lines(answer: dict[str, Any]) -> list[str]:
    schedule = answer["schedule"]
    lines = [
        f"step {schedule['step']} of {schedule['steps']}",
        f"versions: engines serve {schedule['served_version']}, the learner trains {schedule['learner_version']}",
        f"groups: {schedule['inflight']} generated now, {schedule['ready']} ready, {schedule['waiting']} to start",
    ]
    if schedule["blocked_by"]:
        lines.append(f"the learner waits for {', '.join(schedule['blocked_by'])}")
    for name, role in answer["roles"].items():
        lines.append(f"{name}: {role}")
    return lines
