"""Messages independent of the API, and their digests for comparison."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from rl_core.data import Json

MessageRole = Literal["system", "user", "assistant", "tool"]
DIGEST_BYTES = 16
EXACT_FLOAT = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)  # no record: each turn brings all messages again
class Call:
    """A tool call in an assistant's message.

    Attributes:
        name: Of the tool.
        arguments: JSON text, as the client or the model wrote it.
        call_id: What the tool's message names it by.
    """

    name: str
    arguments: str
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: Who speaks; a developer is the system.
        content: Text; text parts are joined.
        reasoning: What an assistant thought before it spoke.
        calls: Of an assistant.
        call_id: Of the call that a tool's message answers.
    """

    role: MessageRole
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""

    @property
    def digest(self) -> bytes:
        """Equal for messages that say the same.

        Reasoning is left out, since most message types cannot carry it; so are the ids of calls, which some frameworks
        number again. Arguments count as JSON values, and an assistant's text without its outer white space.
        """
        content = self.content.strip() if self.role == "assistant" else self.content
        calls = [(call.name, canonical_json(call.arguments)) for call in self.calls]
        return _digest(json.dumps([self.role, content, calls]))


def context_digests(tools: Sequence[Mapping[str, Json]], messages: Iterable[ChatMessage]) -> list[bytes]:
    """A digest of each beginning of a conversation: of the tools alone, then with one more message each."""
    digests = [_digest(json.dumps(list(tools), sort_keys=True))]
    for message in messages:
        digests.append(blake2b(digests[-1] + message.digest, digest_size=DIGEST_BYTES).digest())
    return digests


def canonical_json(text: str) -> str:
    """One text for all ways to write a JSON value; what is no JSON stays as it is."""
    try:
        return json.dumps(_canonical(json.loads(text or "{}")), sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()


def template_messages(
    messages: Sequence[ChatMessage],
    *,
    control_tokens: re.Pattern[str],
    arguments_are_text: bool,
    after: ChatMessage | None = None,
) -> list[dict[str, Json]]:
    """Messages as chat templates take them; no text of a client becomes a control token.

    The calls of each assistant's message are numbered, and the tools' messages name the numbers.

    Args:
        messages: In order.
        control_tokens: Finds what is broken up.
        arguments_are_text: How the template reads the arguments of calls.
        after: The message before them, whose calls they may answer.
    """

    def harmless(text: str) -> str:
        return control_tokens.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    rendered: list[dict[str, Json]] = []
    calls = after.calls if after else ()
    num_answered = 0
    for message in messages:
        one: dict[str, Json] = {"role": message.role, "content": harmless(message.content)}
        if message.role == "assistant":
            calls, num_answered = message.calls, 0
            if message.reasoning:
                one["reasoning_content"] = harmless(message.reasoning)
        if message.calls:
            one["tool_calls"] = [
                {
                    "id": numbered_call(index),
                    "type": "function",
                    "function": {
                        "name": harmless(call.name),
                        "arguments": _arguments(harmless(call.arguments), are_text=arguments_are_text),
                    },
                }
                for index, call in enumerate(message.calls)
            ]
        if message.role == "tool":
            named = (index for index, call in enumerate(calls) if call.call_id == message.call_id != "")
            index = next(named, num_answered)
            num_answered += 1
            one["tool_call_id"] = numbered_call(index)
            one["name"] = harmless(calls[index].name) if index < len(calls) else ""
        rendered.append(one)
    return rendered


def numbered_call(index: int) -> str:
    """Nine letters and digits: what Mistral's templates ask for."""
    return f"call{index:05d}"


def _arguments(text: str, *, are_text: bool) -> Json:
    if are_text:
        return text
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def _canonical(value: Json) -> Json:
    """Whole floats as ints: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT_FLOAT:
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    return [_canonical(inner) for inner in value] if isinstance(value, list) else value


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()
