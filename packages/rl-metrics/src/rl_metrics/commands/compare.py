"""`rl-metrics compare`: compare two runs, or two sets of seeds."""

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rl_metrics.commands.parts import AddVerb, opened_run, refuse, say, say_json, table_console
from rl_metrics.comparison.compare import Comparison, Difference, compare
from rl_metrics.health.common_rules import SCORE
from rl_metrics.report.page import run_names
from rl_metrics.run_files.run_record import RunRecord
from rl_metrics.trackers.console import plain_text
from rl_metrics.validation.summary import HEADLINE

MAX_NAME = 120
COLUMNS = ("", "metric", "unit", "A", "B", "B - A", "95 % interval", "from")
SHORT_COLUMNS = ("metric", "A", "B", "B - A", "95 % interval")
ROOMY = 100
"""Minimum line width, in characters, to show units and origins."""

WIDTH = 80
"""Width of the short table outside a terminal, in characters."""

MAX_SHORT = 20
"""Maximum number of rows of the short table."""
SHOWN_NAMES = 20


def add_to(add_verb: AddVerb) -> None:
    """Add the verb."""
    parser = add_verb("compare", "compare two runs, or two sets of seeds, with confidence intervals")
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
        only = {"only_a": list(comparison.only_a), "only_b": list(comparison.only_b)}
        folders = {side: [str(run.folder) for run in runs] for side, runs in (("a", a), ("b", b))}
        say_json({**folders, "results": [difference.to_json() for difference in comparison.differences], **only})
    else:
        _show(a, b, comparison, is_all=bool(arguments.all or arguments.metric))
    return 0


def _opened(runs: str) -> list[RunRecord]:
    """Open the runs of one side, from one path or several separated by commas."""
    paths = [runs] if Path(runs).exists() else [path for path in runs.split(",") if path]
    return [opened_run(Path(path)) for path in paths]


def _show(a: Sequence[RunRecord], b: Sequence[RunRecord], comparison: Comparison, *, is_all: bool) -> None:
    """Print the verdict, then a table of the clearest differences, or one of all metrics for each chapter."""
    names = run_names([run.name for run in (*a, *b)])
    for side, of_side in (("A", names[: len(a)]), ("B", names[len(a) :])):
        say(f"{side}: {', '.join(of_side)}")
    for line in _verdict_lines(comparison):
        say(line)
    if is_all:
        console = table_console()
        for chapter, differences in itertools.groupby(comparison.differences, key=attrgetter("chapter")):
            console.print(_table(differences, title=chapter, width=console.width))
    else:
        clear = [difference for difference in comparison.differences if difference.is_clear]
        clear.sort(key=attrgetter("sureness"), reverse=True)
        if clear:
            table_console(width=WIDTH).print(_short_table(clear[:MAX_SHORT]))
        rest = len(comparison.differences) - min(len(clear), MAX_SHORT)
        if rest:
            say(f"{rest} more metrics: --all shows them by chapter, --metric chooses some.")
    for side, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        if only:
            say(f"only in {side}: {', '.join(only[:SHOWN_NAMES])}" + ", ..." * (len(only) > SHOWN_NAMES))


def _verdict_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the number of clear differences, then the differences of validations, or else of the reward."""
    differences = comparison.differences
    yield (
        f"{sum(difference.is_clear for difference in differences)} of {len(differences)} metrics differ clearly (*): "
        "their interval excludes 0. Between equal runs, about one in twenty does."
    )
    validated = [difference for difference in differences if HEADLINE.fullmatch(difference.metric)]
    rewards = [difference for difference in differences if difference.metric in SCORE]
    for main in validated or rewards[:1]:
        verdict = "no clear difference" if main.interval.is_known else "too few values to tell"
        if main.is_clear:
            verdict = f"{'B' if main.difference > 0 else 'A'} is clearly higher"
        yield f"{plain_text(main.metric, limit=MAX_NAME)}: A {main.a:.4g}, B {main.b:.4g}: {verdict}"


def _short_table(differences: Sequence[Difference]) -> Table:
    """Return a table in which only the names of metrics are folded."""
    table = Table(title="Clear differences, surest first", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("metric", overflow="fold")
    for column in SHORT_COLUMNS[1:]:
        table.add_column(column, no_wrap=True, justify="right")
    for difference in differences:
        cells = _cells(difference, digits=3)
        table.add_row(*(Text(cells[column]) for column in SHORT_COLUMNS))
    return table


def _table(differences: Iterable[Difference], *, title: str, width: int) -> Table:
    table = Table(title=title, title_justify="left", expand=True)
    table.add_column("", width=1)
    table.add_column("metric", overflow="fold", ratio=4)
    columns = [column for column in COLUMNS if width >= ROOMY or column not in ("unit", "from")]
    for column in columns[2:]:
        is_number = column in ("A", "B", "B - A")
        ratio = 2 if column in ("95 % interval", "from") else 1
        table.add_column(column, ratio=ratio, no_wrap=is_number, min_width=9 if is_number else None)
    for difference in differences:
        cells = _cells(difference)
        table.add_row(*(Text(cells[column]) for column in columns), style="bold" if difference.is_clear else "")
    return table


def _cells(difference: Difference, *, digits: int = 4) -> dict[str, str]:
    """Return the cells of a row by column."""
    number = f".{digits}g"
    interval = difference.interval
    values = (
        "*" if difference.is_clear else "",
        plain_text(difference.metric, limit=MAX_NAME),
        difference.unit,
        format(difference.a, number),
        format(difference.b, number),
        format(difference.difference, f"+{number}"),
        f"{interval.low:+{number}} to {interval.high:+{number}}" if interval.is_known else "unknown",
        _origin(difference),
    )
    return dict(zip(COLUMNS, values, strict=True))


def _origin(difference: Difference) -> str:
    num_a, num_b = difference.num_runs
    if max(num_a, num_b) > 1:
        return f"{num_a} and {num_b} runs"
    if difference.method == "validation":
        return "intervals of validations"
    steps = f"{difference.num_steps} step" + "s" * (difference.num_steps != 1)
    return f"{steps} of each" if difference.method == "own steps" else steps
