"""`rl-metrics check`: whether a run is healthy, as an exit status."""

import argparse
import json
import math
import sys
from pathlib import Path

from rl_core.errors import DataError, RLError, SettingsError
from rl_metrics.commands.parts import Verbs, refuse
from rl_metrics.health.finding import RANKS
from rl_metrics.health.run_verdict import judge_run
from rl_metrics.health.showing import verdict_lines
from rl_metrics.run_record import open_run
from rl_metrics.trackers.text import plain_text

SICK = 1
UNKNOWN = 2
MAX_LINE = 1000


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "check", help="whether a run is healthy: exit status 0 when it is, 1 with findings, 2 when it cannot be read"
    )
    parser.add_argument("path", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    parser.add_argument(
        "--fail-on",
        choices=("warning", "critical"),
        default="warning",
        help="least severity of a finding for exit status 1 (default: warning)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="RULE.THRESHOLD=VALUE",
        help="another threshold, such as kl_high.max=0.05; may be repeated; `rl-metrics rules` lists them",
    )
    parser.add_argument("--off", action="append", default=[], metavar="RULE", help="leave a rule out; may be repeated")
    parser.add_argument("--json", action="store_true", help="the verdict as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        thresholds = dict(_setting(text) for text in arguments.set)
        record = open_run(arguments.path)
        if not len(record.history.steps):
            raise DataError(f"{arguments.path} has no step in its metrics.jsonl; there is nothing to judge yet.")
        verdict = judge_run(record, thresholds=thresholds, off=arguments.off)
    except (RLError, OSError) as error:
        return refuse(str(error))
    if arguments.json:
        sys.stdout.write(json.dumps(verdict.to_json(), indent=2, ensure_ascii=False) + "\n")
    else:
        lines = verdict_lines(verdict, name=record.name)
        sys.stdout.write("".join(f"{plain_text(line, limit=MAX_LINE)}\n" for line in lines))
    if verdict.status == "unknown":
        return UNKNOWN
    return SICK if RANKS[verdict.status] >= RANKS[arguments.fail_on] else 0


def _setting(text: str) -> tuple[str, float]:
    name, equals, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not equals or math.isnan(value):
        raise SettingsError(f"--set takes RULE.THRESHOLD=VALUE, such as kl_high.max=0.05; found {text!r}.")
    return name, value
