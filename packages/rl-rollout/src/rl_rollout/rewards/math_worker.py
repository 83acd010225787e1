"""Worker process that compares answers."""

import logging
from collections.abc import Callable
from typing import Any

from rl_rollout.rewards.answers import final_answer
from rl_rollout.rewards.check_worker import main
from rl_rollout.rewards.math_equality import check_readable, is_equal

MAX_CHARACTERS = 5000
"""Maximum length of an answer. A longer one is wrong."""


def prepare(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Read the ground truth, and return a function that compares the answer with it.

    Raises:
        ValueError: The ground truth has no expression.
    """
    found = final_answer(request["gold"])
    gold = request["gold"] if found is None else found
    check_readable(gold)

    def judge() -> dict[str, Any]:
        answer: str | None = request["answer"] if "answer" in request else final_answer(request["response"])
        return {"is_equal": answer is not None and len(answer) <= MAX_CHARACTERS and is_equal(gold, answer)}

    return judge


if __name__ == "__main__":
    is_equal("x + 1", "1 + x")  # loads the library and its grammar before the first deadline
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    main(prepare, {"is_equal": False})
