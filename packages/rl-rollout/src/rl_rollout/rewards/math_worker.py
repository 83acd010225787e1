"""Worker process that runs math-verify."""

import logging
from collections.abc import Callable
from typing import Any

from rl_rollout.rewards.check_worker import main


def prepare(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Parse the ground truth, and return a function that compares the answer with it.

    Raises:
        ValueError: The ground truth has no expression.
    """
    from math_verify import parse, verify

    gold = parse(request["gold"], parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the ground truth {request['gold']!r}. Repair the row.")

    def judge() -> dict[str, Any]:
        found = parse(request["answer"], parsing_timeout=None)
        return {"is_equal": bool(found and verify(gold, found, timeout_seconds=None))}

    return judge


if __name__ == "__main__":
    import math_verify  # noqa: F401 (before the first deadline)

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    main(prepare, {"is_equal": False})
