"""`rl-metrics serve`: serve a page of runs that updates while they write."""

import argparse
import errno
import time
from pathlib import Path

from rl_metrics.commands.parts import Verbs, refuse, require_own, say
from rl_metrics.commands.report import add_runs
from rl_metrics.report.server import LOOK_EVERY_S, ReportServer
from rl_metrics.run_files.run_record import has_begun


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("serve", help="serve a live report to a browser on this machine")
    add_runs(parser)
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 chooses a free one (default: 0)")
    parser.add_argument("--wait", action="store_true", help="wait until every run has written something")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        return _serve(arguments)
    except KeyboardInterrupt:
        return 0


def _serve(arguments: argparse.Namespace) -> int:
    for path in arguments.runs if arguments.wait else ():
        _wait_for(path)
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
    try:
        say(f"{server.url}  (Ctrl-C stops)")
        server.wait()
    finally:
        server.close()
    return 0


def _wait_for(path: Path) -> None:
    """Wait until a run has written something."""
    if has_begun(path):
        return
    say(f"waiting for {path} to be written (Ctrl-C stops)")
    while not has_begun(path):
        time.sleep(LOOK_EVERY_S)
