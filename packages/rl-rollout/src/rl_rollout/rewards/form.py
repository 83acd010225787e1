"""Rewards for the form of a response: its tags or a pattern, and the language of its letters."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import field
from typing import Annotated, Any

from annotated_types import MinLen

from rl_core.errors import SettingsError
from rl_core.record_fields import PositiveFloat, UnitFloat, settings_record
from rl_core.registry import unknown_name
from rl_rollout.rewards.answers import THINKING
from rl_rollout.rewards.check_processes import CheckProcesses, main
from rl_rollout.rewards.protocol import RewardInput, RewardResult

WORKER = "rl_rollout.rewards.form"


@settings_record
class FormatReward:
    """1 if the whole response has the form, else 0. Its content does not count.

    The `<think>` with which a prompt opens the thinking belongs to the response. A pattern is matched in a separate
    process: a response that takes longer than timeout_s scores 0, with the component `timed_out` = 1.

    Attributes:
        tags: Names such as ("think", "answer") for `<think>...</think><answer>...</answer>`: each pair once, in this
            order, with text inside, and only spaces outside of them.
        pattern: Regular expression of the whole response, in which a dot also matches line breaks. Give either this or
            tags.
        timeout_s: Maximum seconds of one match.
    """

    tags: tuple[str, ...] = ()
    pattern: str = ""
    timeout_s: PositiveFloat = 1.0
    processes: CheckProcesses = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            SettingsError: The pattern is invalid, or there are not either tags or a pattern.
        """
        if bool(self.tags) == bool(self.pattern):
            raise SettingsError(f"reward 'format' needs tags or a pattern; found {'both' if self.tags else 'neither'}.")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise SettingsError(f"pattern of reward 'format' is no regular expression: {error}.") from error
        object.__setattr__(self, "processes", CheckProcesses(WORKER, timeout_s=self.timeout_s, num_processes=1))

    def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            RoleError: The matching process cannot start.
        """
        text = THINKING * given.begins_thinking + given.response_text
        if self.tags:
            return RewardResult(reward=float(has_tags(text, self.tags)))
        found = self.processes.check({"pattern": self.pattern, "text": text})
        return RewardResult(reward=(found or NO_MATCH)["matches"], components={"timed_out": float(found is None)})

    def close(self) -> None:
        """Stop the process. Can be called twice."""
        self.processes.close()


def has_tags(text: str, tags: tuple[str, ...]) -> bool:
    """Return True if a text consists of these pairs of tags, each once, in order, with text inside."""
    for tag in tags:
        before, opened, rest = text.partition(f"<{tag}>")
        inside, closed, text = rest.partition(f"</{tag}>")
        is_nested = any(f"<{slash}{name}>" in inside for name in tags for slash in ("", "/"))
        if before.strip() or not opened or not closed or not inside.strip() or is_nested:
            return False
    return not text.strip()


@settings_record
class LanguageReward:
    """Share of the response's letters that are of the given scripts, against responses that mix languages.

    The whole response counts, with its thinking. A response without letters scores 0. Languages with the same script
    look the same.

    Source: the language consistency reward of DeepSeek-AI 2025, arXiv:2501.12948, section 2.3.2, which counts words.

    Attributes:
        scripts: Accepted scripts, by the first word of the names of their letters in Unicode, such as ("latin",), or
            ("cjk", "hiragana", "katakana") for Japanese.
        min_share: Give 1 from this share on and 0 below it, instead of the share.
    """

    scripts: Annotated[tuple[str, ...], MinLen(1)]
    min_share: UnitFloat | None = None

    def __post_init__(self) -> None:
        """Refuse unknown scripts.

        Raises:
            SettingsError: A script is unknown.
        """
        known = {script_of(letter) for letter in map(chr, range(0x3400)) if letter.isalpha()}
        for name in sorted({*self.scripts} - known):
            raise SettingsError(unknown_name("script of reward 'language'", name, known))

    def __call__(self, given: RewardInput) -> float:
        """Score one response."""
        counts = Counter(filter(str.isalpha, unicodedata.normalize("NFKC", given.response_text)))
        num_fitting = sum(count for letter, count in counts.items() if script_of(letter) in self.scripts)
        share = num_fitting / max(counts.total(), 1)
        return share if self.min_share is None else float(bool(counts) and share >= self.min_share)


def script_of(letter: str) -> str:
    """Return the first word of a letter's name in Unicode, such as "latin"; "cjk" for every Chinese character."""
    script = re.split("[ -]", unicodedata.name(letter, ""), maxsplit=1)[0].lower()
    return "cjk" if script == "ideographic" else script


NO_MATCH = {"matches": 0.0}


def prepare(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return a function that matches the response."""
    pattern = re.compile(request["pattern"], re.DOTALL)
    return lambda: {"matches": float(pattern.fullmatch(request["text"]) is not None)}


if __name__ == "__main__":
    main(prepare, NO_MATCH)
