"""Reward functions in the user's own files, given as `path.py:function`."""

import inspect
from typing import Any

from rl_core.errors import SettingsError
from rl_rollout.rewards.protocol import RewardFunction
from rl_rollout.user_files import load_attribute


def load_function(reference: str) -> RewardFunction:
    """Import a file and take one function from it.

    Args:
        reference: `path.py:function`; a relative path starts at the working directory.

    Raises:
        SettingsError: The file is missing, raises when imported, or has no such function.
    """
    return check_callable(load_attribute(reference, kind="reward function", is_fresh=True), name=reference)


def check_callable(function: Any, *, name: str) -> RewardFunction:
    """Refuse what cannot be called with one RewardInput.

    Raises:
        SettingsError: It is not callable, takes other arguments, or yields.
    """
    if not callable(function):
        raise SettingsError(f"reward function {name!r} must be callable; found {type(function).__name__}.")
    for called in (function, type(function).__call__):
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise SettingsError(f"reward function {name!r} uses `yield`; it must return a number.")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled callables have none
        return function  # type: ignore[no-any-return]
    try:
        signature.bind(object())
    except TypeError as error:
        raise SettingsError(
            f"reward function {name!r} must take one argument, a RewardInput; it is {signature} ({error})."
        ) from None
    return function  # type: ignore[no-any-return]
