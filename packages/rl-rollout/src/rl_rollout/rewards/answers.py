"""Finds the final answer in a response, after its thinking."""

import re
from collections.abc import Iterable

from rl_rollout.rewards.math_notation import BOLD, NAMES, plain_math

THINKING, THOUGHT = "<think>", "</think>"
ANSWER = re.compile(rf"[^\S\n]*+(?:\n|\w*+(?:\n|\s*+{THINKING}))")
"""Start of an answer after a template's last special token: the line of its role, or its thinking."""


def final_text(text: str, *, begins_thinking: bool = False) -> str:
    """Return a response after its thinking; empty if the thinking does not end.

    Args:
        text: The response.
        begins_thinking: The prompt has opened the thinking, so the response begins inside it.
    """
    _, closing, after = text.rpartition(THOUGHT)
    if not closing and begins_thinking:
        return ""
    return after.partition(THINKING)[0]


def opens_thinking(prompt: str, special_tokens: Iterable[str] = ()) -> bool:
    """Return True if a prompt ends with `<think>`, or with the beginning of an answer that is still in its thinking.

    Args:
        prompt: The prompt, with special tokens, or its end.
        special_tokens: The tokenizer's special tokens. An answer begins after the last one, not after the first.
    """
    control = "|".join(re.escape(token) for token in special_tokens if token not in (THINKING, THOUGHT))
    *before, begun = re.split(control or "(?!)", prompt)
    if not any(before) or not ANSWER.match(begun):  # it may be a user's text
        begun = begun.rstrip()[-len(THINKING) :]
    return begun.rfind(THINKING) > begun.rfind(THOUGHT)


BRACE = re.compile(r"\\\\|\\[{}]|(?P<box>\\(?:boxed|fbox)\s*\{)|[{}]")
BETWEEN_BOXES = re.compile(r"[\s$.]*(?:,|;|and|or|,\s*and|,\s*or|\\text\s*\{\s*(?:and|or)\s*\})[\s$]*|[ $]*")
PERCENT = re.compile(r"[\s$]{0,8}(?:\\?%|percent\b|pct\b)")
ANCHOR = re.compile(
    r"(?i)\banswers?\b[*_\s)]*(?:(?:is|are|was|(?:would|should) be|equals?)\b|[:=]|[-\u2013\u2014]\s)[*_:=\s]*|####\s*"
)
BARE_BOX = re.compile(r"\\boxed\s*(-?\d[\d,]*(?:\.\d+)?|[A-Z])(?=\s*(?:[$.,;*\n]|\\[\])]|\Z))")
BOLD_OPTION = re.compile(r"\*\*\(?([A-J])\)?\*\*[.\s]*\Z")
FENCE = re.compile(r"^[ \t]*(?:```|~~~)\w*[ \t]*$", re.MULTILINE)
ALIGNED = re.compile(r"\\begin\{(align|equation|gather)(ed|\*|)\}(.*?)\\end\{\1\2\}", re.DOTALL)
# Chinese, Japanese and Korean are written without spaces around numbers.
CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
LEAD = re.compile(
    r"\s*(?:(?:[*\u2022]|[A-Za-z][.)]|\d{1,2}[.)]|[A-Z]:|\([a-z]\)(?=\s+[\d\\$]))\s+)?"
    r"(?:(?:[a-z]\s*)?(?:[=-]>|[\u2192\u21d2]|\\(?:to|(?:long)?[rR]ightarrow|implies)(?![a-zA-Z]))|[\u2234\u2248=])?\s*"
)
SENTENCE = re.compile(r"[.!?](?=\s+[A-Z]|\s*\Z)|\n|\Z")
SEGMENT = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<!\\)\$((?:\\\$|[^$\n])+?)(?<!\\)\$(?!\d)"
    r"|\\\((.{1,3000}?)\\\)|\\\[(.{1,3000}?)\\\]",
    re.DOTALL,
)
JOINED = re.compile(r"\s*(?:,?\s*(?:and|or)(?:\s+(?:maybe|perhaps|possibly))?|,)\s*")
MAX_TAIL = 20_000
MAX_PROSE = 2_000

GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:_\d+)*|\.\d+"
ANY_LETTER = r"[^\W\d_\u00b2\u00b3\u00b9\u00bc-\u00be\u0370-\u03ff\u2070-\u218f]"  # of any script but the Greek
LETTER = rf"(?<!{ANY_LETTER})(?<![a-z]['\u2019])[A-Za-z](?!{ANY_LETTER}|')(?:_\{{?\w+\}}?)?"
ATOM = (
    rf"(?:{NUMBER}|\\(?!text|and|or|begin|end)[a-zA-Z]+(?:\[\d+\])?(?:{GROUP})*|(?:{NAMES})\b|{LETTER}|[\u03c0\u221e]"
    r"|[\u00bc-\u00be\u2150-\u215e]|\((?:[^()A-Za-z]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))*+\)|\[[-\d., ]+[\])])"
)
AFTER = rf"(?:!(?![\w=])|\s?\\?%|\u00b0|[\u2070-\u207b\u00b2\u00b3\u00b9]+|[\^_](?:{GROUP}|-?\w+))"
SIGNS = r"[-+\u2212\u2013\u00b1\u221a$]"
TERM = rf"(?:{SIGNS}?\s?{ATOM}{AFTER}*+(?:(?:{ATOM}|\u221a{ATOM}){AFTER}*+)*+)"
OPERATOR = (
    r"(?:\s*(?:\*\*|<=|>=|(?<=\d):(?=\d)|[-+*/^=<>\u2212\u00b7\u00d7\u00f7\u00b1\u2264\u2265\u2260]"
    r"|\\(?:cdot|times|div|pm|leq?|geq?)(?![a-zA-Z]))\s*|\s(?=\d+\s?/\s?\d|\d{3}(?!\d))|\s?(?=[\u00bc-\u00be\u2150-\u215e]))"
)
EXPRESSION = re.compile(rf"(?<![\w.\\]){TERM}(?:{OPERATOR}{TERM})*+")
NOT = r"(?:,\s*)?(?:\b(?:not|pas|nicht|\u043d\u0435)|n't|\u4e0d\u662f)\s+"
NEGATED = re.compile(rf"{NOT}(?:{SEGMENT.pattern}|{EXPRESSION.pattern})(?:,?\s*but\b)?", re.DOTALL)
LIST = re.compile(r"\s*,?\s*\b(?:and|or)\s+(?:(?:maybe|perhaps|possibly)\s+)?|,\s+")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}`, with inner braces balanced."""
    boxes = _boxes(text)
    return None if not boxes else text[boxes[-1][1] : boxes[-1][2]]


def final_answer(text: str) -> str | None:
    r"""Return the answer that a text ends with; None if it has none.

    That is the content of its last `\boxed{}`, or of boxes that only "and", "or" or a comma separate. Without a box it
    is what follows the last "answer is", "Answer:" or "####". Otherwise it is the whole text if that is one expression,
    or else the last expression, with those that "and", "or" or a comma join to it. A question at the end is no answer.
    """
    if (boxed := boxed_answer(text)) is not None:
        return boxed
    text = FENCE.sub("", CJK.sub(r" \g<0> ", text[-MAX_TAIL:]))
    text = ALIGNED.sub(lambda match: match[3].replace("&", "").replace(r"\\", "\n"), text)
    option = BOLD_OPTION.search(text)
    text = NEGATED.sub(" ", BOLD.sub(r"\2", text))
    anchor = None
    for found in ANCHOR.finditer(text):
        anchor = found if text[found.end() :].strip() else anchor
    if anchor is not None:
        return _after_anchor(text[anchor.end() :])
    if (asked := text.rstrip()).endswith("?"):
        text = asked[: max(asked.rfind(mark) for mark in (". ", "! ", "? ", "\n")) + 1]
    return option[1] if option is not None else _bare(text) or _last_expression(text)


def is_expression(text: str) -> bool:
    """Return True if a text is mathematics, perhaps with a unit, and no sentence."""
    text = text.strip()
    if not text or len(text) > 1000 or "\n\n" in text:
        return False
    plain = re.sub(r"\\(?:begin|end)\{[a-z]*\}|\\text\s*\{[^{}]*\}|\\[a-zA-Z]+|\b(?:and|or)\b", " ", plain_math(text))
    plain = re.sub(r"(?<=[\d)}%])\s*[a-zA-Z][a-zA-Z. ]*(?:\^\{\d\})?(?:/[a-z]+)?$", "", plain)
    words = re.findall(rf"(?<![\w\\])(?![A-Z]{{2,4}}\b|[a-z]{{2,3}}[-+*/^=]){ANY_LETTER}{{2,}}(?![\w(])", plain)
    words = words or CJK.findall(plain)
    return not words and re.search(r"\w|\\", plain_math(text)) is not None


def _bare(text: str) -> str | None:
    """Return a text that is mathematics without list mark or arrow, else None."""
    bare = LEAD.sub("", text, count=1).strip() if len(text) <= 1000 else ""
    return re.sub(r"(?<![\d.])(\d+)\.{2,}$", r"\1", bare) if is_expression(bare) else None


def _after_anchor(rest: str) -> str | None:
    rest = rest[:MAX_PROSE].lstrip()
    sentence = rest[: SENTENCE.search(rest).start()] if rest else ""  # type: ignore[union-attr]
    if sentence.count("$") % 2 or sentence.count("\\[") > sentence.count("\\]"):
        sentence = rest
    if sentence.count("$") <= 2 and (bare := _bare(sentence)):
        return bare
    segments, expressions = _segments(sentence), _expressions(sentence)
    firsts = [found[0] for found in (segments, expressions) if found]
    if firsts:
        return min(firsts, key=lambda found: (found[0], -found[1]))[2]
    words = sentence.strip(" \t.*_`\"'")
    return words if words and len(words.split()) <= 5 else None


