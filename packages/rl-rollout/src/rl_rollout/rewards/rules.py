"""Rules that compare text in microseconds."""

import re
from decimal import Decimal

from rl_rollout.rewards.protocol import RewardInput, quick

# A minus is a sign unless it subtracts: "5-3" ends in 3, "= -3" in -3.
# Suffixes that change the value of the digits before them: powers, indices and fractions, as single characters or as
# `^2`, `**2`, `/2`, `e2`, `_2`, ` 1/2` and `\frac12`. Such numbers are skipped. A degree sign is no power, and `**`
# after a number may end bold type.
SCRIPT = (
    r"[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2189\u2460-\u24ff\u2776-\u2793]+"
    r"| ?\^(?! ?\{? ?(?:\\circ|\\degree|\u00b0)) ?\{?[-+]?\d*|\*\*[-+]?[\w(]+| \*\* [-+]?[\w(]+"
    r"|(?: ?/ ?-?\d+(?:\.\d+)?)+| \d+ ?/ ?\d+| ?\\[cdt]?frac(?: ?(?:\{[^{}]*\}|\d)){0,2}|[eE][-+]?\d+|(?:_\{?\d+\}?)+"
)
MINUS = "-\u2212\u2013\ufe63\uff0d"
THOUSANDS = r"(?:\\!,\\!|,\\!|\\!,|,|\{,\}|\\[,;: ]|[ ~\u00a0\u2009\u202f])"
SIGN = rf"(?:(?:(?<==)[{MINUS}] |(?<== )[{MINUS}] |(?<![\w.)\]}}])[{MINUS}])(?:\\?[$\u20ac\u00a3])?)?"
NUMBER = re.compile(
    r"(?:\^|(?<=[A-Za-z}])_)\{?[-+]?\d+|(?<![A-Za-z])(?:[kcdm]?m|ft|in)[23](?!\d)"
    r"|\\[cdt]?frac(?: ?(?:\{[^{}]*\}|\d)){2}"
    rf"|(?P<number>{SIGN}(?:(?:\d{{1,3}}(?:{THOUSANDS}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+))(?P<script>{SCRIPT})?"
)
DIGITS = re.compile(r"[\d.]+")


@quick
def exact_match(given: RewardInput) -> float:
    """Return 1 if the response equals the ground truth, ignoring spaces at both ends."""
    return float(given.response_text.strip() == str(given.ground_truth).strip())


@quick
def number_match(given: RewardInput) -> float:
    """Return 1 if the last number after the response's thinking equals the ground truth's last number."""
    found = last_number(given.final_text)
    expected = last_number(str(given.ground_truth))
    return float(found is not None and found == expected)


def last_number(text: str) -> Decimal | None:
    """Return the last decimal number of a text, without thousands separators."""
    last = None
    for found in NUMBER.finditer(text):
        last = found if found["number"] and not found["script"] else last
    if last is None:
        return None
    number = Decimal("".join(DIGITS.findall(last["number"])))
    return -number if last["number"][0] in MINUS else number
