"""`rl-metrics doctor`: diagnose an unhealthy run."""

import argparse
from pathlib import Path

from rl_metrics.commands.parts import AddVerb, opened_run, say, say_json
from rl_metrics.doctor import Diagnosis, DoctorReport, diagnose

FOUND = 1
UNKNOWN = 2


def add_to(add_verb: AddVerb) -> None:
    """Add the verb."""
    parser = add_verb(
        "doctor",
        "diagnose hangs, memory growth, and mismatches of engine and learner: exit status 0 without a problem, "
        "1 with one, 2 if the run cannot be read or its files lack the data",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    report = diagnose(opened_run(arguments.folder))
    if arguments.json:
        say_json(report.to_json())
    else:
        show(report)
    if report.diagnoses:
        return FOUND
    return 0 if any(result.state == "right" for result in report.no_findings) else UNKNOWN


def show(report: DoctorReport) -> None:
    """Print the problems, most likely cause first, then the checks without a problem."""
    say(f"run {report.run}", style="bold")
    causes = [cause for diagnosis in report.diagnoses for cause in diagnosis.causes]
    if causes:
        say(f"first cause: {causes[0].title}", style="bold red")
    elif not report.diagnoses and all(result.state == "unknown" for result in report.no_findings):
        say("nothing could be checked", style="bold yellow")
    elif not report.diagnoses:
        say("no problem found", style="bold green")
    for diagnosis in report.diagnoses:
        _show_diagnosis(diagnosis)
    if report.no_findings:
        say("")
    for result in report.no_findings:
        mark, style = ("ok", "green") if result.state == "right" else ("unknown", "yellow")
        say(f"{result.kind}: {mark}: {result.text}", style=style)


def _show_diagnosis(diagnosis: Diagnosis) -> None:
    """Print a diagnosis, with each line of evidence and advice once."""
    say("")
    say(f"{diagnosis.kind}: {diagnosis.what}", style="bold")
    shown = dict.fromkeys(evidence.text for evidence in diagnosis.evidence)
    for text in shown:
        say(f"  {text}")
    for number, cause in enumerate(diagnosis.causes, start=1):
        share = "" if cause.share is None else f" ({100.0 * cause.share:.0f} %)"
        say(f"  {number}. {cause.title}{share}", style="bold")
        evidence = dict.fromkeys(evidence.text for evidence in cause.evidence)
        for text in [text for text in evidence if text not in shown]:
            say(f"     because {text}")
        for advice in [advice for advice in dict.fromkeys(cause.advice) if advice not in shown]:
            say(f"     try: {advice}", style="cyan")
        shown |= evidence | dict.fromkeys(cause.advice)
    for line in diagnosis.details:
        say(f"  | {line}", style="dim")
