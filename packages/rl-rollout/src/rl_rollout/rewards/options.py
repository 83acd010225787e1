"""Options of rewards; settings can nest them."""

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Annotated, Literal

from annotated_types import MinLen

from rl_core.data import Json
from rl_core.errors import SettingsError
from rl_core.record_fields import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    settings_record,
)

FAILURE_KINDS = ("raised", "timed_out", "bad_value")
DEFAULT_RETRIES = 2
MAX_BACKOFF_S = 60.0

OnFailure = Literal["drop", "retry", "zero"]


@settings_record
class FailurePolicy:
    """What to do when a reward call raises, times out or returns no number.

    Attributes:
        on_failure: "drop" fails the session with the reason. "retry" retries first, then does the same. "zero" gives a
            reward of 0, after retries if there are any, with the component `reward_failed` = 1 and the reason in the
            extras; every other session then has `reward_failed` = 0.
        retries: Maximum number of retries; None is 2 for "retry" and 0 otherwise.
        backoff_s: Pause before the first retry; it doubles with each retry, up to a minute.
        retry_on: Failures to retry: "raised", "timed_out", "bad_value", or names of exceptions such as
            "ConnectionError", which include their subclasses. Errors that a row or a setting causes (DataError,
            SettingsError, MissingExtraError) are retried only if they are named.
    """

    on_failure: OnFailure = "drop"
    retries: NonNegativeInt | None = None
    backoff_s: NonNegativeFloat = 0.5
    retry_on: tuple[str, ...] = ("raised", "timed_out")

    @property
    def max_retries(self) -> int:
        """Maximum number of calls after the first."""
        if self.retries is None:
            return DEFAULT_RETRIES if self.on_failure == "retry" else 0
        return self.retries

    def pause_s(self, retry: int) -> float:
        """Return the seconds to wait before a retry, numbered from 0."""
        return min(self.backoff_s * 2.0 ** min(retry, 32), MAX_BACKOFF_S)

    def problems(self) -> Iterator[str]:
        """Yield one message for each impossible combination, and for each unknown failure."""
        if self.on_failure == "drop" and self.retries:
            yield f'retries = {self.retries} needs on_failure = "retry" (or "zero"); found "drop".'
        elif self.on_failure == "retry" and self.retries == 0:
            yield 'on_failure = "retry" needs retries of at least 1; found 0. Use "drop" for no retries.'
        for name in self.retry_on:
            if name not in FAILURE_KINDS and not (name.isidentifier() and name[0].isupper()):
                yield (
                    f"retry_on must name {', '.join(map(repr, FAILURE_KINDS))}, or exceptions such as "
                    f"'ConnectionError'; found {name!r}."
                )

    def check(self) -> None:
        """Raise if an option is invalid.

        Raises:
            SettingsError: An option is invalid. The message lists all `problems`.
        """
        if found := list(self.problems()):
            raise SettingsError("\n".join(found))


@settings_record
class RewardPart:
    """One of several rewards that are summed.

    Attributes:
        function: Name of a built-in reward, or `path.py:function`.
        weight: Its weight in the sum; 0 reports the reward without training on it.
        options: Options of the function.
        name: Prefix of its components; empty uses the function's name.
        on_failure: "fail" fails the whole reward and names this part. "zero" counts this part as 0, with the component
            `NAME/reward_failed` = 1 (0 where it did not fail).
    """

    function: Annotated[str, MinLen(1)]
    weight: FiniteFloat = 1.0
    options: Mapping[str, Json] = field(default_factory=dict)
    name: str = ""
    on_failure: Literal["fail", "zero"] = "fail"

    @property
    def label(self) -> str:
        """Prefix of the names of its components."""
        return self.name or self.function.rpartition(":")[2]


@settings_record
class RewardOptions:
    """How responses are scored: by one reward function, or by a weighted sum of several.

    Attributes:
        function: A built-in reward (exact_match, number_match, math_verify, choice, code, format, http, json_fields,
            json_schema, judge, language, length_target, overlong), the name of a reward that another
            package installs, or `path.py:function`. Leave it empty if there are parts.
        options: Options of the function.
        parts: Several rewards with weights, instead of one function.
        timeout_s: Maximum time of one call; none has no limit.
        max_concurrency: Maximum number of concurrent calls.
        max_calls_per_s: Maximum number of calls per second, including retries; none has no limit.
        on_failure: What to do when a reward call raises, times out or returns no number: "drop" the session and record
            the reason, "retry" the call first, or "zero": a reward of 0 and the component `reward_failed` = 1.
        retries: Maximum number of retries; none is 2 for "retry" and 0 otherwise.
        backoff_s: Pause before the first retry; it doubles with each retry, up to a minute.
        retry_on: Failures to retry: "raised", "timed_out", "bad_value", or names of exceptions such as
            "ConnectionError", which include their subclasses.
    """

    function: str = ""
    options: Mapping[str, Json] = field(default_factory=dict)
    parts: tuple[RewardPart, ...] = ()
    timeout_s: PositiveFloat | None = 30.0
    max_concurrency: PositiveInt = 32
    max_calls_per_s: PositiveFloat | None = None
    on_failure: OnFailure = "drop"
    retries: NonNegativeInt | None = None
    backoff_s: NonNegativeFloat = 0.5
    retry_on: tuple[str, ...] = ("raised", "timed_out")

    @property
    def failures(self) -> FailurePolicy:
        """The failure policy of these options."""
        return FailurePolicy(
            on_failure=self.on_failure, retries=self.retries, backoff_s=self.backoff_s, retry_on=self.retry_on
        )

    @property
    def label(self) -> str:
        """One-line description of the reward."""
        return " + ".join(f"{part.weight:g} * {part.label}" for part in self.parts) or self.function

    def problems(self) -> Iterator[str]:
        """Yield one message for each impossible combination, and for each unknown failure."""
        if bool(self.function) == bool(self.parts):
            found = 'both. Set function = "" to use the parts' if self.parts else "neither"
            yield f"function must name a reward, or parts must list several; found {found}."
        if self.parts and self.options:
            yield "options belong to function; with parts, give each part its own options."
        yield from self.failures.problems()
        labels = [part.label for part in self.parts]
        for label in sorted({label for label in labels if labels.count(label) > 1}):
            yield f"parts must have different names; found {label!r} {labels.count(label)} times. Give each a name."

    def check(self) -> None:
        """Raise if an option is invalid.

        Raises:
            SettingsError: An option is invalid. The message lists all `problems`.
        """
        if found := list(self.problems()):
            raise SettingsError("\n".join(found))

    def of_part(self, part: RewardPart) -> "RewardOptions":
        """Return the options of one part: its own function and options, with the shared limits and retries."""
        on_failure: OnFailure = "retry" if self.failures.max_retries else "drop"
        return replace(self, function=part.function, options=part.options, parts=(), on_failure=on_failure)
