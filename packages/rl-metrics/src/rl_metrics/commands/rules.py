"""`rl-metrics rules`: list the health rules."""

import argparse
import sys
from collections.abc import Iterator

from rl_core.data import Json
from rl_metrics.commands.parts import AddVerb, say_json
from rl_metrics.health.finding import SIDE_TITLES
from rl_metrics.health.judging import GUIDE
from rl_metrics.health.rules import FAMILIES, FAMILY_TEXTS, Rule, Threshold

PLAIN_FIELDS = ("name", "side", "title", "what", "severity", "window", "min_steps", "sure_steps", "holds")


def add_to(add_verb: AddVerb) -> None:
    """Add the verb."""
    parser = add_verb("rules", "list the health rules: metrics, thresholds with their sources, causes")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print as JSON")
    form.add_argument("--markdown", action="store_true", help="print the tables of docs/guides/health.md")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        say_json([_json_row(rule) for rule in GUIDE])
    else:
        lines = _markdown_lines() if arguments.markdown else _lines()
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _lines() -> Iterator[str]:
    """Yield the lines of each rule and its thresholds."""
    for side, title in SIDE_TITLES.items():
        yield title
        for rule in GUIDE:
            if rule.side == side:
                yield f"  {rule.name} ({rule.severity}): {rule.title}"
                yield f"      reads {', '.join(_metrics_of(rule))}; {_steps(rule)}"
                for threshold in rule.thresholds:
                    yield f"      {rule.name}.{threshold.name} = {_described(threshold)}"


def _markdown_lines() -> Iterator[str]:
    """Yield the lines of one table per side."""
    for side, title in SIDE_TITLES.items():
        yield f"### {title}\n"
        yield "| rule | problem | severity | metrics | thresholds | data | likely causes, in order |"
        yield "|---|---|---|---|---|---|---|"
        yield from (_markdown_row(rule) for rule in GUIDE if rule.side == side)
        yield ""


def _json_row(rule: Rule) -> dict[str, Json]:
    return {
        **{name: getattr(rule, name) for name in PLAIN_FIELDS},
        "metrics": _metrics_of(rule),
        "families": list(rule.families),
        "thresholds": [
            {"name": f"{rule.name}.{one.name}", "value": one.default, "meaning": one.meaning, "source": one.source}
            for one in rule.thresholds
        ],
        "causes": [cause.text for cause in rule.causes],
        "advice": [cause.advice for cause in rule.causes],
    }


def _metrics_of(rule: Rule) -> list[str]:
    """Return the metrics that a rule's conditions read, without those that only excuse it."""
    return list(dict.fromkeys(name for condition in rule.conditions for names in condition.reads for name in names))


def _steps(rule: Rule) -> str:
    only = " or ".join(FAMILY_TEXTS[family] for family in rule.families)
    texts = (
        f"window of {rule.window}, at least {rule.min_steps} steps",
        f"sure from {rule.sure_steps} on" if rule.sure_steps else "",
        "" if rule.families == FAMILIES else f"only for {only}",
        f"thresholds for {rule.holds}" if rule.holds else "",
    )
    return "; ".join(filter(None, texts))


def _described(threshold: Threshold) -> str:
    return f"{threshold.default:g}: {threshold.meaning} ({threshold.source})"


def _markdown_row(rule: Rule) -> str:
    metrics = ", ".join(f"`{name}`" for name in _metrics_of(rule))
    thresholds = "; ".join(f"`{rule.name}.{one.name}` = {_described(one)}" for one in rule.thresholds)
    causes = "; ".join(dict.fromkeys(cause.text for cause in rule.causes))
    cells = (f"`{rule.name}`", rule.what, rule.severity, metrics, thresholds, _steps(rule), causes)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
