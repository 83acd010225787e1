"""Decides whether two mathematical answers are equal. Runs in a worker process, because SymPy may take forever."""

import logging
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

from rl_rollout.rewards.answers import final_answer
from rl_rollout.rewards.check_processes import main
from rl_rollout.rewards.math_notation import (
    UNION,
    VARIABLE,
    AnswerGroup,
    ascending,
    group,
    interval,
    plain_math,
    plus_and_minus,
    relation,
    split,
)  # fmt: skip
from rl_rollout.rewards.quantities import Quantity, is_rounded, quantity, same_units, same_values

ARITHMETIC = re.compile(r"(?:[\d\s.,+*/(){}-]|\\frac|\\cdot)*")
IN_BASE = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{?(?:\\text\s*\{)?\s*([a-z]+|\d+)\s*\}{0,2}")
WORDS = re.compile(r"(?:\\text\s*\{\s*)?\(?([a-zA-Z](?:[a-zA-Z' -]*[a-zA-Z])?)\)?\s*\}?")
ARTICLE = re.compile(r"^(?:an?|the) (?=[a-z]{2})", re.IGNORECASE)
BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
COMPLEX = re.compile(r"(?<![\\a-zA-Z])i(?![a-zA-Z])")
OPTION = re.compile(r"(?:\\text\s*\{\s*)?\(?[A-J]\)?\s*\}?")
LABELLED = re.compile(r"(?:\\text\s*\{\s*)?\(([A-J])\)(?:\s+\}?|\s*\}\s*)(\S.*)")
SPACE = re.compile(r" (?!\w)|(?<!\w) ")
NAMES = re.compile(r"\(\s*[a-zA-Z](?:_\w)?(?:\s*,\s*[a-zA-Z](?:_\w)?)+\s*\)")
LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])")
DIGITS = 60
MAX_DIGITS = 400
POINTS = (
    ("0.7390851", "1.3123"),
    ("1.8312973", "0.5772157"),
    ("0.2718281", "2.2360679"),
    ("-1.2020569", "0.9159655"),
)


