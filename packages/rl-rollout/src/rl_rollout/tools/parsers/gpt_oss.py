"""Parser of gpt-oss and its harmony format: calls are messages on the commentary channel to `functions.NAME`."""

import re
from collections.abc import Iterator, Mapping

from rl_core.data import Json
from rl_rollout.tools.parsers.protocol import ParsedTurn, read_arguments
from rl_rollout.tools.protocol import ToolCall

CONTROL = re.compile(r"(<\|(?:start|message|end|call|return)\|>)")
HARMONY = re.compile(r"<\|(?:channel|message|call)\|>|^\s*to=functions\.")
RECIPIENT = re.compile(r"\bto=([^\s<]*)")
FORM = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>"
CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]+)")


class GptOssParser:
    """Reads each message that has a recipient or ends as a call; messages on the final channel are the answer.

    A message without a channel also belongs to the answer. A turn without any message is the answer as a whole.
    """

    stop_tokens = ("<|call|>",)

    def parse(self, text: str, *, parameters: Mapping[str, Mapping[str, Json]]) -> ParsedTurn:  # noqa: ARG002
        """Find the calls, the answer and the reasoning of a turn. See `ToolParser.parse`."""
        calls: list[ToolCall] = []
        answers: list[str] = []
        thoughts: list[str] = []
        if not HARMONY.search(text):
            return ParsedTurn()
        for header, body, end in _messages(text):
            recipient = RECIPIENT.search(header)
            channel = CHANNEL.search(header)
            if recipient is not None or end == "<|call|>":
                calls.append(_read(recipient[1].removeprefix("functions.") if recipient else "", body, end=end))
            elif channel is None or channel[1] == "final":
                answers.append(body or "")
            elif channel[1] == "analysis":
                thoughts.append(body or "")
        return ParsedTurn(calls=tuple(calls), answer="".join(answers), reasoning="".join(thoughts))


def _messages(text: str) -> Iterator[tuple[str, str | None, str]]:
    """Yield header, body and end token of each message; the body is None if <|message|> is missing."""
    header, body = "", None
    for piece in [*CONTROL.split(text), ""]:
        if piece == "<|message|>":
            body = ""
        elif CONTROL.fullmatch(piece):
            yield header, body, piece
            header, body = "", None
        elif body is None:
            header += piece
        else:
            body += piece
    yield header, body, ""


def _read(name: str, body: str | None, *, end: str) -> ToolCall:
    if not name:
        return ToolCall(name="", fault=f"a call has no recipient. Write calls as {FORM}.")
    if body is None:
        return ToolCall(name=name, fault=f"the call of {name} has no <|message|> with its arguments.")
    if end != "<|call|>":
        return ToolCall(name=name, fault=f"the call of {name} does not end with <|call|>.")
    return read_arguments(body, name=name)
