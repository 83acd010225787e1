"""Reward for the form of a response: tags in their order, or a pattern, which a killable process matches."""

import re
from collections.abc import Callable
from dataclasses import field
from typing import Any

from rl_core.errors import SettingsError
from rl_core.record_fields import PositiveFloat, PositiveInt, settings_record
from rl_rollout.rewards.answers import THINKING
from rl_rollout.rewards.check_processes import CheckProcesses, main
from rl_rollout.rewards.protocol import RewardInput, RewardResult

WORKER = "rl_rollout.rewards.format_reward"


@settings_record
class FormatReward:
    """1 if the whole response has the form, else 0. Its content does not count.

    The `<think>` with which a prompt opens the thinking belongs to the response.

    Attributes:
        tags: Names such as ("think", "answer") for `<think>...</think><answer>...</answer>`: each pair once, in this
            order, with text inside, and only spaces outside of them.
        pattern: Regular expression of the whole response, in which a dot also matches line breaks. Give either this or
            tags.
        timeout_s: Maximum seconds of one match. A response that takes longer scores 0, with the component `timed_out` =
            1.
        num_workers: Number of processes that match patterns; they start at the first use.
    """

    tags: tuple[str, ...] = ()
    pattern: str = ""
    timeout_s: PositiveFloat = 1.0
    num_workers: PositiveInt = 1
    max_concurrency: int | None = field(init=False, repr=False, default=None)
    processes: CheckProcesses = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            SettingsError: The pattern is invalid, or there are not either tags or a pattern.
        """
        if bool(self.tags) == bool(self.pattern):
            found = "both" if self.tags else "neither"
            raise SettingsError(f"reward 'format' needs either tags or a pattern; found {found}.")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise SettingsError(
                f"pattern of reward 'format' must be a regular expression; found {self.pattern!r} ({error})."
            ) from error
        processes = CheckProcesses(WORKER, timeout_s=self.timeout_s, num_processes=self.num_workers)
        object.__setattr__(self, "processes", processes)

    def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            RoleError: The matching process cannot start.
        """
        text = THINKING * given.begins_thinking + given.response_text
        if self.tags:
            return RewardResult(reward=float(has_tags(text, self.tags)))
        found = self.processes.check({"pattern": self.pattern, "text": text})
        reward = 0.0 if found is None else found["matches"]
        return RewardResult(reward=reward, components={"timed_out": float(found is None)})

    def close(self) -> None:
        """Stop the processes. Can be called twice."""
        self.processes.close()


def has_tags(text: str, tags: tuple[str, ...]) -> bool:
    """Return True if a text consists of these pairs of tags, each once, in order, with text inside."""
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        before, opened, rest = text.partition(opening)
        inside, closed, text = rest.partition(closing)
        has_pair = bool(opened and closed and inside.strip()) and not before.strip()
        if not has_pair or any(f"<{slash}{name}>" in inside for name in tags for slash in ("", "/")):
            return False
    return not text.strip()


def prepare(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return a function that matches the response."""
    pattern = re.compile(request["pattern"], re.DOTALL)
    return lambda: {"matches": float(pattern.fullmatch(request["text"]) is not None)}


if __name__ == "__main__":
    main(prepare, {"matches": 0.0})