def load_library() -> tuple[Any, Any, Any]:
    """Return the function that parses LaTeX, SymPy, and the comparison of math-verify."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import latex2sympy
    from math_verify import verify

    return latex2sympy, sympy, verify


def is_equal(gold: str, answer: str) -> bool:
    """Return True if two answers are equal: exactly for numbers, as equations for equations."""
    first, second = plain_math(gold), plain_math(answer)
    if not first or not second:
        return False
    if _same_text(first, second) or ((letters := _letters(first)) and letters == _letters(second)):
        return True
    if labelled := LABELLED.fullmatch(second):  # an option with its letter stands for either
        second = labelled[1] if OPTION.fullmatch(first) else labelled[2]
    return _same_answers(first, second)


def _letters(text: str) -> str:
    """Return the letters of some options, such as `ACD` or `A, C and D`; empty for anything else."""
    letters = re.sub(r"\\text|\band\b|\(([A-J])\)|[\s,{}]", r"\1", text)
    is_sorted = all(one < other for one, other in pairwise(letters))
    return letters if is_sorted and re.fullmatch("[A-J]{2,}", letters) else ""


def _same_text(first: str, second: str) -> bool:
    if SPACE.sub("", first) == SPACE.sub("", second):
        return True
    words, others = WORDS.fullmatch(first), WORDS.fullmatch(second)
    if words is None or others is None:
        return False
    one, other = (ARTICLE.sub("", found[1].strip()) for found in (words, others))
    return one == other or (len(one) > 1 and one.casefold() == other.casefold())


def _same_answers(gold: str, answer: str) -> bool:
    """Compare unions of intervals, then lists, then single answers."""
    gold, answer = _without_names(gold), _without_names(_in_order_of(gold, answer))
    golds, answers = _union(gold), _union(answer)
    if golds is not None and answers is not None:
        return _match(golds, answers, _same_sets)
    first, second = group(gold), group(answer)
    if first.opening or second.opening or len(first.items) > 1 or len(second.items) > 1 or "\\pm" in gold + answer:
        return _same_groups(first, second)
    return _same_single(gold, answer)


def _union(text: str) -> list[AnswerGroup] | None:
    """Return the intervals and sets that a text joins; None unless it has at least one interval."""
    parts = split(text, UNION)
    if len(parts) == 1:
        parts = split(text, re.compile(r"\\text\s*\{\s*or\s*\}|\bor\b|,"))
    found = [interval(part) or group(part) for part in parts]
    is_union = all(one.opening and (one.opening == "\\{" or len(one.items) == 2) for one in found)
    return found if is_union and any(one.opening != "\\{" for one in found) else None


def _without_names(text: str) -> str:
    r"""Return what follows `x \in` or `(x, y) =`."""
    sides, signs = relation(text)
    is_named = (signs == ["\\in"] and VARIABLE.fullmatch(sides[0])) or (signs == ["="] and NAMES.fullmatch(sides[0]))
    return sides[1] if is_named else text


def _in_order_of(gold: str, answer: str) -> str:
    """Return `(y, x) = (2, 1)` as `(x, y) = (1, 2)` for a ground truth in that order."""
    (names, *_), (others, *values) = ([group(side).items for side in relation(text)[0]] for text in (gold, answer))
    if set(names) != set(others) or len(values) != 1 or len(values[0]) != len(others) or not NAMES.match(answer):
        return answer
    by_name = dict(zip(others, values[0], strict=True))
    return f"({', '.join(names)}) = ({', '.join(by_name[name] for name in names)})"


def _same_sets(first: AnswerGroup, second: AnswerGroup) -> bool:
    if (first.opening, first.closing) != (second.opening, second.closing) or len(first.items) != len(second.items):
        return False
    if first.opening == "\\{":
        return _match(plus_and_minus(first.items), plus_and_minus(second.items), _same_single)
    return all(_same_single(one, other) for one, other in zip(first.items, second.items, strict=True))


def _same_groups(first: AnswerGroup, second: AnswerGroup) -> bool:
    """Compare tuples in their order, sets and lists in any. A list may stand for a set, or for a tuple in its order."""
    if first.opening and second.opening:
        if first.opening != "\\{" and "\\pm" not in "".join((*first.items, *second.items)):
            return _same_sets(first, second)
        if (first.opening, first.closing) != (second.opening, second.closing):
            return False
    labels = [_label(item) for item in first.items], [_label(item) for item in second.items]
    is_ordered = "(" in (first.opening, second.opening) or "[" in (first.opening, second.opening)
    is_ordered |= any(len({label for label in side if label}) > 1 for side in labels) and not all(map(all, labels))
    golds, answers = plus_and_minus(_values(first.items)), plus_and_minus(_values(second.items))
    if is_ordered:
        return len(golds) == len(answers) and all(map(_same_answers, golds, answers))
    return _match(golds, answers, _same_answers)


def _values(items: tuple[str, ...]) -> tuple[str, ...]:
    r"""Return items without the name that all share, as in `x = 1, 2` or `x = 1 \text{ or } x = 2`."""
    names = {name for item in items if (name := _label(item))}
    if len(names) != 1:
        return items
    return tuple(item.partition("=")[2].strip() if _label(item) else item for item in items)


def _label(item: str) -> str:
    sides, signs = relation(item)
    return sides[0] if signs[:1] == ["="] and VARIABLE.fullmatch(sides[0]) else ""


def _match(golds: Sequence[Any], answers: Sequence[Any], same: Any) -> bool:
    """Return True if each gold has an answer of its own, in any order. Repeated items count once."""
    left = list(answers)
    for gold in golds:
        at = next((index for index, answer in enumerate(left) if same(gold, answer)), None)
        if at is None:
            return False
        del left[at]
    return not left


def _same_single(gold: str, answer: str) -> bool:
    (golds, gold_signs), (answers, answer_signs) = _assigned(gold), _assigned(answer)
    if not gold_signs and not answer_signs:
        return _same_expressions(gold, answer)
    if gold_signs and answer_signs:
        return _same_relations(golds, gold_signs, answers, answer_signs)
    if gold_signs:  # a value may stand for `x = value`, not for an equation
        is_value = VARIABLE.fullmatch(golds[0]) or not re.search("[a-zA-Z]", "".join(golds))
        return set(gold_signs) == {"="} and bool(is_value) and _same_answers(golds[-1], answer)
    is_zero = answers[-1].strip() == "0" and not VARIABLE.fullmatch(answers[0])
    return set(answer_signs) == {"="} and not is_zero and _same_answers(gold, answers[-1])


def _assigned(text: str) -> tuple[list[str], list[str]]:
    """Return the relation of a text, `7 = x` as `x = 7`."""
    sides, signs = relation(text)
    if signs == ["="] and VARIABLE.fullmatch(sides[1]) and not re.search("[a-zA-Z]", sides[0]):
        sides = sides[::-1]
    return sides, signs


def _same_relations(golds: list[str], gold_signs: list[str], answers: list[str], answer_signs: list[str]) -> bool:
    if set(gold_signs) == set(answer_signs) == {"="}:
        if golds[0].replace(" ", "") == answers[0].replace(" ", "") and VARIABLE.fullmatch(golds[0]):
            return _same_answers(golds[-1], answers[-1])
        return _same_sides((golds[0], golds[-1]), (answers[0], answers[-1]), is_equation=True)
    golds, gold_signs = ascending(golds, gold_signs)
    answers, answer_signs = ascending(answers, answer_signs)
    if gold_signs != answer_signs:
        return False
    is_equation = gold_signs == ["\\neq"]
    pairs = zip(pairwise(golds), pairwise(answers), strict=True)
    return all(_same_sides(gold, answer, is_equation=is_equation) for gold, answer in pairs)


def _same_sides(gold: tuple[str, str], answer: tuple[str, str], *, is_equation: bool) -> bool:
    """Return True if the difference of the sides is the same up to a factor, which is positive for an inequality."""
    sides = [_read(side) for side in (*gold, *answer)]
    if any(side is None for side in sides):
        return False
    try:
        first, second = sides[0] - sides[1], sides[2] - sides[3]
    except TypeError:  # a matrix and a number
        return False
    ratios = [left / right for _, left, right in _at_points(first, second) if right != 0]
    if not ratios or ratios[0] == 0 or not all(_is_close(ratios[0], ratio) for ratio in ratios):
        return False
    return is_equation or bool(ratios[0].is_positive)


def _same_expressions(gold: str, answer: str) -> bool:
    first, second = quantity(gold), quantity(answer)
    if not same_units(first, second):
        return False
    if (has_same_value := same_values(first, second)) is not None:
        return has_same_value
    if first.is_percent and second.is_percent is False and second.value is None:
        return False
    if _same_text(first.number, second.number):
        return True
    if (base := IN_BASE.fullmatch(first.number)) and (other := IN_BASE.fullmatch(second.number)):
        return (base[1].lower(), BASES.get(base[2], base[2])) == (other[1].lower(), BASES.get(other[2], other[2]))
    if any(IN_BASE.fullmatch(one.number) or _is_malformed(one) or _is_verbal(one) for one in (first, second)):
        return False
    return not _differs_in_case(first.number, second.number) and _same_by_library(first, second)


def _differs_in_case(first: str, second: str) -> bool:
    """Return True if a variable of one text is another of the second, which the library's symbols do not show."""
    letters, others = set(LETTER.findall(first)), set(LETTER.findall(second))
    return any(letter.swapcase() in others and letter not in others for letter in letters)


