"""`rl-metrics compare`: compare two runs, or two sets of seeds."""

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rl_core.data import Json
from rl_metrics.commands.parts import Verbs, opened_run, refuse, say, say_json, table_console
from rl_metrics.comparison.compare import Comparison, Difference, compare
from rl_metrics.health.common_rules import SCORE
from rl_metrics.report.page import run_names
from rl_metrics.run_files.run_record import RunRecord
from rl_metrics.trackers.console import plain_text
from rl_metrics.validation.summary import HEADLINE

MAX_NAME = 120
COLUMNS = ("unit", "A", "B", "B - A", "95 % interval", "from")
SHORT_COLUMNS = ("A", "B", "B - A", "95 % interval")
ROOMY = 100
"""Minimum line width, in characters, to show units and origins."""

WIDTH = 80
"""Width of the short table outside a terminal, in characters."""

MAX_SHORT = 20
"""Maximum number of rows of the short table."""
SHOWN_NAMES = 20


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("compare", help="compare two runs, or two sets of seeds, with confidence intervals")
    for side in ("A", "B"):
        parser.add_argument(
            side.lower(), metavar=f"{side}[,{side}2,...]", help="folder of a run, or folders of several seeds"
        )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="GLOB",
        help='only matching metrics, such as "actor/*"; repeatable',
    )
    parser.add_argument("--last", type=int, metavar="N", help="use only the last N steps of each run")
    parser.add_argument(
        "--all", action="store_true", help="show all metrics by chapter, not only the clearest differences"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    a, b = _opened(arguments.a), _opened(arguments.b)
    histories = [run.history for run in a], [run.history for run in b]
    comparison = compare(*histories, patterns=arguments.metric, last=arguments.last)
    if not comparison.differences:
        return refuse("the two sides have no such metric in common; leave out --metric to compare all.")
    if arguments.json:
        say_json(_json_of(a, b, comparison))
    else:
        _show(a, b, comparison, is_all=bool(arguments.all or arguments.metric))
    return 0


def _opened(runs: str) -> list[RunRecord]:
    """Open the runs of one side, from one path or several separated by commas."""
    paths = [runs] if Path(runs).exists() else [path for path in runs.split(",") if path]
    return [opened_run(Path(path)) for path in paths]


def _json_of(a: Sequence[RunRecord], b: Sequence[RunRecord], comparison: Comparison) -> dict[str, Json]:
    return {
        "a": [str(run.folder) for run in a],
        "b": [str(run.folder) for run in b],
        "results": [one.to_json() for one in comparison.differences],
        "only_a": list(comparison.only_a),
        "only_b": list(comparison.only_b),
    }


def _show(a: Sequence[RunRecord], b: Sequence[RunRecord], comparison: Comparison, *, is_all: bool) -> None:
    """Print the verdict, then a table of the clearest differences, or one of all metrics for each chapter."""
    shown = run_names([run.name for run in (*a, *b)])
    for side, of_side in (("A", shown[: len(a)]), ("B", shown[len(a) :])):
        say(f"{side}: {', '.join(of_side)}")
    for line in _verdict_lines(comparison):
        say(line)
    if is_all:
        console = table_console()
        for chapter, differences in itertools.groupby(comparison.differences, key=lambda one: one.chapter):
            console.print(_table(differences, title=chapter, width=console.width))
    else:
        clear = [one for one in comparison.differences if one.is_clear]
        clear.sort(key=lambda one: one.sureness, reverse=True)
        if clear:
            table_console(width=WIDTH).print(_short_table(clear[:MAX_SHORT]))
        rest = len(comparison.differences) - min(len(clear), MAX_SHORT)
        if rest:
            say(f"{rest} more metrics: --all shows them by chapter, --metric chooses some.")
    for side, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            say(f"only in {side}: {', '.join(names[:SHOWN_NAMES])}" + ", ..." * (len(names) > SHOWN_NAMES))


def _verdict_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the number of clear differences, then the differences of validations, or else of the reward."""
    num_clear = sum(one.is_clear for one in comparison.differences)
    yield (
        f"{num_clear} of {len(comparison.differences)} metrics differ clearly (*): their interval excludes 0. "
        "Between equal runs, about one in twenty does."
    )
    validated = [one for one in comparison.differences if HEADLINE.fullmatch(one.metric)]
    rewards = [one for one in comparison.differences if one.metric in SCORE]
    for one in validated or rewards[:1]:
        higher = f"{'B' if one.difference > 0 else 'A'} is clearly higher"
        told = higher if one.is_clear else "no clear difference" if one.interval.is_known else "too few values to tell"
        yield f"{plain_text(one.metric, limit=MAX_NAME)}: A {one.a:.4g}, B {one.b:.4g}: {told}"


def _short_table(differences: Sequence[Difference]) -> Table:
    """Return a table in which only the names of metrics are folded."""
    table = Table(title="Clear differences, surest first", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("metric", overflow="fold")
    for column in SHORT_COLUMNS:
        table.add_column(column, no_wrap=True, justify="right")
    for one in differences:
        name, cells = plain_text(one.metric, limit=MAX_NAME), dict(zip(COLUMNS, _cells(one, digits=3)[2:], strict=True))
        table.add_row(*map(Text, (name, *(cells[column] for column in SHORT_COLUMNS))))
    return table


def _table(differences: Iterable[Difference], *, title: str, width: int) -> Table:
    table = Table(title=title, title_justify="left", expand=True)
    table.add_column("", width=1)
    table.add_column("metric", overflow="fold", ratio=4)
    columns = [name for name in COLUMNS if width >= ROOMY or name not in ("unit", "from")]
    for column in columns:
        is_number = column in ("A", "B", "B - A")
        ratio = 2 if column in ("95 % interval", "from") else 1
        table.add_column(column, ratio=ratio, no_wrap=is_number, min_width=9 if is_number else None)
    for one in differences:
        cells = _cells(one)
        shown_cells = [*cells[:2], *(dict(zip(COLUMNS, cells[2:], strict=True))[name] for name in columns)]
        table.add_row(*map(Text, shown_cells), style="bold" if one.is_clear else "")
    return table


def _cells(one: Difference, *, digits: int = 4) -> tuple[str, ...]:
    low, high = f"{one.interval.low:+.{digits}g}", f"{one.interval.high:+.{digits}g}"
    interval = f"{low} to {high}" if one.interval.is_known else "unknown"
    return (
        "*" if one.is_clear else "",
        plain_text(one.metric, limit=MAX_NAME),
        one.unit,
        f"{one.a:.{digits}g}",
        f"{one.b:.{digits}g}",
        f"{one.difference:+.{digits}g}",
        interval,
        _origin(one),
    )


def _origin(one: Difference) -> str:
    if max(one.num_runs) > 1:
        return f"{one.num_runs[0]} and {one.num_runs[1]} runs"
    if one.method == "validation":
        return "intervals of validations"
    steps = f"{one.num_steps} step" + "s" * (one.num_steps != 1)
    return f"{steps} of each" if one.method == "own steps" else steps
