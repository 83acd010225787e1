"""Exact values of numbers in digits, and quantities with a percent sign or a unit."""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|(\\frac|\\cdot|[-+*/^!(){}])|(\S))")
MIXED = re.compile(r"([-+]?)\s*(\d+)\s*(?: (\d+)\s*/\s*(\d+)|\\frac\{(\d+)\}\{(\d+)\})")
REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\{?(\d+)\}?")
MAX_CHARACTERS = 2000
MAX_BITS = 200_000
MAX_DEPTH = 40


def exact_value(text: str) -> Fraction | None:
    r"""Return the value of a text such as `71/6`, `11 5/6`, `\frac{71}{6}`, `-1.50`, `4!` or `2^{98}`, else None.

    A mixed number needs a proper fraction: `4 10/3` has no value.
    """
    text = text.strip()
    if not text or len(text) > MAX_CHARACTERS:
        return None
    if mixed := MIXED.fullmatch(text):
        sign, whole, *parts = mixed.groups()
        numerator, denominator = (int(part) for part in parts if part is not None)
        if numerator >= denominator:
            return None
        value = int(whole) + Fraction(numerator, denominator)
        return -value if sign == "-" else value
    if repeating := REPEATING.fullmatch(text):
        sign, whole, fixed, period = repeating.groups()
        scale = 10 ** len(fixed)
        part = Fraction(int(fixed or 0), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
        return (int(whole or 0) + part) * (-1 if sign == "-" else 1)
    try:
        return _NumberReader(text).value()
    except (ValueError, ZeroDivisionError):
        return None


class _NumberReader:
    """Recursive descent over one text. Two numbers in a row, as in `4 10/3`, are refused.

    A text that is no number in digits, or too large to compute, raises ValueError.
    """

    def __init__(self, text: str) -> None:
        self._tokens = [match.group().strip() for match in TOKEN.finditer(text)]
        self._position = 0
        self._depth = 0

    def value(self) -> Fraction:
        value = self._sum()
        if self._position < len(self._tokens):
            raise ValueError
        return value

    def _next(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self, *tokens: str) -> str:
        """Take the next token if it is one of these, else return an empty text."""
        token = self._next()
        if token not in tokens:
            return ""
        self._position += 1
        return token

    def _sum(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError
        total = self._product()
        while sign := self._take("+", "-"):
            term = self._product()
            total = _small(total + term if sign == "+" else total - term)
        self._depth -= 1
        return total

    def _product(self) -> Fraction:
        sign = 1
        while mark := self._take("+", "-"):
            sign *= -1 if mark == "-" else 1
        product = self._power()
        while True:
            if self._take("*", "\\cdot"):
                product = _small(product * self._signed_power())
            elif self._take("/"):
                product = _small(product / self._signed_power())
            elif self._next() == "(":
                product = _small(product * self._power())
            else:
                return sign * product

    def _signed_power(self) -> Fraction:
        return -self._power() if self._take("-") else self._power()

    def _power(self) -> Fraction:
        base = self._atom()
        if self._take("!"):
            if base.denominator != 1 or not 0 <= base <= 5000:
                raise ValueError
            base = Fraction(math.factorial(int(base)))
        if not self._take("^"):
            return base
        exponent = self._signed_power()
        if exponent.denominator != 1 or abs(exponent) * max(_bits(base), 1) > MAX_BITS:
            raise ValueError
        return base ** int(exponent)

    def _atom(self) -> Fraction:
        symbol = self._next()
        if symbol[-1:].isdigit():
            return Fraction(self._take(symbol))
        if self._take("\\frac"):
            return _small(self._group("{") / self._group("{"))
        return self._group("{" if symbol == "{" else "(")

    def _group(self, opening: str) -> Fraction:
        if not self._take(opening):
            raise ValueError
        value = self._sum()
        if not self._take({"(": ")", "{": "}"}[opening]):
            raise ValueError
        return value


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length() - 1


def _small(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise ValueError
    return value


UNITS = {
    "mm": ("millimeter", "millimetre"), "cm": ("centimeter", "centimetre"), "m": ("meter", "metre"),
    "km": ("kilometer", "kilometre"), "in": ("inch", "inches"), "ft": ("foot", "feet"), "yd": ("yard",),
    "mi": ("mile",), "g": ("gram",), "kg": ("kilogram",), "mg": ("milligram",), "lb": ("pound", "lbs"),
    "oz": ("ounce",), "l": ("liter", "litre"), "ml": ("milliliter", "millilitre"), "s": ("second", "sec"),
    "min": ("minute",), "h": ("hour", "hr"), "day": (), "week": (), "month": (), "year": ("yr",),
    "dollar": ("usd", "buck"), "cent": (), "euro": (), "degree": ("deg",), "radian": ("rad",),
    "mi/h": ("mph",), "km/h": ("kmh", "kph"),
}  # fmt: skip
UNIT_NAMES = {name: unit for unit, names in UNITS.items() for name in (unit, *names)}
KNOWN = "|".join(sorted((name for name in UNIT_NAMES if len(name) > 1), key=len, reverse=True))
UNIT_NAMES |= {"am": "am", "pm": "pm"}  # not beside digits: `3am` is a product
MONEY = ("dollar", "cent", "euro")
DENIAL = r"(?i:not|never|wrong|incorrect|false|invalid|isn't)\b"
FUNCTIONS = r"(?:and|or|if|for|mod|sin|cos|tan|log|ln|sqrt|pi)\b"
WORD = rf"(?!{FUNCTIONS}|{DENIAL})[a-zA-Z]{{2,}}"
POWER = r"(?:\s?\^\{?-?\d\}?)?"
TEXT = rf"\\text\s*\{{(?!\s*(?:and|or)\b|[^{{}}]*(?:\?|\b{DENIAL}))(?:[^{{}}]|\{{[^{{}}]*\}})*\}}{POWER}"
TAIL = re.compile(
    rf"(?<=[\d)}}!%.a-zA-Z|\]])\s*(?P<unit>\^\{{\\circ\}}(?:\s*(?:C|F|\\text\s*\{{[CF]\}}))?|(?:{TEXT}[\s/]*)+$"
    rf"|(?<=[\d)}}!% ])(?:{KNOWN})s?\b{POWER}(?:\s?(?:/|per)\s?[a-zA-Z]+{POWER})?(?:\s{WORD}){{0,8}}"
    rf"|(?<=[\d)}}!%]) (?:{WORD}\.?{POWER}|[mgsL]\b{POWER})(?:\s?(?:/|per)\s?[a-zA-Z]+{POWER})?(?:\s{WORD}){{0,8}})$"
)
SQUARED = re.compile(r"\b(?:(?:square|sq|(cubic|cu))\b\.?\s*([a-zA-Z]+)|([a-zA-Z]+)\s+(?:squared|(cubed))\b)")
UNIT = re.compile(r"(/\s*|\bper\s+)?([a-zA-Z]+)(?:\s*\^\s*(-?\d))?")
DECIMAL = re.compile(r"-?\d*\.(\d+)")
MIN_PLACES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A quantity.

    Attributes:
        number: Its number as LaTeX, without percent sign and unit.
        value: The number's exact value, if it is written with digits and operators.
        is_percent: True if a percent sign follows.
        unit: Its unit, such as "cm^2" or "m/s"; empty without a unit or for one that is not known.
    """

    number: str
    value: Fraction | None
    is_percent: bool
    unit: str


def quantity(text: str) -> Quantity:
    """Split a text that `plain_math` returned."""
    number, unit = text, ""
    for _ in range(8):
        if exact_value(number) is not None or not (tail := TAIL.search(number)):
            break
        number, unit = number[: tail.start()].strip(), unit or known_unit(tail["unit"])
    is_percent = number.endswith("%")
    number = number.rstrip("% ")
    return Quantity(number=number, value=exact_value(number), is_percent=is_percent, unit=unit)


def known_unit(text: str) -> str:
    """Return the first known unit of a text, with its power and what divides it; empty if there is none.

    What divides money is left out, because a price may omit it.
    """
    if "\\circ" in text:
        return "degree"
    text = re.sub(r"\\text|[{}]", " ", text)
    text = SQUARED.sub(lambda match: f"{match[2] or match[3]}^{3 if match[1] or match[4] else 2}", text)
    unit = ""
    for per, word, power in UNIT.findall(text):
        forms = (word, word.lower(), word.lower().removesuffix("s"))
        name = next((UNIT_NAMES[form] for form in forms if form in UNIT_NAMES), "")
        is_divided = bool(per) or power.startswith("-")
        if unit in MONEY or (unit and not (name and is_divided)):
            break
        if name:
            exponent = power.lstrip("-")
            unit += "/" * is_divided + name + (f"^{exponent}" if exponent not in ("", "1") else "")
    return unit


def same_units(first: Quantity, second: Quantity) -> bool:
    """Return False if both units are known and differ."""
    return not first.unit or not second.unit or first.unit == second.unit


def same_values(gold: Quantity, answer: Quantity) -> bool | None:
    """Compare two exact values; None if one is not exact.

    A percent sign on one side only may stand for a hundredth or for nothing.
    """
    first, second = gold.value, answer.value
    if first is None or second is None:
        return None
    if gold.is_percent != answer.is_percent:
        with_sign, other = (first, second) if gold.is_percent else (second, first)
        return other in (with_sign, with_sign / 100)
    if first == second:
        return True
    if DECIMAL.fullmatch(gold.number) and DECIMAL.fullmatch(answer.number):
        return False
    return is_rounded(answer.number, first) or is_rounded(gold.number, second)


def is_rounded(text: str, value: Fraction | Decimal) -> bool:
    """Return True if a text is a decimal number with at least MIN_PLACES places to which the value rounds."""
    decimal = DECIMAL.fullmatch(text)
    if decimal is None or len(decimal[1]) < MIN_PLACES or not text.strip("-0."):
        return False
    digits = len(text.lstrip("-0.").replace(".", ""))
    half = Fraction(1, 2 * 10 ** len(decimal[1]))
    return digits >= MIN_PLACES and abs(Fraction(text) - Fraction(value)) <= half