def _is_malformed(one: Quantity) -> bool:
    """Return True for digits and operators without a value, and for repeated factorials."""
    return one.value is None and (ARITHMETIC.fullmatch(one.number) is not None or "!!" in one.number)


def _is_verbal(one: Quantity) -> bool:
    """Return True for words, words of capitals, ratios, times and sequences, which are compared as text."""
    return re.search(r"^[A-Z]{2,}$|\\text|:|\.\.\.|(?<![\\a-zA-Z])[a-zA-Z]{2,}[ -][a-zA-Z]{2,}", one.number) is not None


def _same_by_library(gold: Quantity, answer: Quantity) -> bool:
    first, second = _read(gold.number), _read(answer.number)
    if first is None or second is None:
        return False
    if hasattr(first, "shape") or hasattr(second, "shape"):
        return _same_matrices(first, second)
    for text, other in ((gold.number, second), (answer.number, first)):
        if not other.free_symbols and re.fullmatch(r"-?\d*\.\d+", text):
            value = other.evalf(DIGITS)
            return value.is_Float and is_rounded(text, Decimal(str(value)))
    return _same_numerically(first, second)


def _same_matrices(first: Any, second: Any) -> bool:
    if getattr(first, "shape", None) != getattr(second, "shape", None):
        return False
    return all(_same_numerically(one, other) for one, other in zip(first, second, strict=True))


