"""Separates a response's thinking from its answer."""

THINKING, THOUGHT = "<think>", "</think>"


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
