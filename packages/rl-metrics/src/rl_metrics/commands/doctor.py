"""`rl-metrics doctor`: diagnose an unhealthy run."""

import argparse
from pathlib import Path

from rl_metrics.commands.parts import Verbs, opened_run, say, say_json
from rl_metrics.doctor import Ailment, Cause, Diagnosis, diagnose

FOUND = 1
UNKNOWN = 2


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "doctor",
        help="diagnose hangs, memory growth, and mismatches of engine and learner: exit status 0 without a problem, "
        "1 with one, 2 if the run cannot be read or its files lack the data",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    diagnosis = diagnose(opened_run(arguments.folder))
    if arguments.json:
        say_json(diagnosis.to_json())
    else:
        show(diagnosis)
    if diagnosis.ailments:
        return FOUND
    return 0 if any(reading.state == "right" for reading in diagnosis.readings) else UNKNOWN


def show(diagnosis: Diagnosis) -> None:
    """Print the problems, most likely cause first, then the checks without a problem."""
    say(f"run {diagnosis.run}", style="bold")
    first = diagnosis.first_cause
    if first is not None:
        say(f"first cause: {first.title}", style="bold red")
    elif not diagnosis.ailments and all(reading.state == "unknown" for reading in diagnosis.readings):
        say("nothing could be checked", style="bold yellow")
    elif not diagnosis.ailments:
        say("no problem found", style="bold green")
    for ailment in diagnosis.ailments:
        _show_ailment(ailment)
    for number, reading in enumerate(diagnosis.readings):
        if not number:
            say("")
        mark, style = ("ok", "green") if reading.state == "right" else ("unknown", "yellow")
        say(f"{reading.kind}: {mark}: {reading.text}", style=style)


def _show_ailment(ailment: Ailment) -> None:
    say("")
    say(f"{ailment.kind}: {ailment.what}", style="bold")
    evidence = list(dict.fromkeys(evidence.text for evidence in ailment.evidence))
    for text in evidence:
        say(f"  {text}")
    said = set(evidence)
    for number, cause in enumerate(ailment.causes, start=1):
        _show_cause(number, cause, said)
    if ailment.against:
        say("  evidence against other causes:", style="dim")
    for name, text in ailment.against:
        say(f"    {name}: {text}", style="dim")
    for line in ailment.details:
        say(f"  | {line}", style="dim")


def _show_cause(number: int, cause: Cause, said: set[str]) -> None:
    """Print a cause without lines that are in `said`, and add its lines to `said`."""
    share = "" if cause.share is None else f" ({100.0 * cause.share:.0f} %)"
    say(f"  {number}. {cause.title}{share}", style="bold")
    evidence = [f"     because {evidence.text}" for evidence in cause.evidence if evidence.text not in said]
    advice = [f"     try: {advice}" for advice in cause.advice if advice not in said]
    for line in dict.fromkeys(evidence):
        say(line)
    for line in dict.fromkeys(advice):
        say(line, style="cyan")
    said.update(cause.advice, (evidence.text for evidence in cause.evidence))