def _same_numerically(first: Any, second: Any) -> bool:
    """Compare values at some points; expressions without values are compared by math-verify."""
    _, _, verify = load_library()
    if first == second:
        return True
    values = _at_points(first, second)
    if not values:
        return bool(verify([first], [second], timeout_seconds=None))
    real = [(point, left, right) for point, left, right in values if left.is_real and right.is_real] or values
    return all(_is_close(left, right) and _is_zero((first - second).subs(point)) for point, left, right in real)


def _is_zero(expression: Any) -> bool:
    """Return True if no digit of a value is found; SymPy computes with more digits where they cancel."""
    parts = expression.doit().evalf(15, maxn=MAX_DIGITS).as_real_imag()
    return all(part == 0 or not part.is_Float or part._prec == 1 for part in parts)


def _at_points(first: Any, second: Any) -> list[tuple[dict[Any, Any], Any, Any]]:
    """Return some values of the symbols, and the values of two expressions there, if both have one."""
    _, sympy, _ = load_library()
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    found = []
    for base, step in POINTS if symbols else POINTS[:1]:
        point = {symbol: sympy.Rational(base) + index * sympy.Rational(step) for index, symbol in enumerate(symbols)}
        values = _evaluated(first.subs(point)), _evaluated(second.subs(point))
        if None not in values:
            found.append((point, *values))
    return found


def _evaluated(expression: Any) -> Any:
    try:
        value = expression.doit().evalf(DIGITS)
    except (ValueError, TypeError, AttributeError):
        return None
    return value if value.is_number and value.is_finite else None


def _is_close(first: Any, second: Any) -> bool:
    """Return True if two values agree, up to digits that may cancel."""
    scale = max(abs(first), abs(second))
    return bool(abs(first - second) <= scale * 10 ** (15 - DIGITS)) or bool(scale < 10 ** (5 - DIGITS))


def _read(text: str) -> Any:
    """Return the library's expression of a text, with exact decimals; None if it cannot read the text."""
    latex2sympy, sympy, _ = load_library()
    number = quantity(text)
    if number.value is not None:
        return sympy.Rational(number.value.numerator, number.value.denominator)
    if _is_malformed(number):
        return None
    try:
        found = latex2sympy(
            number.number, is_real=not COMPLEX.search(number.number), convert_degrees=False, normalization_config=None
        )
    except Exception:  # its grammar raises its own kinds
        return None
    if not isinstance(found, sympy.Basic | sympy.MatrixBase):
        return None
    if isinstance(found, sympy.MatrixBase):
        return found
    found = found.subs({symbol: sympy.I for symbol in found.free_symbols if symbol.name == "i"})
    return found.replace(lambda part: part.is_Float, lambda part: sympy.Rational(str(part)))


MAX_CHARACTERS = 5000
"""Maximum length of an answer. A longer one is wrong."""


def prepare(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Read the ground truth, and return a function that compares the answer with it.

    Raises:
        ValueError: The ground truth is empty, or its braces are not balanced.
    """
    gold = final_answer(request["gold"])
    gold = request["gold"] if gold is None else gold
    unescaped = re.sub(r"\\[{}]", "", gold)
    if not re.search(r"\w|\\", gold) or unescaped.count("{") != unescaped.count("}"):
        raise ValueError(f"math-verify finds no expression in the ground truth {gold!r}. Repair the row.")

    def judge() -> dict[str, Any]:
        answer: str | None = request["answer"] if "answer" in request else final_answer(request["response"])
        is_right = answer is not None and len(answer) <= MAX_CHARACTERS and is_equal(gold, answer)
        return {"is_equal": is_right, "answer": answer}

    return judge


if __name__ == "__main__":
    is_equal("x + 1", "1 + x")  # loads the library and its grammar before the first deadline
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    main(prepare, {"is_equal": False})
