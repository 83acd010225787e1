"""Separates a response's thinking from its answer."""

import re
from collections.abc import Iterable

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
