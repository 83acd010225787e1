"""Rules that compare text in microseconds."""

import re
from decimal import Decimal

from rl_rollout.rewards.protocol import RewardInput, quick

# A minus is a sign unless it subtracts: "5-3" ends in 3, "= -3" in -3.
# Suffixes that change the value of the digits before them: powers, indices and fractions, as single characters or as
# `^2`, `**2`, `/2`, `e2`, `_2`, ` 1/2` and `\frac12`, and factors such as `x` and `\sqrt{2}`. Such numbers are skipped.
# A degree sign and `^{th}` are no powers, and `**` after a number may end bold type.
ROOT = r"(?:\\?sqrt ?|\u221a ?)(?:\[\d+\])?(?:\{[^{}]*\}|\([^()]*\)|\d+(?:\.\d+)?)(?: ?/ ?\d+)?"
SCRIPT = (
    r"[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2189\u2460-\u24ff\u2776-\u2793]+"
    r"| ?\^(?! ?\{? ?(?:\\circ|\\degree|\u00b0|o\b|\}|(?:\\\w+ ?\{)?(?:st|nd|rd|th)\b)) ?\{?[-+]?\d*"
    r"|\*\*[-+]?[\d(]+|(?(bold)(?!)|(?: \*\* |\*\*)[-+]?[\w(]+)"
    r"|(?: ?/ ?-?\d+(?:\.\d+)?)+| \d+ ?/ ?\d+| ?\\[cdt]?frac(?: ?(?:\{[^{}]*\}|\d)){0,2}|[eE][-+]?\d+|(?:_\{?\d+\}?)+"
    rf"| ?{ROOT}|(?:\\pi|\u03c0|[abeijknqruvwxyz])(?![A-Za-z\d]| (?:as|faster|more)\b)|!+(?= ?[\^/=}}$])"
)
MINUS = "-\u2212\u2013\ufe63\uff0d"
THOUSANDS = r"(?:\\!,\\!|,\\!|\\!,|,|\{,\}|['\u2019]|\\[,;: ]|[ ~\u00a0\u2009\u202f])"
SIGN = rf"(?:(?:(?<==)[{MINUS}] |(?<== )[{MINUS}] |(?<![\w.)\]}}])[{MINUS}])(?:\\?[$\u20ac\u00a3])?)?"
# Digits that are no numbers: exponents, indices, fractions, roots, `m2`, `CO2`, references such as `18 [1]` and
# `(Step 2)`, ranges such as `10-18`, and a whole text such as `4!`.
NUMBER = re.compile(
    r"(?:\^|(?<=[A-Za-z}])_)\{?[-+]?\d+|(?<![A-Za-z])(?:[kcdm]?m|ft|in)(?:\*\*)?[23](?!\d)"
    rf"|\\[cdt]?frac(?: ?(?:\{{[^{{}}]*\}}|\d)){{2}}|{ROOT}|\A\W*\d+!\W*\Z"
    r"|(?<![A-Za-z\d])(?:[CHONS]+[2-9]\d?)+[CHONS]*(?!\w)|(?<=\d) ?\[\^?\d{1,2}(?:, ?\d{1,2})*\]"
    r"|\((?i:see |from |by |in )?(?i:step|eq|equation|line|section|part|table|figure)s?\.? ?\d+[^()\d]*\)"
    r"|(?<![\w.,-])(?P<low>\d{1,6})-(?P<high>\d{1,6})(?![\w.,]*\d|[-^/!*])"
    rf"|(?P<bold>\*\* ?)?(?P<number>{SIGN}(?:(?:\d{{1,3}}(?:{THOUSANDS}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+))"
    rf"(?P<script>{SCRIPT})?"
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
        if found["high"]:
            last = last if int(found["low"]) < int(found["high"]) else found["high"]
        elif found["number"] and not found["script"]:
            last = found["number"]
    if last is None:
        return None
    number = Decimal("".join(DIGITS.findall(last)))
    return -number if last[0] in MINUS else number
