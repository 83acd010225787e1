"""Conversion and checks of the queue's arguments."""

import operator
from collections.abc import Iterable
from typing import Any

from rl_core.data.outside_text import encodable
from rl_core.errors import DataError
from rl_core.queue.messages import GENERATE


def asked(task: str, groups: int | None, prompts: Iterable[str] | None) -> tuple[int, list[str]]:
    """Return the number of groups that a lease requests, and the prompts that it names.

    Raises:
        DataError: The lease specifies neither or both, or its task is the producer's.
    """
    if (groups is None) == (prompts is None) or task == GENERATE:
        raise DataError(
            f"a lease needs either groups or prompts, and a declared task; found {groups=}, {prompts=} for task "
            f"{task!r}."
        )
    named = [] if prompts is None else names_of(prompts)
    return (len(named) if groups is None else whole(groups, "groups")), named


def names_of(prompts: Iterable[str]) -> list[str]:
    """Convert uids of prompts.

    Raises:
        DataError: The value is something else, such as one string or the prompts themselves.
    """
    uids = list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, str) else [None]
    if not all(isinstance(uid, str) for uid in uids):
        raise DataError(f"prompts must be a list of uids; found {prompts!r}.")
    return [str(uid) for uid in uids]


def whole(value: Any, name: str) -> int:
    """Convert any integer type to an int of at most 63 bits.

    Raises:
        DataError: The value is not such an integer.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise DataError(f"{name} must be a whole number; found {value!r}.") from None
    if not -(1 << 62) < number < 1 << 62:
        raise DataError(f"{name} must be an integer of at most 63 bits; found {number}.")
    return number


def stored(reason: str) -> str:
    """Return a reason as text that can be stored, whatever characters an error message contains."""
    return encodable(str(reason)) or "no reason"
