"""Reward for the letter that a response chooses among the options of a question."""

import re
from typing import ClassVar

from rl_core.errors import DataError
from rl_core.record_fields import settings_record
from rl_rollout.rewards.answers import ANCHOR, MAX_TAIL, boxed_answer
from rl_rollout.rewards.outputs import preview
from rl_rollout.rewards.protocol import RewardInput, RewardResult
from rl_rollout.rewards.rules import final_or_tagged, voted

NAMED = re.compile(
    ANCHOR.pattern + r"|\b(?:correct|right|best|final)\s+(?:option|choice)\b[*_\s)]*(?:is\b|[:=])[*_:=\s]*"
)
LETTER = re.compile(
    r"(?:[\s*_$`\"'(\[{]|\\(?:text|mathrm|mathbf|textbf)\b|(?i:option|choice)\s)*+"
    r"(?P<letter>[A-Ja-j])(?![^\W_]|['\u2019+#-]\w)(?P<closed>[ \t)\]}*_$`\"']*+)"
)
ALONE = re.compile(r"[ \t.)\]}*_$`\"'\\]*(?:\n|\Z)")
# What may follow a letter without marks: punctuation or a reason, but no prose, as after "A good idea".
AFTER = re.compile(r"\Z|[\n.,:;(\u2013\u2014\\]|-\s|(?:because|since|as|which|is|was)\b")
# Another letter: "A or B", "A, B", "A (or maybe B)"; and in the next line of a list, "A) ...", "B) ...".
ANOTHER = re.compile(
    r"[\s(]*(?:(?:[,;/|&+]|and\b|or\b)\s*)+(?:(?:also|maybe|perhaps|possibly|even|option|choice)\s+)*[(\[*_$`\"']*"
    r"(?!I\s+[a-z])[A-J](?![^\W_]|['\u2019])"
)
LISTED = re.compile(r"[^\S\n]*([).:])[^\n]{0,300}\n\s*[(*]*[A-J]\1")


@settings_record
class Choice:
    r"""1 if the response chooses the ground truth's letter, from A to J, else 0.

    The letter is the content of the last `\boxed{}` after the thinking, or what follows the last "answer is" or
    "Answer:", or else all of the response or of its last line. A letter in prose, as in "A good idea", is none, and two
    letters, as in "A or B", are none. The extra `pred` is the letter, for majority votes.

    Attributes:
        tag: Read only the text in `<tag>...</tag>`, which must occur once after the thinking.
    """

    is_quick: ClassVar[bool] = True
    tag: str = ""

    def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            DataError: The ground truth is not such a letter.
        """
        truth = given.ground_truth
        gold = re.fullmatch(r"\(?([A-Ja-j])[).]{0,2}", str(truth).strip())
        if gold is None:
            raise DataError(f"the ground truth must be a letter, A to J; found {preview(truth)}. Repair the row.")
        found = chosen_letter(final_or_tagged(given, self.tag))
        return voted(float(found == gold[1].upper()), found)


def chosen_letter(text: str) -> str | None:
    """Return the letter that a text chooses, as a capital; None without one, or with several."""
    text = text[-MAX_TAIL:]
    if (boxed := boxed_answer(text)) is not None:
        return _leading_letter(boxed) or None
    for anchor in reversed(list(NAMED.finditer(text))):
        if (letter := _leading_letter(text[anchor.end() :])) is not None:
            return letter or None
    lines = text.strip().splitlines()
    found = {_leading_letter(text), *(_leading_letter(line, is_alone=True) for line in lines[1:])} - {None}
    return found.pop() or None if len(found) == 1 else None


def _leading_letter(text: str, *, is_alone: bool = False) -> str | None:
    """Return the letter that a text begins with; empty for several, None without one, such as in prose."""
    match = LETTER.match(text)
    if match is None:
        return None
    at = match.end("letter")
    if ANOTHER.match(text, match.end()) or LISTED.match(text, at):
        return ""
    fits = ALONE.match(text, at) is not None
    if not fits and not is_alone:
        closed = match["closed"].strip()
        fits = ")" in closed if match["letter"].islower() else bool(closed or AFTER.match(text, match.end()))
    return match["letter"].upper() if fits else None
