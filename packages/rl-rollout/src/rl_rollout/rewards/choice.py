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
LINE = re.compile(LETTER.pattern + ALONE.pattern)
# What may follow a letter without marks: punctuation or, after a marker, a reason, but no prose, as in "A good idea".
AFTER = re.compile(r"\Z|[\n.:(\u2013\u2014\\]|-\s")
REASON = re.compile(r"[,;]|(?:because|since|as|which)\b")
JUDGED = re.compile(r"[\s:-]*+(?:is|was|isn|wasn|would|cannot|can|does|doesn|has|not|no|wrong|false|incorrect)\b")
# A capital letter that is an option: not "A good idea" or "I think", and no part of an option's text, as "Vitamin D".
OPTION = re.compile(r"(?<![^\W_])[A-J](?![^\W_]|['\u2019]|(?<=[AI])\s+(?!(?:and|as|because|is|or|was)\b)[a-z])")
ANOTHER = re.compile(
    r"(?:\b(?i:actually|also|and|answer|be|but|choice|choose|either|even|hence|instead|is|it|maybe|mean|no|option|or|pick"
    r"|perhaps|possibly|probably|rather|say|so|then|therefore|thus|wait)[^\S\n]++|(?<![^\W_][ \t])(?<![(\[{*_$`\"']))"
    r"[(\[{*_$`\"']*+(?P<letter>" + OPTION.pattern + ")"
)
PARAGRAPH = re.compile(r"(?<=\S)[^\S\n]*+(?:\n[^\S\n]*+){2,}+(?![(\[*]*[A-J](?![^\W_]))")


@settings_record
class Choice:
    r"""1 if the response chooses the ground truth's letter, from A to J, else 0.

    The letter is the content of the last `\boxed{}` after the thinking, or what follows the last "answer is" or
    "Answer:", or else the last line, or all of the response, perhaps with the option's text, as in "B) Paris". A letter
    in prose, as in "A good idea" or "A is wrong", is none. Several letters in the box, in the paragraph after the
    marker or in the response are none, except those after "not". The extra `pred` is the letter, for majority votes.

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
        return _only_letter(boxed, is_marked=True)
    end = len(text)
    for anchor in reversed(list(NAMED.finditer(text))):
        answer = PARAGRAPH.split(text[anchor.end() : end].strip(), 1)[0]
        if (letter := _only_letter(answer, is_marked=True)) or OPTION.search(answer):
            return letter
        end = anchor.start()
    lines = [LINE.match(line) for line in text.strip().splitlines()]
    if not any(lines[-1:]):
        return _only_letter(text, is_marked=False)
    alone = {line["letter"].upper() for line in lines if line}
    return alone.pop() if len(alone) == 1 else None


def _only_letter(text: str, *, is_marked: bool) -> str | None:
    """Return the letter that a text begins with; None without one, such as in prose, or if it names another."""
    match = LETTER.match(text)
    if match is None or JUDGED.match(text, match.end()):
        return None
    letter, end, closed = match["letter"].upper(), match.end(), match["closed"].strip()
    fits = closed or AFTER.match(text, end) or (is_marked and REASON.match(text, end))
    if not (")" in closed if match["letter"].islower() else fits) and not ALONE.match(text, end):
        return None
    return letter if {one["letter"] for one in ANOTHER.finditer(text, end)} <= {letter} else None
