"""`rl-metrics list`: every metric, as a terminal table, JSON, or the page docs/metrics.md."""

import argparse
import fnmatch
import re
import sys
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from rl_metrics.commands.parts import AddVerb, refuse, say_json, table_console
from rl_metrics.definitions.definition import Metric
from rl_metrics.definitions.table import FAMILIES

PAGE_HEAD = """# Metrics

Every metric of the project, as defined in `packages/rl-metrics/src/rl_metrics/definitions/table.py`. Written by
`rl-metrics list --markdown > docs/metrics.md`; a test fails if it is out of date.

A name with `{placeholders}` is a family. *Reduced* is how the values of a step's micro-batches and ranks are combined.
*Healthy* is the usual range of a healthy run; a value outside is a reason to look, not a verdict. Unit `1` is a plain
number.
"""
GLOB = re.compile(r"[*?\[]")
"""Characters that make a pattern a glob."""


def add_to(add_verb: AddVerb) -> None:
    """Add the verb."""
    parser = add_verb("list", "list every metric: name, unit, reduction, meaning, healthy values")
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        help="only metrics with this text in name or meaning, or whose name matches a glob, such as 'actor/*'",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print as JSON")
    form.add_argument("--markdown", action="store_true", help="print the page docs/metrics.md")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    chapters = _matching(arguments.pattern)
    if not chapters:
        return refuse(f"no metric has {arguments.pattern!r} in its name or meaning; `rl-metrics list` lists all.")
    if arguments.json:
        say_json([_json_row(metric, chapter) for chapter, metrics in chapters.items() for metric in metrics])
    elif arguments.markdown:
        sys.stdout.write(_as_markdown(chapters))
    else:
        _show(chapters)
    return 0


def _matching(pattern: str) -> dict[str, list[Metric]]:
    """Return metrics by chapter whose name or meaning contains the pattern, ignoring case; "" matches all.

    Args:
        pattern: Text; with `*`, `?` or `[`, a glob that must match the whole name, such as `actor/*`.
    """
    text = pattern.lower()

    def matches(metric: Metric) -> bool:
        if GLOB.search(text):
            return fnmatch.fnmatchcase(metric.name.lower(), text)
        return text in metric.name.lower() or text in metric.meaning.lower()

    chapters = {chapter: list(filter(matches, metrics)) for chapter, metrics in FAMILIES.items()}
    return {chapter: metrics for chapter, metrics in chapters.items() if metrics}


def _as_markdown(chapters: dict[str, list[Metric]]) -> str:
    """Return the docs page."""
    parts = [PAGE_HEAD]
    for chapter, metrics in chapters.items():
        rows = "\n".join(_markdown_row(metric) for metric in metrics)
        parts.append(f"## {chapter}\n\n| name | unit | reduced | meaning | healthy |\n|---|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _show(chapters: dict[str, list[Metric]]) -> None:
    """Print one table per chapter."""
    console = table_console()
    for chapter, metrics in chapters.items():
        table = Table(title=chapter, title_justify="left", expand=True)
        table.add_column("name", style="bold", overflow="fold", ratio=4)
        for column, ratio in (("unit", 1), ("reduced", 2), ("meaning", 6), ("healthy", 2)):
            table.add_column(column, ratio=ratio)
        for metric in metrics:
            table.add_row(*map(Text, _cells(metric)))
        console.print(table)
    console.print(f"{sum(map(len, chapters.values()))} metrics and families")


def _cells(metric: Metric) -> tuple[str, ...]:
    return metric.name, metric.unit, metric.reduced, metric.meaning, str(metric.healthy or "")


def _markdown_row(metric: Metric) -> str:
    name, *cells, healthy = _cells(metric)
    band = f"{healthy} ({metric.healthy.source})" if metric.healthy else ""
    return f"| `{name}` | {' | '.join(cells)} | {band} |"


def _json_row(metric: Metric, chapter: str) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(metric)
    return row | {"chapter": chapter, "weighted_by": metric.counts}
