"""Rules that compare text or count tokens, in microseconds."""

import re
from decimal import Context, Decimal, localcontext
from typing import Any, ClassVar

from rl_core.errors import DataError, SettingsError
from rl_core.record_fields import NonNegativeFloat, NonNegativeInt, PositiveInt, settings_record
from rl_rollout.rewards.outputs import preview
from rl_rollout.rewards.protocol import RewardInput, RewardResult, quick

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
# Between two numbers, of which neither is the answer: "4 or 5", "4, or maybe 5", "\boxed{4} or \boxed{5}".
OR = re.compile(r"\W*+or\b(?:\W|(?:boxed|text|math[a-z]{2}|also|even|maybe|perhaps|possibly)\b)*+", re.IGNORECASE)
MAX_PREDICTION = 200
"""Maximum length of a prediction for majority votes, in characters."""


@settings_record
class ExactMatch:
    """1 if the response equals the ground truth, ignoring spaces at both ends, else 0.

    The extra `pred` is the answer, for majority votes.

    Attributes:
        tag: Compare only the text in `<tag>...</tag>`, which must occur once after the thinking; empty compares the
            whole response, with its thinking.
        ignore_case: Ignore the case of letters.
    """

    is_quick: ClassVar[bool] = True
    tag: str = ""
    ignore_case: bool = False

    def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response."""
        texts = final_or_tagged(given, self.tag) if self.tag else given.response_text, str(given.ground_truth)
        found, expected = (text.strip().casefold() if self.ignore_case else text.strip() for text in texts)
        return voted(float(found == expected and bool(found or not self.tag)), found)


@settings_record
class NumberMatch:
    """1 if the last number after the response's thinking equals the ground truth's last number, else 0.

    A number that "or" joins to another one before it, as in "4 or 5", scores 0; other words are not read. With a
    tolerance, it may differ by `absolute`, or by `relative` times the ground truth, whichever is more. The extra
    `pred` is the number, for majority votes.

    Attributes:
        relative: Accepted difference as a share of the ground truth.
        absolute: Accepted difference.
        tag: Read only the text in `<tag>...</tag>`, which must occur once after the thinking.
    """

    is_quick: ClassVar[bool] = True
    relative: NonNegativeFloat = 0.0
    absolute: NonNegativeFloat = 0.0
    tag: str = ""

    def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            DataError: The ground truth has no plain number.
        """
        expected = last_number(str(given.ground_truth))
        if expected is None:
            raise DataError(
                f"the ground truth must have a number for number_match; found {preview(given.ground_truth)}. Repair "
                "the row, or use math_verify, which reads fractions and expressions."
            )
        found = last_number(final_or_tagged(given, self.tag))
        if found is None:
            return voted(0.0, None)
        with localcontext(Context(traps=[])):  # a number of a million digits is wrong, and no fault
            allowed = max(Decimal(str(self.absolute)), Decimal(str(self.relative)) * abs(expected))
            is_right = found == expected or abs(found - expected) <= allowed
            return voted(float(is_right), str(found.normalize()))


@quick
def exact_match(given: RewardInput) -> float:
    """Return 1 if the response equals the ground truth, ignoring spaces at both ends."""
    return ExactMatch()(given).reward


@quick
def number_match(given: RewardInput) -> float:
    """Return 1 if the last number after the response's thinking equals the ground truth's last number."""
    return NumberMatch()(given).reward


def final_or_tagged(given: RewardInput, tag: str) -> str:
    """Return the text after the thinking; with a tag, what its only `<tag>...</tag>` holds, or empty."""
    text, opening, closing = given.final_text, f"<{tag}>", f"</{tag}>"
    if tag and (text.count(opening), text.count(closing)) != (1, 1):
        return ""
    return text.partition(opening)[2].partition(closing)[0] if tag else text


def voted(reward: float, prediction: str | None) -> RewardResult:
    """Return a reward with the prediction for majority votes, if there is one that is not too long."""
    has_vote = prediction and len(prediction) <= MAX_PREDICTION
    return RewardResult(reward=reward, extras={"pred": prediction} if has_vote else {})


def last_number(text: str) -> Decimal | None:
    """Return the last decimal number of a text, without thousands separators; None if "or" joins it to another one."""
    number, end, is_hedge = None, None, False
    for found in NUMBER.finditer(text):
        is_range = found["high"] and int(found["low"]) < int(found["high"])
        digits = None if is_range or found["script"] else found["number"] or found["high"]
        if digits:
            value = Decimal("".join(DIGITS.findall(digits)))
            value = -value if digits[0] in MINUS else value
            is_joined = end is not None and OR.fullmatch(text, end, found.start()) is not None
            number, is_hedge = value, is_joined and (is_hedge or value != number)
        end = found.end()
    return None if is_hedge else number


@settings_record
class Overlong:
    """DAPO's soft overlong punishment: 0 for short responses, down to -penalty_factor at the length limit.

    With limit L = max_tokens and buffer B = buffer_tokens, the reward is 0 up to length L - B, falls linearly to -1 at
    L, and stays -1 beyond, all times penalty_factor.

    Source: Yu et al. 2025, arXiv:2503.14476, equation 13.

    Attributes:
        max_tokens: L: maximum expected response length, usually the rollout's limit.
        buffer_tokens: B: number of tokens before L over which the punishment grows.
        penalty_factor: Factor of the punishment; 1 in the paper.
    """

    is_quick: ClassVar[bool] = True
    max_tokens: PositiveInt
    buffer_tokens: PositiveInt
    penalty_factor: NonNegativeFloat = 1.0

    def __post_init__(self) -> None:
        """Refuse a buffer that is longer than the limit."""
        if self.buffer_tokens > self.max_tokens:
            raise SettingsError(
                "reward function 'overlong' needs buffer_tokens <= max_tokens; found "
                f"buffer_tokens = {self.buffer_tokens}, max_tokens = {self.max_tokens}."
            )

    def __call__(self, given: RewardInput) -> float:
        """Score one response."""
        over = len(given.response_ids) - (self.max_tokens - self.buffer_tokens)
        share = min(max(over / self.buffer_tokens, 0.0), 1.0)
        return -share * self.penalty_factor if share else 0.0


@settings_record
class LengthTarget:
    """Minus the coefficient times the difference between a response's length and its target, in tokens (L1-Exact).

    Source: Aggarwal and Welleck 2025, arXiv:2503.04697, equation 1, where coefficient = 0.0003.

    Attributes:
        tokens: Target length of all rows. Give either this or `column`.
        column: Column with the target length of each row.
        coefficient: Punishment per token of difference.
    """

    is_quick: ClassVar[bool] = True
    tokens: NonNegativeInt | None = None
    column: str | None = None
    coefficient: NonNegativeFloat = 0.0003

    def __post_init__(self) -> None:
        """Refuse two targets, and none."""
        if (self.tokens is None) == (self.column is None):
            raise SettingsError(
                "reward function 'length_target' needs either tokens, a whole number, or column; found "
                f"tokens = {self.tokens!r}, column = {self.column!r}."
            )

    def __call__(self, given: RewardInput) -> float:
        """Score one response.

        Raises:
            DataError: The row's target is not a whole number.
        """
        target: Any = self.tokens if self.column is None else given.columns.get(self.column)
        if not isinstance(target, int) or isinstance(target, bool) or target < 0:
            raise DataError(f"column {self.column!r} must be a whole number of tokens; found {preview(target)}.")
        return -self.coefficient * abs(len(given.response_ids) - target)
