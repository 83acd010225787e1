"""What a report says of a run that hangs: hang.json, read tolerantly, as it may be of any shape."""

from collections.abc import Mapping
from typing import Any

from rl_metrics.doctor.hang import shortened_stack, went_on
from rl_metrics.json_lines import number_or_none
from rl_metrics.run_record import RunRecord

MAX_TEXT = 2_000
MAX_STACK = 16_000
MAX_STACKS = 1_000_000
"""Characters, of all roles together."""
MAX_ROLES = 200
MAX_ITEMS = 50
"""Causes, leases, counts or groups."""
MAX_WAITS = 8
"""Of a role."""


def describe_hang(run: RunRecord) -> dict[str, Any] | None:
    """What hang.json says, or None where the run has none; what is of another shape is left out.

    `is_over` tells whether the run went on after it.
    """
    report = run.hang
    if not report:
        return None
    return {
        "is_over": went_on(run),
        "at": _text(report.get("at")),
        "no_progress_s": number_or_none(report.get("no_progress_s")),
        "last_progress": _text(report.get("last_progress")),
        "verdict": _text(report.get("verdict")) or "Nothing happens; the report does not say who waits for whom.",
        "causes": [text for cause in _items(report.get("causes")) if (text := _text(cause))],
        "queue": _counts(report.get("queue")),
        "roles": _roles(report.get("roles")),
        "groups": [_group(group) for group in _items(report.get("groups")) if isinstance(group, dict)],
    }


def _roles(value: object) -> list[dict[str, Any]]:
    roles = [role for role in _items(value, MAX_ROLES) if isinstance(role, dict)]
    length = min(MAX_STACK, MAX_STACKS // max(len(roles), 1))
    return [_role(role, length) for role in roles]


def _role(role: Mapping[str, Any], stack_length: int) -> dict[str, Any]:
    waits = [wait for wait in _items(role.get("waits"), MAX_WAITS) if isinstance(wait, dict)]
    return {
        "name": _text(role.get("name")),
        "state": _text(role.get("state")),
        "since_s": number_or_none(role.get("since_s")),
        "is_answering": role.get("is_answering") is not False,
        "waits": [
            {
                "what": _text(wait.get("what")),
                "on": _text(wait.get("on")),
                "since_s": number_or_none(wait.get("since_s")),
            }
            for wait in waits
        ],
        "leases": [text for lease in _items(role.get("leases")) if (text := _text(lease))],
        "counts": _counts(role.get("counts")),
        "where": shortened_stack(role.get("stack")),
        "stack": _text(role.get("stack"), stack_length),
    }


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "uid": _text(group.get("uid")),
        "state": _text(group.get("state")),
        "missing": [number for number in _items(group.get("missing")) if type(number) is int],
        "age_s": number_or_none(group.get("age_s")),
        "attempt": number_or_none(group.get("attempt")),
        "holder": _text(group.get("holder")),
    }


def _counts(value: object) -> list[tuple[str, float]]:
    found = list(value.items())[:MAX_ITEMS] if isinstance(value, dict) else []
    return [(_text(name), number) for name, count in found if (number := number_or_none(count)) is not None]


def _text(value: object, length: int = MAX_TEXT) -> str:
    return value[:length] if isinstance(value, str) else ""


def _items(value: object, count: int = MAX_ITEMS) -> list[Any]:
    return value[:count] if isinstance(value, list) else []
