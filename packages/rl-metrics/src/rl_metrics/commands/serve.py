"""`rl-metrics serve`: runs as a page that is renewed as they write."""

import argparse

from rl_core.errors import RLError
from rl_metrics.commands.parts import Verbs, refuse
from rl_metrics.commands.report import add_runs
from rl_metrics.report.server import ReportServer
from rl_metrics.trackers.console_views import RunConsole


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("serve", help="the report of runs, live, for a browser on this machine")
    add_runs(parser)
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0, the default, takes a free one")
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
