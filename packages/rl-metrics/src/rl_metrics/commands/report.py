"""`rl-metrics report` and `serve`: a report of runs as one HTML file, or served while they write."""

import argparse
import errno
import time
from contextlib import closing, suppress
from pathlib import Path

from rl_metrics.commands.parts import AddVerb, opened_run, refuse, require_own, say
from rl_metrics.report.server import LOOK_EVERY_S, ReportServer
from rl_metrics.report.writing import MAX_TRAJECTORIES, write_report
from rl_metrics.run_files.run_record import has_begun

FILE = "report.html"


def add_to(add_verb: AddVerb) -> None:
    """Add the verbs."""
    report = add_verb("report", "write one HTML file with verdict, curves and every trajectory token by token")
    serve = add_verb("serve", "serve a live report to a browser on this machine")
    for parser in (report, serve):
        parser.add_argument(
            "runs",
            nargs="+",
            type=Path,
            metavar="RUN",
            help="folder of a run, or its metrics.jsonl; several are compared",
        )
        parser.add_argument(
            "--max-trajectories",
            type=int,
            default=MAX_TRAJECTORIES,
            metavar="N",
            help="maximum per run; beyond it, a sample that keeps the worst cases (default: %(default)s)",
        )
    report.add_argument(
        "--output", type=Path, metavar="FILE", help=f"HTML file to write (default: {FILE} in the first run's folder)"
    )
    report.set_defaults(run=_report)
    serve.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 chooses a free one (default: 0)")
    serve.add_argument("--wait", action="store_true", help="wait until every run has written something")
    serve.set_defaults(run=_serve)


def _report(arguments: argparse.Namespace) -> int:
    runs = [opened_run(path) for path in arguments.runs]
    output = arguments.output or runs[0].folder / FILE
    write_report(runs, output, max_trajectories=arguments.max_trajectories)
    say(str(output))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    with suppress(KeyboardInterrupt):
        for path in arguments.runs if arguments.wait else ():
            if not has_begun(path):
                say(f"waiting for {path} to be written (Ctrl-C stops)")
            while not has_begun(path):
                time.sleep(LOOK_EVERY_S)
        for path in arguments.runs:
            require_own(path)
        try:
            server = ReportServer(arguments.runs, port=arguments.port, max_trajectories=arguments.max_trajectories)
        except OverflowError as error:  # no such port
            return refuse(str(error))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return refuse(f"port {arguments.port} is in use. Choose another --port, or leave it out for a free one.")
        with closing(server):
            say(f"{server.url}  (Ctrl-C stops)")
            server.wait()
    return 0
