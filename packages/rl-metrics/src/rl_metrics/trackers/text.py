"""Text of models, made safe to show: it may hold anything."""

from rl_core.terminal_text import escaped

GAP = " ... "


def plain_text(text: str, *, limit: int) -> str:
    r"""The text on one line: what cannot be seen is escaped (`\n`, `\x1b`, `\u202e`), and the middle of long ones cut.

    Args:
        text: Anything.
        limit: Most characters of the result; at least as many as the gap in the middle.
    """
    if len(text) > limit:  # before it is escaped: a response may be long
        text = text[:limit] + text[-limit:]
    return _cut(escaped(text), limit)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    room = limit - len(GAP)
    return text[: room - room // 2] + GAP + text[len(text) - room // 2 :]
