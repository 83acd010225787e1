"""What users give to a queue: converted, or refused with what is expected."""

import operator
from collections.abc import Iterable
from typing import Any

from rl_core.data.outside_text import encodable
from rl_core.errors import DataError
from rl_core.queue.messages import GENERATE


def asked(task: str, groups: int | None, prompts: Iterable[str] | None) -> tuple[int, list[str]]:
    """How many groups a lease asks for, and the prompts that it names.

    Raises:
        DataError: It asks for nothing, or for both, or is a producer's.
    """
    if (groups is None) == (prompts is None) or task == GENERATE:
        raise DataError(f"a lease is of groups or of prompts of a task; found {groups=}, {prompts=} of {task!r}.")
    named = [] if prompts is None else names_of(prompts)
    return (len(named) if groups is None else whole(groups, "groups")), named


def names_of(prompts: Iterable[str]) -> list[str]:
    """Uids of prompts.

    Raises:
        DataError: They are something else, such as one text or the prompts themselves.
    """
    uids = list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, str) else [None]
    if not all(isinstance(uid, str) for uid in uids):
        raise DataError(f"prompts are named by a list of their uids; found {prompts!r}.")
    return [str(uid) for uid in uids]


def whole(value: Any, name: str) -> int:
    """A whole number that fits 63 bits, of any integer type.

    Raises:
        DataError: It is none.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise DataError(f"{name} must be a whole number; found {value!r}.") from None
    if not -(1 << 62) < number < 1 << 62:
        raise DataError(f"{name} must be a number of 63 bits; found {number}.")
    return number


def stored(reason: str) -> str:
    """A reason as text that can be stored, whatever an error message brought."""
    return encodable(str(reason)) or "no reason"
