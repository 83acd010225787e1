"""Exact values of numbers that are written with digits and operators."""

import math
import re
from fractions import Fraction

TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|(\\frac|\\cdot|[-+*/^!(){}])|(\S))")
MIXED = re.compile(r"([-+]?)\s*(\d+)\s*(?: (\d+)\s*/\s*(\d+)|\\frac\{(\d+)\}\{(\d+)\})")
REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\{?(\d+)\}?")
MAX_CHARACTERS = 2000
MAX_BITS = 200_000
MAX_DEPTH = 40


class NotExactError(Exception):
    """The text is no number in digits, or too large to compute."""


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
        return _signed(sign, whole=int(whole), numerator=numerator, denominator=denominator)
    if repeating := REPEATING.fullmatch(text):
        sign, whole, fixed, period = repeating.groups()
        scale = 10 ** len(fixed)
        part = Fraction(int(fixed or 0), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
        return (int(whole or 0) + part) * (-1 if sign == "-" else 1)
    try:
        return _Reader(text).value()
    except (NotExactError, ZeroDivisionError):
        return None


def _signed(sign: str, *, whole: int, numerator: int, denominator: int) -> Fraction | None:
    if not numerator < denominator:
        return None
    return (whole + Fraction(numerator, denominator)) * (-1 if sign == "-" else 1)


class _Reader:
    """Recursive descent over one text. Two numbers in a row, as in `4 10/3`, are refused."""

    def __init__(self, text: str) -> None:
        self._tokens = [match.group().strip() for match in TOKEN.finditer(text)]
        self._position = 0
        self._depth = 0

    def value(self) -> Fraction:
        found = self._sum()
        if self._position < len(self._tokens):
            raise NotExactError
        return found

    def _next(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self, *expected: str) -> str:
        token = self._next()
        if token not in expected:
            raise NotExactError
        self._position += 1
        return token

    def _sum(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotExactError
        total = self._product()
        while self._next() in ("+", "-"):
            total = _small(total + self._product() if self._take("+", "-") == "+" else total - self._product())
        self._depth -= 1
        return total

    def _product(self) -> Fraction:
        sign = 1
        while self._next() in ("+", "-"):
            sign *= -1 if self._take("+", "-") == "-" else 1
        product = self._power()
        while True:
            if self._next() in ("*", "\\cdot"):
                self._position += 1
                product = _small(product * self._signed_power())
            elif self._next() == "/":
                self._position += 1
                product = _small(product / self._signed_power())
            elif self._next() == "(":
                product = _small(product * self._power())
            else:
                return sign * product

    def _signed_power(self) -> Fraction:
        if self._next() == "-":
            self._position += 1
            return -self._power()
        return self._power()

    def _power(self) -> Fraction:
        base = self._atom()
        if self._next() == "!":
            self._position += 1
            if base.denominator != 1 or not 0 <= base <= 5000:
                raise NotExactError
            base = Fraction(math.factorial(int(base)))
        if self._next() != "^":
            return base
        self._position += 1
        exponent = self._signed_power()
        if exponent.denominator != 1 or abs(exponent) * max(_bits(base), 1) > MAX_BITS:
            raise NotExactError
        return base ** int(exponent)

    def _atom(self) -> Fraction:
        mark = self._take(*self._openings())
        if mark == "\\frac":
            return _small(self._group("{") / self._group("{"))
        if mark in ("(", "{"):
            self._position -= 1
            return self._group(mark)
        return Fraction(mark)

    def _openings(self) -> tuple[str, ...]:
        token = self._next()
        return ("\\frac", "(", "{", token) if token[-1:].isdigit() else ("\\frac", "(", "{")

    def _group(self, opening: str) -> Fraction:
        self._take(opening)
        found = self._sum()
        self._take({"(": ")", "{": "}"}[opening])
        return found


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length() - 1


def _small(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise NotExactError
    return value
