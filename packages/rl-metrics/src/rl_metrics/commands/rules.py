"""`rl-metrics rules`: what health looks at."""

import argparse
import json
import sys

from rl_metrics.commands.parts import Verbs
from rl_metrics.health.guide import GUIDE
from rl_metrics.health.showing import rule_lines, rules_json, rules_markdown


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("rules", help="the rules of health: metrics, thresholds with their sources, causes")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--markdown", action="store_true", help="as the tables of docs/guides/health.md")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        sys.stdout.write(json.dumps(rules_json(GUIDE), indent=2, ensure_ascii=False) + "\n")
    elif arguments.markdown:
        sys.stdout.write(rules_markdown(GUIDE))
    else:
        sys.stdout.write("".join(f"{line}\n" for line in rule_lines(GUIDE)))
    return 0
