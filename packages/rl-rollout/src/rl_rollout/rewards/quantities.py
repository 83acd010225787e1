"""Splits a quantity into its number, its percent sign and its unit."""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from rl_rollout.rewards.exact_numbers import exact_value

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
        if exact_value(number) is not None or not (found := TAIL.search(number)):
            break
        number, unit = number[: found.start()].strip(), unit or known_unit(found["unit"])
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


def same_values(gold: Quantity, answer: Quantity) -> bool:
    """Compare two exact values. A percent sign on one side only may stand for a hundredth or for nothing."""
    if gold.value is None or answer.value is None:
        return False
    if gold.is_percent == answer.is_percent:
        return _same(gold, answer, gold.value, answer.value)
    with_sign, other = (gold.value, answer.value) if gold.is_percent else (answer.value, gold.value)
    return other in (with_sign, with_sign / 100)


def is_rounded(text: str, value: Fraction | Decimal) -> bool:
    """Return True if a text is a decimal number with at least MIN_PLACES places to which the value rounds."""
    found = DECIMAL.fullmatch(text)
    if found is None or len(found[1]) < MIN_PLACES or not text.strip("-0."):
        return False
    digits = len(text.lstrip("-0.").replace(".", ""))
    half = Fraction(1, 2 * 10 ** len(found[1]))
    return digits >= MIN_PLACES and abs(Fraction(text) - Fraction(value)) <= half


def _same(gold: Quantity, answer: Quantity, first: Fraction, second: Fraction) -> bool:
    if first == second:
        return True
    if DECIMAL.fullmatch(gold.number) and DECIMAL.fullmatch(answer.number):
        return False
    return is_rounded(answer.number, first) or is_rounded(gold.number, second)
