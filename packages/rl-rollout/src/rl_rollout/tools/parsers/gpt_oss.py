"""Calls as messages on the commentary channel, to `functions.NAME`: gpt-oss and its harmony format."""

import re
from collections.abc import Iterator, Mapping

from rl_core.records import Json
from rl_rollout.tools.parsers.protocol import ParsedTurn, read_arguments
from rl_rollout.tools.protocol import ToolCall

CONTROL = re.compile(r"(<\|(?:start|message|end|call|return)\|>)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]+)")


class GptOssParser:
    """Each message that has a recipient is a call; the message on the final channel is the answer."""

    stop_tokens = ("<|call|>",)

    def parse(self, text: str, *, parameters: Mapping[str, Mapping[str, Json]]) -> ParsedTurn:  # noqa: ARG002
        """See `ToolParser.parse`."""
        calls: list[ToolCall] = []
        answers: list[str] = []
        for header, body, end in _messages(text):
            recipient = RECIPIENT.search(header)
            channel = CHANNEL.search(header)
            if recipient is not None:
                calls.append(_read(recipient[1].removeprefix("functions."), body, end=end))
            elif channel is not None and channel[1] == "final":
                answers.append(body or "")
        return ParsedTurn(calls=tuple(calls), answer="".join(answers))


def _messages(text: str) -> Iterator[tuple[str, str | None, str]]:
    """Header, body and end token of each message; the body is None where <|message|> is missing."""
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
    if body is None:
        return ToolCall(name=name, fault=f"the call of {name} has no <|message|> with its arguments.")
    if end != "<|call|>":
        return ToolCall(name=name, fault=f"the call of {name} does not end with <|call|>.")
    return read_arguments(body, name=name)
