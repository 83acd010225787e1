"""Reward functions by name, or from the user's files as `path.py:function`."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from rl_core.data import Json
from rl_core.errors import SettingsError
from rl_core.registry import Registry, nearest_name
from rl_core.secret_settings import hide, resolve_secrets
from rl_rollout.rewards.protocol import RewardFunction
from rl_rollout.user_code import find_in

REWARDS: Registry[Any] = Registry(
    "reward function",
    {
        "choice": "rl_rollout.rewards.choice:Choice",
        "code": "rl_rollout.rewards.code_reward:CodeReward",
        "exact_match": "rl_rollout.rewards.rules:ExactMatch",
        "format": "rl_rollout.rewards.form:FormatReward",
        "http": "rl_rollout.rewards.http_reward:HttpReward",
        "json_fields": "rl_rollout.rewards.json_schema:JsonFields",
        "json_schema": "rl_rollout.rewards.json_schema:JsonSchemaReward",
        "judge": "rl_rollout.rewards.judge:JudgeReward",
        "language": "rl_rollout.rewards.form:LanguageReward",
        "length_target": "rl_rollout.rewards.rules:LengthTarget",
        "math_verify": "rl_rollout.rewards.math_verify:MathVerify",
        "number_match": "rl_rollout.rewards.rules:NumberMatch",
        "overlong": "rl_rollout.rewards.rules:Overlong",
    },
    group="rl_rollout.rewards",
)

HOW = (
    "A reward takes one RewardInput, `def reward(given): ...`, and reads given.response_text, given.ground_truth and "
    "given.columns; other arguments are options."
)

FOREIGN = {
    "completions": "It is written for TRL, whose functions score lists. Call it from your own function: "
    "`def reward(given): return theirs(completions=[given.response_text])[0]`.",
    "solution_str": "It is written for verl. Call it from your own function: "
    "`def reward(given): return theirs(given.data_source, given.response_text, given.ground_truth)`.",
}
"""What to do with another library's function, by a name among its parameters."""


def resolve_reward(
    reference: str, options: Mapping[str, Json] | None = None, *, parts: Mapping[str, Any] | None = None
) -> RewardFunction:
    """Return the reward function with this name, or at `path.py:function`, with its options bound.

    A class is created with the options. A function gets them as keyword arguments in each call.

    Args:
        reference: A registered name, or `path.py:function`.
        options: Options by name; secrets such as `headers` and `api_key` may refer to environment variables, "$NAME".
        parts: Objects that settings cannot express, by option name, such as {"model": JudgeModel(...)}, for options
            that are not given. A function without such an option does not get them.

    Raises:
        SettingsError: The name, file, function or option does not exist, or an option is missing or invalid.
        MissingExtraError: A required library is not installed.
    """
    function: Any = find_in(REWARDS, reference, is_fresh=True)
    bound = dict(resolve_secrets(options or {}, where=f"options of reward function {reference!r}"))
    is_class = inspect.isclass(function)
    if not is_class:
        _refuse_foreign(function, name=reference)
    known = _option_names(function, num_taken=0 if is_class else 1)
    if known is not None:
        for option in sorted(set(bound) - set(known)):
            raise SettingsError(
                f"reward function {reference!r} has no option {option!r}.{nearest_name(option, known)} "
                f"Known: {', '.join(sorted(known)) or 'none'}."
            )
        bound = {key: part for key, part in (parts or {}).items() if key in known} | bound
        required = {key for key, parameter in known.items() if parameter.default is parameter.empty}
        for option in sorted(required - set(bound)):
            advice = "" if is_class else f" {HOW}"
            raise SettingsError(f"reward function {reference!r} needs the option {option!r}.{advice}")
    if is_class:
        try:
            function = function(**bound)
        except SettingsError:
            raise
        except (TypeError, ValueError) as error:
            raise SettingsError(
                f"reward function {reference!r} refuses its options: {hide(str(error), bound)}"
            ) from error
    elif bound:
        is_quick = bool(getattr(function, "is_quick", False))
        function = functools.partial(function, **bound)
        function.is_quick = is_quick
    return check_callable(function, name=reference)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # not callable, or compiled without a signature
        return {}


def _option_names(function: Any, *, num_taken: int) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters after the first num_taken that can be passed by name; None if any name is accepted."""
    parameters = list(_parameters(function).values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter for parameter in parameters[num_taken:] if parameter.kind in by_name}


def check_callable(function: Any, *, name: str) -> RewardFunction:
    """Check that a function can be called with one RewardInput.

    Raises:
        SettingsError: The function is not callable, does not accept exactly one argument, or is a generator.
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
    _refuse_foreign(function, name=name)
    try:
        signature.bind(object())
    except TypeError as error:
        raise SettingsError(
            f"reward function {name!r} must take one argument, a RewardInput; found {signature} ({error}). {HOW}"
        ) from None
    return function  # type: ignore[no-any-return]


def _refuse_foreign(function: Any, *, name: str) -> None:
    """Refuse a function with the parameters of another library.

    Raises:
        SettingsError: It has them.
    """
    parameters = _parameters(function)
    for parameter in FOREIGN.keys() & parameters.keys():
        raise SettingsError(
            f"reward function {name!r} must take one RewardInput; found the parameters {', '.join(parameters)}. "
            f"{FOREIGN[parameter]}"
        )
