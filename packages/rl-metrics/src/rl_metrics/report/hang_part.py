"""What a report says of a run that hangs, from its hang.json."""

from typing import Any

import msgspec

from rl_metrics.doctor.hang import went_on
from rl_metrics.hang.stack_places import innermost_frames
from rl_metrics.run_files.run_record import RunRecord


def describe_hang(run: RunRecord) -> dict[str, Any] | None:
    """What hang.json says, or None where the run has none; counts are pairs, in their order.

    `is_over` tells whether the run went on after it.
    """
    report = run.hang
    if report is None:
        return None
    described: dict[str, Any] = msgspec.to_builtins(report)
    for role in described["roles"]:
        role |= {"counts": list(role["counts"].items()), "where": innermost_frames(role["stack"])}
    return described | {"queue": list(report.queue.items()), "is_over": went_on(run)}
