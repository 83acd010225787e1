"""Splits a mathematical answer into what it lists, relates or encloses."""

import re
from dataclasses import dataclass

RELATION = re.compile(r"\\leq?(?![a-zA-Z])|\\geq?(?![a-zA-Z])|\\neq|\\approx|\\in(?![a-zA-Z])|[=<>]")
SEPARATOR = re.compile(r",\s*(?:and|or)\b|,|;|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b")
UNION = re.compile(r"\\cup(?![a-zA-Z])")
VARIABLE = re.compile(
    r"(?:(?:m\s*)?\\angle\s*[A-Z]+|(?![a-z]{2}\b)\\?[a-zA-Z]+|\\text\s*\{[^{}]*\})(?:_\{?\w+\}?)?"
    r"(?:\([\w, ]*\)|'|\^\{-1\}\(\w\))*"
)
BRACKET = re.compile(r"\\[{}]|[()\[\]{}]|\\begin\{[a-z]*\}|\\end\{[a-z]*\}")
CLOSES = (")", "]", "}", "\\}")
FLIPPED = {"<": ">", "\\leq": "\\geq"}


@dataclass(frozen=True, slots=True)
class Group:
    r"""Items between brackets, or without brackets.

    Attributes:
        opening: "(", "[", "\{", or "" for a list.
        closing: ")", "]", "\}", or "".
        items: The items as LaTeX.
    """

    opening: str
    closing: str
    items: tuple[str, ...]


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split a text where a separator matches outside of brackets and environments."""
    parts, depth, start, position = [], 0, 0, 0
    marks = re.compile(f"(?P<bracket>{BRACKET.pattern})|(?P<separator>{separator.pattern})")
    while match := marks.search(text, position):
        position = match.end()
        if match["bracket"] is not None:
            is_closing = match["bracket"] in CLOSES or match["bracket"].startswith("\\end")
            depth += -1 if is_closing else 1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in (*parts, text[start:])]


def group(text: str) -> Group:
    """Return the items of a set, tuple, interval or list."""
    text = text.strip()
    for opening in ("\\{", "(", "["):
        for closing in ("\\}", ")", "]"):
            if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening + closing):
                inner = text[len(opening) : len(text) - len(closing)]
                items = split(inner, SEPARATOR)
                is_set = opening == "\\{" and closing == "\\}"
                if _is_balanced(inner) and (len(items) > 1 or is_set) and (opening == "\\{") == (closing == "\\}"):
                    return Group(opening, closing, tuple(item for item in items if item))
    return Group("", "", tuple(item for item in split(text, SEPARATOR) if item))


def relation(text: str) -> tuple[list[str], list[str]]:
    """Return the sides of a chain of relations, and its relation signs, up to an approximation."""
    sides = split(text, RELATION)
    signs = _signs(text)
    if "\\approx" in signs:
        at = signs.index("\\approx")
        if at > 0 or not VARIABLE.fullmatch(sides[0]):
            sides, signs = sides[: at + 1], signs[:at]
    return sides, ["=" if sign == "\\approx" else sign for sign in signs]


def interval(text: str) -> Group | None:
    r"""Return `x > 2` as `(2, \infty)` and `1 < x \leq 3` as `(1, 3]`; None for anything else."""
    sides, signs = relation(text)
    if len(sides) == 2 and signs[0] in ("<", ">", "\\leq", "\\geq"):
        if not VARIABLE.fullmatch(sides[0]):
            sides, signs = sides[::-1], [_flipped(signs[0])]
        if not VARIABLE.fullmatch(sides[0]) or VARIABLE.fullmatch(sides[1]):
            return None
        bracket = {"<": ")", ">": "(", "\\leq": "]", "\\geq": "["}[signs[0]]
        is_below = bracket in ")]"
        items = ("-\\infty", sides[1]) if is_below else (sides[1], "\\infty")
        return Group("(" if is_below else bracket, bracket if is_below else ")", items)
    if len(sides) == 3 and VARIABLE.fullmatch(sides[1]):
        if all(sign in (">", "\\geq") for sign in signs):
            sides, signs = sides[::-1], [_flipped(sign) for sign in signs[::-1]]
        if all(sign in ("<", "\\leq") for sign in signs):
            return Group("(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]", (sides[0], sides[2]))
    return None


def plus_and_minus(items: tuple[str, ...]) -> tuple[str, ...]:
    r"""Return items with each `\pm` as two items."""
    found: list[str] = []
    for item in items:
        signs = ("+", "-") if "\\pm" in item else ("",)
        found += [re.sub(r"^\+\s*", "", item.replace("\\pm", sign).strip()) if sign else item for sign in signs]
    return tuple(found)


def _signs(text: str) -> list[str]:
    found, depth = [], 0
    for match in re.finditer(f"(?P<bracket>{BRACKET.pattern})|(?P<sign>{RELATION.pattern})", text):
        if match["bracket"] is not None:
            depth += -1 if match["bracket"] in CLOSES or match["bracket"].startswith("\\end") else 1
        elif depth == 0:
            found.append({"\\le": "\\leq", "\\ge": "\\geq"}.get(match["sign"], match["sign"]))
    return found


def _flipped(sign: str) -> str:
    flips = FLIPPED | {after: before for before, after in FLIPPED.items()}
    return flips[sign]


def _is_balanced(text: str) -> bool:
    depth = 0
    for bracket in BRACKET.finditer(text):
        depth += -1 if bracket[0] in CLOSES or bracket[0].startswith("\\end") else 1
        if depth < 0:
            return False
    return depth == 0
