"""`rl-metrics serve`: runs as a page that is renewed as they write."""

import argparse
from pathlib import Path

from rl_core.errors import RLError
from rl_metrics.commands.parts import Verbs, refuse
from rl_metrics.report.server import ReportServer
from rl_metrics.report.writing import MAX_TRAJECTORIES
from rl_metrics.trackers.console_views import RunConsole


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("serve", help="the report of runs, live, for a browser on this machine")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run; several are compared")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0, the default, takes a free one")
    parser.add_argument(
        "--max-trajectories",
        type=int,
        default=MAX_TRAJECTORIES,
        metavar="N",
        help="of a run; a sample of more is kept, worst cases in it (default: %(default)s)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        server = ReportServer(arguments.runs, port=arguments.port, max_trajectories=arguments.max_trajectories)
    except (RLError, OSError, OverflowError) as error:  # OverflowError: no such port
        return refuse(str(error))
    try:
        RunConsole(soft_wrap=True).print(f"{server.url}  (Ctrl-C ends)", markup=False, highlight=False)
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0
