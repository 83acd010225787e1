"""Text of models, made safe for display."""

from rl_core.terminal_text import escaped

GAP = " ... "


def plain_text(text: str, *, limit: int) -> str:
    r"""Return the text as one line, with invisible characters escaped (`\n`, `\x1b`, `\u202e`) and a long middle cut.

    Args:
        text: Any text.
        limit: Maximum length of the result; at least the length of the gap that replaces the middle.
    """
    if len(text) > limit:  # before escaping, because a response may be long
        text = text[:limit] + text[-limit:]
    return _cut(escaped(text), limit)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    room = limit - len(GAP)
    return text[: room - room // 2] + GAP + text[len(text) - room // 2 :]
