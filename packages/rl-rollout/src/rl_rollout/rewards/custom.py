"""Reward functions in the user's own files, given as `path.py:function`."""

import importlib.util
import inspect
import sys
import traceback
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_core.errors import SettingsError
from rl_core.registry import nearest_name
from rl_rollout.rewards.protocol import RewardFunction

TRACEBACK_LINES = 6


def load_function(reference: str) -> RewardFunction:
    """Import a file and take one function from it.

    Args:
        reference: `path.py:function`; a relative path starts at the working directory.

    Raises:
        SettingsError: The file is missing, raises when imported, or has no such function.
    """
    return check_callable(load_object(reference), name=reference)


def load_object(reference: str) -> Any:
    """Import a file and take something from it: a function, a class, or an object that can be called.

    Raises:
        SettingsError: The file is missing, raises when imported, or has nothing of this name.
    """
    path_text, separator, name = reference.rpartition(":")
    if not separator or not path_text or not name:
        raise SettingsError(f"reward function {reference!r} must be given as path.py:function.")
    path = Path(path_text)
    if not path.is_file():
        raise SettingsError(f"reward function {reference!r}: the file {path.absolute()} does not exist.")
    module = _import_file(path, reference=reference)
    function = getattr(module, name, None)
    if function is None:
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise SettingsError(
            f"reward function {reference!r}: {path} has no {name!r}; it has {', '.join(sorted(own)) or 'no functions'}."
            f"{nearest_name(name, own)}"
        )
    return function


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


def _import_file(path: Path, *, reference: str) -> ModuleType:
    digest = blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
    module_name = f"rl_reward_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise SettingsError(
            f"reward function {reference!r}: {path} is not a Python file; expected a name ending in .py."
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        tail = "".join(traceback.format_exception(error)).rstrip().splitlines()[-TRACEBACK_LINES:]
        raise SettingsError(f"reward function {reference!r}: importing {path} raised:\n" + "\n".join(tail)) from error
    return module
