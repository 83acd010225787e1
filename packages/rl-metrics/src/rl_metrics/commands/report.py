"""`rl-metrics report`: write a report of runs as one HTML file."""

import argparse
from pathlib import Path

from rl_metrics.commands.parts import Verbs, opened_run, say
from rl_metrics.report.writing import MAX_TRAJECTORIES, write_report

FILE = "report.html"


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "report", help="write one HTML file with verdict, curves and every trajectory token by token"
    )
    add_runs(parser)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"HTML file to write (default: {FILE} in the first run's folder)"
    )
    parser.set_defaults(run=_run)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments shared by `report` and `serve`."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl; several are compared"
    )
    parser.add_argument(
        "--max-trajectories",
        type=int,
        default=MAX_TRAJECTORIES,
        metavar="N",
        help="maximum per run; beyond it, a sample that keeps the worst cases (default: %(default)s)",
    )


def _run(arguments: argparse.Namespace) -> int:
    runs = [opened_run(path) for path in arguments.runs]
    output = arguments.output or runs[0].folder / FILE
    write_report(runs, output, max_trajectories=arguments.max_trajectories)
    say(str(output))
    return 0
