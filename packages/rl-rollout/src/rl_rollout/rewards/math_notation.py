"""One notation for mathematical answers, and what an answer lists, relates or encloses."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

BOLD = re.compile(r"(?<![\w)\]}*])(\*{1,3}|__|`)(?=[^\s*])(.{1,300}?)(?<=[^\s*])\1(?![\w(*])")
DOLLARS = re.compile(r"(?<!\\)\$\$?")
GROUPED = re.compile(r"(?<![\d.\w])\d{1,3}(?:(?:,|[ \u00a0\u2009\u202f]|(?<=\d)_)\d{3})+(?![\d,])")
UNDERSCORED = re.compile(r"(?<=\d)_(?=\d{3}(?!\d))")
AREA = re.compile("(?<=\\d)\\s?([kcmd]?m)([\u00b2\u00b3])")
POWER = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207b]+")
VULGAR = re.compile("(\\d{0,15}) ?([\u00bc-\u00be\u2150-\u215e\u2189])")
SIGN = re.compile("[\u2212\ufe63\uff0d]|(?<![\\w.)])\u2013(?=\\d)")
EXPONENT = re.compile(r"(?<=\d)[eE]([-+]?\d{1,4})(?!\w)")
ARGUMENT = r"(\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\\[a-zA-Z]+|[^\s\\{}])"
FRACTION = re.compile(rf"\\frac\s*{ARGUMENT}\s*{ARGUMENT}")
ROOT = re.compile(r"\\sqrt\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[a-zA-Z]))")
NAMES = "sqrt|pi|theta|alpha|beta|infty|sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan"
SYMBOLS = {
    "\u00d7": r"\cdot ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u2217": "*", "\u00f7": "/",
    "\u221a": r"\sqrt ", "\u03c0": r"\pi ", "\u03b8": r"\theta ", "\u221e": r"\infty ",
    "\u2264": r"\leq ", "\u2265": r"\geq ", "\u2260": r"\neq ", "\u2248": r"\approx ", "\u00b1": r"\pm ",
    "\u222a": r"\cup ", "\u2208": r"\in ", "\u2205": r"\varnothing ", "\u211d": r"\mathbb{R}",
    "\u00b0": r"^{\circ}", "\uff05": "%", r"\emptyset": r"\varnothing ",
    r"\langle": "(", r"\rangle": ")", r"\lbrace": r"\{", r"\rbrace": r"\}",
}  # fmt: skip
REWRITES = [
    (re.compile(pattern), text)
    for pattern, text in (
        (r"(?<!\\)\\[([)\]]", " "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|boldsymbol|rm|bf)(?![a-zA-Z])", ""),
        (r"\\[dct]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}", r"\1"),
        (r"\\(?:math(?:rm|bf|it|sf)|text(?:bf|it|rm|sf|normal)|mbox|hbox|operatorname\*?)\s*\{", r"\\text{"),
        (r"\\text\s*\{\s*([-+]?\d[^{}]*)\}", r"\1"),
        (r"\\(?:times|ast)(?![a-zA-Z])", r"\\cdot "),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"(?:\\le|<=|\\leqslant)(?![a-zA-Z])", r"\\leq "),
        (r"(?:\\ge|>=|\\geqslant)(?![a-zA-Z])", r"\\geq "),
        (r"(?:\\ne|!=)(?![a-zA-Z])", r"\\neq "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:text)?color(?:box)?\s*\{[^{}]*\}\s*(?:\{([^{}]*)\})?", r"\1"),
        (r"(?i)^\s*\\text\s*\{\s*(?:(?:the|final|correct) )*answer(?: is|\s*[:=])[:\s]*\}", ""),
        (r"\b([aApP])\.\s?[mM]\b\.?", r"\1m"),
        (r"\\[ckl]?dots[a-zA-Z]?(?![a-zA-Z])", "..."),
        (r"\^\s*\{\s*\\(?:circ|degree)\s*\}|(?:\^\s*\\circ|(?:\^\s*)?\\degree)(?![a-zA-Z])", r"^{\\circ}"),
        (r"(?<!\s)\s*(?:\\text\s*\{\s*(?:percent|per cent|pct)\s*\}|\\?%|\b(?:percent(?:age)?|per cent|pct)\b)", "%"),
        (r"(?<=\d)(?:\{,\}|,\\!|\\,|\\ |\\!,|\\;|\\:|~)\s*(?=\d{3}(?!\d))", ","),
        (r"\\!", ""),
        (r"(?<=[\dA-F])_\{?10\}?(?!\d)", ""),
        (r"(\.\d*?)(\d)\2{2,}\.\.\.", r"\1\\overline{\2}"),
        (r"\{([^{}]*)\\choose\s*([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\mathbb\s*\{?\s*R\s*\}?", r"(-\\infty,\\infty)"),
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|[~\u00a0\u2009\u202f]", " "),
        (r"(?<=[\w)}])\s*\*\*\s*(?=[-\w({])", "^"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\^\s*(-?\d+|[a-zA-Z])", r"^{\1}"),
        (r"\binfinity\b|(?<!\\)\binf\b", r"\\infty "),
        (rf"(?<![\\a-zA-Z])({NAMES})(?![a-zA-Z])", r"\\\1 "),
        (r"(\\(?:sin|cos|tan|cot|sec|csc))\s*[({]?\s*(\d+)\s*\^\{\\circ\}\s*[)}]?", r"\1(\\frac{\2\\pi}{180})"),
    )
]


def plain_math(text: str) -> str:
    """Return an answer in one notation: LaTeX without delimiters, styles, thousands separators or bold type."""
    text = AREA.sub(r"\\text{ \1}\2", SIGN.sub("-", BOLD.sub(r"\2", text)))
    text = _fractions(EXPONENT.sub(r"\\cdot 10^{\1}", UNDERSCORED.sub("", text)))
    for symbol, latex in SYMBOLS.items():
        text = text.replace(symbol, latex)
    text = POWER.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0]).replace(chr(0x2212), '-')}}}", text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = _currency(text)
    text = ungrouped(text)
    for _ in range(3):  # fractions inside fractions
        text = FRACTION.sub(lambda match: f"\\frac{_braced(match[1])}{_braced(match[2])}", text)
    text = ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text)
    text = re.sub(r"\s+", " ", text).strip(" ,;:")
    text = re.sub(r"(\.\d{6,})\.{3}$|(?<!\.)\.[ ,;:]*$", r"\1", text)
    if text.startswith("{") and text.endswith("}") and "{" not in text[1:]:  # a set without backslashes
        text = f"\\{text[:-1]}\\}}" if "," in text else text[1:-1].strip()
    return text


def ungrouped(text: str) -> str:
    """Remove the thousands separators of numbers outside brackets, where a comma separates coordinates."""
    parts, depth, start = [], 0, 0
    for mark in re.finditer(r"[(\[{)\]}]|$", text):
        if depth <= 0:
            parts.append(GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text[start : mark.start()]))
        else:
            parts.append(text[start : mark.start()])
        parts.append(mark[0])
        depth += (mark[0] in "([{") - (mark[0] in ")]}") if mark[0] else 0
        start = mark.end()
    return "".join(parts)


def _currency(text: str) -> str:
    """Remove dollar signs, which delimit LaTeX in pairs and otherwise are a currency."""
    text = re.sub(r"(?:([-+])\s*)?\\\$\s*([-+]?)(?=[\d.])", r"\1\2\\currency ", text)
    if len(DOLLARS.findall(text)) % 2:
        text = re.sub(r"(?<!\\)\$(?=\s*[-+]?[\d.])", r"\\currency ", text, count=1)
    text = re.sub("[\u20ac\u00a3\u00a5\u20b9]", " ", text)
    text = re.sub(r"\\\$", r" \\currency ", DOLLARS.sub(" ", text))
    return re.sub(r"(?:([-+])\s*)?\\currency\s*([-+]?)\s*(\d[\d,]*(?:\.\d+)?|\.\d+)", r"\1\2\3\\text{ dollars}", text)


def _fractions(text: str) -> str:
    """Write the Unicode fractions as numerator and denominator, and mixed numbers as one fraction."""

    def fraction(match: re.Match[str]) -> str:
        value = Fraction(unicodedata.numeric(match[2])).limit_denominator(10)
        return f"{int(match[1] or 0) * value.denominator + value.numerator}/{value.denominator}"

    return VULGAR.sub(fraction, text)


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else f"{{{argument}}}"


RELATION = re.compile(r"\\leq?(?![a-zA-Z])|\\geq?(?![a-zA-Z])|\\neq|\\approx|\\in(?![a-zA-Z])|[=<>]")
SEPARATOR = re.compile(r",\s*(?:and|or)\b|,|;|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b")
UNION = re.compile(r"\\cup(?![a-zA-Z])")
VARIABLE = re.compile(
    r"(?:(?:m\s*)?\\angle\s*[A-Z]+|(?![a-z]{2}\b)\\?[a-zA-Z]+|\\text\s*\{[^{}]*\})(?:_\{?\w+\}?)?"
    r"(?:\([\w, ]*\)|'|\^\{-1\}\(\w\))*"
)
BRACKET = re.compile(r"\\[{}]|[()\[\]{}]|\\begin\{[a-z]*\}|\\end\{[a-z]*\}")
ENCLOSED = re.compile(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", re.DOTALL)
CLOSES = (")", "]", "}", "\\}")
FLIPPED = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq"}


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    r"""Items between brackets, or without brackets.

    Attributes:
        opening: "(", "[", "\{", or "" for a list.
        closing: ")", "]", "\}", or "".
        items: The items as LaTeX.
    """

    opening: str
    closing: str
    items: tuple[str, ...]


def outside(text: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Yield the matches of a pattern outside of brackets and environments."""
    depth = 0
    for mark in re.finditer(f"(?P<bracket>{BRACKET.pattern})|{pattern.pattern}", text):
        if mark["bracket"] is not None:
            depth += _nesting(mark)
        elif depth == 0:
            yield mark


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split a text where a separator matches outside of brackets and environments."""
    parts, start = [], 0
    for mark in outside(text, separator):
        parts.append(text[start : mark.start()].strip())
        start = mark.end()
    return [*parts, text[start:].strip()]


def group(text: str) -> AnswerGroup:
    """Return the items of a set, tuple, interval or list."""
    text = text.strip()
    if enclosed := ENCLOSED.fullmatch(text):
        opening, inner, closing = enclosed.groups()
        items = split(inner, SEPARATOR)
        is_set = opening == "\\{" and closing == "\\}"
        if _is_balanced(inner) and (len(items) > 1 or is_set) and (opening == "\\{") == (closing == "\\}"):
            return AnswerGroup(opening, closing, tuple(item for item in items if item))
    return AnswerGroup("", "", tuple(item for item in split(text, SEPARATOR) if item))


def relation(text: str) -> tuple[list[str], list[str]]:
    """Return the sides of a chain of relations, and its relation signs, up to an approximation."""
    sides = split(text, RELATION)
    signs = [{"\\le": "\\leq", "\\ge": "\\geq"}.get(sign[0], sign[0]) for sign in outside(text, RELATION)]
    if "\\approx" in signs:
        at = signs.index("\\approx")
        if at > 0 or not VARIABLE.fullmatch(sides[0]):
            sides, signs = sides[: at + 1], signs[:at]
    return sides, ["=" if sign == "\\approx" else sign for sign in signs]


def interval(text: str) -> AnswerGroup | None:
    r"""Return `x > 2` as `(2, \infty)` and `1 < x \leq 3` as `(1, 3]`; None for anything else."""
    sides, signs = relation(text)
    if len(sides) == 2 and signs[0] in ("<", ">", "\\leq", "\\geq"):
        if not VARIABLE.fullmatch(sides[0]):
            sides, signs = sides[::-1], [FLIPPED[signs[0]]]
        if not VARIABLE.fullmatch(sides[0]) or VARIABLE.fullmatch(sides[1]):
            return None
        bracket = {"<": ")", ">": "(", "\\leq": "]", "\\geq": "["}[signs[0]]
        is_below = bracket in ")]"
        items = ("-\\infty", sides[1]) if is_below else (sides[1], "\\infty")
        return AnswerGroup("(" if is_below else bracket, bracket if is_below else ")", items)
    if len(sides) == 3 and VARIABLE.fullmatch(sides[1]):
        sides, signs = ascending(sides, signs)
        if all(sign in ("<", "\\leq") for sign in signs):
            return AnswerGroup("(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]", (sides[0], sides[2]))
    return None


def ascending(sides: list[str], signs: list[str]) -> tuple[list[str], list[str]]:
    """Return a descending chain of relations in ascending order, and any other unchanged."""
    if all(sign in (">", "\\geq") for sign in signs):
        return sides[::-1], [FLIPPED[sign] for sign in signs[::-1]]
    return sides, signs


def plus_and_minus(items: tuple[str, ...]) -> tuple[str, ...]:
    r"""Return items with each `\pm` as two items."""
    single: list[str] = []
    for item in items:
        signs = ("+", "-") if "\\pm" in item else ("",)
        single += [re.sub(r"^\+\s*", "", item.replace("\\pm", sign).strip()) if sign else item for sign in signs]
    return tuple(single)


def _nesting(bracket: re.Match[str]) -> int:
    return -1 if bracket[0] in CLOSES or bracket[0].startswith("\\end") else 1


def _is_balanced(text: str) -> bool:
    depth = 0
    for bracket in BRACKET.finditer(text):
        depth += _nesting(bracket)
        if depth < 0:
            return False
    return depth == 0