def _last_expression(text: str) -> str | None:
    found = _segments(text)[-1:] + _expressions(text[-MAX_PROSE:], offset=max(len(text) - MAX_PROSE, 0))[-1:]
    return max(found, key=lambda one: (one[1], -one[0]))[2] if found else None


def _segments(text: str) -> list[tuple[int, int, str]]:
    """Return the parts between LaTeX delimiters, those joined by "and", "or" or a comma as one."""
    parts: list[tuple[int, int, str]] = []
    for match in SEGMENT.finditer(text):
        content = next(group for group in match.groups() if group is not None).strip()
        start, end = match.span()
        if percent := PERCENT.match(text, end):
            content, end = content + "%", percent.end()
        if parts and JOINED.fullmatch(text, parts[-1][1], start):
            first_start, _, before = parts.pop()
            start, content = first_start, f"{before}, {content}"
        parts.append((start, end, content))
    return parts


def _expressions(text: str, *, offset: int = 0) -> list[tuple[int, int, str]]:
    """Return the expressions in prose, those joined by "and", "or" or a comma as one."""
    parts: list[tuple[int, int, str]] = []
    is_joined = False
    for match in EXPRESSION.finditer(text):
        content, (start, end) = match.group().strip(), match.span()
        has_sense = re.search(r"\d|\\|[\u03c0\u221e\u00bc-\u00be]|[a-zA-Z]\s*[-+*/^=<>]\s*[a-zA-Z]", content)
        if not has_sense:
            continue
        is_joined = bool(parts) and LIST.fullmatch(text, parts[-1][1] - offset, start) is not None
        if is_joined:
            first_start, _, before = parts.pop()
            parts.append((first_start, end + offset, f"{before}, {content}"))
        else:
            parts.append((start + offset, end + offset, content))
    return parts


def boxed_answer(text: str) -> str | None:
    """Return the content of the last box, with those that "and", "or" or a comma join to it; None without a box."""
    text = BARE_BOX.sub(r"\\boxed{\1}", text)
    boxes = _boxes(text)
    if not boxes:
        return None
    _, start, end = boxes[-1]
    answer, first = text[start:end], boxes[-1][0]
    if PERCENT.match(text, end + 1):
        answer += "%"
    for opened, start, end in reversed(boxes[:-1]):
        if end >= first or not BETWEEN_BOXES.fullmatch(text, end + 1, first):
            break
        answer, first = f"{text[start:end]}, {answer}", opened
    return answer


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Return where each complete box opens, and where its content starts and ends, in the order of the starts."""
    opened: list[tuple[int, int, bool]] = []
    found = []
    for brace in BRACE.finditer(text):
        if brace["box"] or brace.group() == "{":
            opened.append((brace.start(), brace.end(), brace["box"] is not None))
        elif brace.group() == "}" and opened:
            box_at, start, is_box = opened.pop()
            if is_box:
                found.append((box_at, start, brace.start()))
    return sorted(found)
