"""`rl-metrics report`: runs as one HTML file."""

import argparse
from pathlib import Path

from rl_metrics.commands.parts import Verbs, opened_run, say
from rl_metrics.report.writing import MAX_TRAJECTORIES, write_report

FILE = "report.html"


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("report", help="runs as one HTML file: verdict, curves, every trajectory token by token")
    add_runs(parser)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"ends in .html; otherwise {FILE} in the first run's folder"
    )
    parser.set_defaults(run=_run)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """The arguments of every verb that shows runs as a page."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl; several are compared"
    )
    parser.add_argument(
        "--max-trajectories",
        type=int,
        default=MAX_TRAJECTORIES,
        metavar="N",
        help="of a run; a sample of more is kept, worst cases in it (default: %(default)s)",
    )


def _run(arguments: argparse.Namespace) -> int:
    runs = [opened_run(path) for path in arguments.runs]
    output = arguments.output or runs[0].folder / FILE
    write_report(runs, output, max_trajectories=arguments.max_trajectories)
    say(str(output))
    return 0
