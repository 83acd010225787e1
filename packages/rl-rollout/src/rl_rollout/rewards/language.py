"""Reward for the language of a response, by the Unicode script of its letters."""

import unicodedata
from collections import Counter
from typing import Annotated

from annotated_types import MinLen

from rl_core.errors import SettingsError
from rl_core.record_fields import UnitFloat, settings_record
from rl_core.registry import unknown_name
from rl_rollout.rewards.protocol import RewardInput, RewardResult

SCRIPTS = [
    "arabic",
    "armenian",
    "bengali",
    "cjk",
    "cyrillic",
    "devanagari",
    "ethiopic",
    "georgian",
    "greek",
    "gujarati",
    "gurmukhi",
    "hangul",
    "hebrew",
    "hiragana",
    "kannada",
    "katakana",
    "khmer",
    "lao",
    "latin",
    "malayalam",
    "myanmar",
    "oriya",
    "sinhala",
    "tamil",
    "telugu",
    "thai",
    "tibetan",
]
"""First words of their letters' names in Unicode; "cjk" has the Chinese characters."""


@settings_record
class LanguageReward:
    """Share of the response's letters that are of the given scripts, against responses that mix languages.

    The whole response counts, with its thinking. A response without letters scores 0. Languages that share a script
    cannot be told apart. Component: `share`.

    Source: the language consistency reward of DeepSeek-AI 2025, arXiv:2501.12948, section 2.3.2, which counts words.

    Attributes:
        scripts: Accepted scripts, such as ("latin",), or ("cjk", "hiragana", "katakana") for Japanese.
        min_share: Give 1 from this share on and 0 below it, instead of the share.
    """

    scripts: Annotated[tuple[str, ...], MinLen(1)]
    min_share: UnitFloat | None = None

    def __post_init__(self) -> None:
        """Refuse unknown scripts.

        Raises:
            SettingsError: A script is unknown.
        """
        for name in self.scripts:
            if name not in SCRIPTS:
                raise SettingsError(unknown_name("script of reward 'language'", name, SCRIPTS))

    def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response."""
        counts: Counter[str] = Counter()
        for character, count in Counter(unicodedata.normalize("NFKC", given.response_text)).items():
            if character.isalpha():
                counts[script_of(character)] += count
        share = sum(counts[script] for script in {*self.scripts}) / max(counts.total(), 1)
        reward = share if self.min_share is None else float(counts.total() > 0 and share >= self.min_share)
        return RewardResult(reward=reward, components={"share": share})


def script_of(letter: str) -> str:
    """Return the script of a letter, or the first word of its name in Unicode."""
    script = unicodedata.name(letter, "").replace("-", " ").partition(" ")[0].lower()
    return "cjk" if script == "ideographic" else script
