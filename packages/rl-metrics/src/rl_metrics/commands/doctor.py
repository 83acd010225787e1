"""`rl-metrics doctor`: why a run is sick."""

import argparse
import json
import sys
from pathlib import Path

from rl_core.errors import RLError
from rl_metrics.commands.parts import Verbs, refuse
from rl_metrics.doctor import diagnose
from rl_metrics.doctor.showing import show
from rl_metrics.run_record import open_run
from rl_metrics.trackers.console_views import RunConsole

FOUND = 1
UNKNOWN = 2


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "doctor",
        help="why a run hangs, grows in memory, or has engine and learner apart: exit status 0 when nothing is found, "
        "1 when something is, 2 when it cannot be read or says nothing",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        diagnosis = diagnose(open_run(arguments.folder))
    except (RLError, OSError) as error:
        return refuse(str(error))
    if arguments.json:
        sys.stdout.write(json.dumps(diagnosis.to_json(), indent=2, ensure_ascii=True, allow_nan=False) + "\n")
    else:
        show(diagnosis, RunConsole())
    if diagnosis.ailments:
        return FOUND
    return 0 if any(reading.state == "right" for reading in diagnosis.readings) else UNKNOWN
