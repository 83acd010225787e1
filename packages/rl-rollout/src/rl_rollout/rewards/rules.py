"""Rules that compare text in microseconds."""

import re
from decimal import Decimal

from rl_rollout.rewards.protocol import RewardInput, quick

# A minus is a sign unless it subtracts: "5-3" ends in 3, "= -3" in -3.
# Suffixes that change the value of the digits before them: powers, indices and fractions, as single characters or as
# `^2`, `**2`, `/2`, `e2` and `_2`. Such numbers are skipped.
SCRIPT = (
    r"[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2089\u2150-\u2189\u2460-\u24ff\u2776-\u2793]+| ?(?:\^|\*\*) ?\{?[-+]?\d*"
    r"|(?: ?/ ?-?\d+(?:\.\d+)?)+|[eE][-+]?\d+|(?:_\d+)+"
)
MINUS = "-\u2212\u2013\ufe63\uff0d"
NUMBER = re.compile(
    rf"(?:(?:(?<![\w.)])[{MINUS}])?(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<![\w.)])[{MINUS}])?\.\d+)"
    rf"(?P<script>{SCRIPT})?"
    r"|(?P<fraction>\\[cdt]?frac(?: ?(?:\{[^{}]*\}|\d)){2})"
)
PLAIN = str.maketrans(dict.fromkeys(MINUS, "-") | {",": None})
BRACE = re.compile(r"\\boxed\{|[{}]")


@quick
def exact_match(given: RewardInput) -> float:
    """Return 1 if the response equals the ground truth, ignoring spaces at both ends."""
    return float(given.response_text.strip() == str(given.ground_truth).strip())


@quick
def number_match(given: RewardInput) -> float:
    """Return 1 if the last number of the response equals the ground truth's last number."""
    found = last_number(given.response_text)
    expected = last_number(str(given.ground_truth))
    return float(found is not None and found == expected)


def last_number(text: str) -> Decimal | None:
    """Return the last decimal number of a text, without thousands separators."""
    last = None
    for found in NUMBER.finditer(text):
        last = last if found["script"] or found["fraction"] else found
    return None if last is None else Decimal(last.group().translate(PLAIN))


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}`, with inner braces balanced."""
    opened: list[tuple[int, bool]] = []
    last = (-1, -1)
    for brace in BRACE.finditer(text):
        if brace.group() != "}":
            opened.append((brace.end(), brace.group() != "{"))
        elif opened:
            start, is_box = opened.pop()
            if is_box and start > last[0]:
                last = (start, brace.start())
    return None if last[0] < 0 else text[last[0] : last[1]]
