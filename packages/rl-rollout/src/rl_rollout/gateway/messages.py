"""Messages independent of the API, and their digests for comparison."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

from rl_core.data import Json
from rl_rollout.loops.turns import harmless, numbered_call

MessageRole = Literal["system", "user", "assistant", "tool"]
DIGEST_BYTES = 16
EXACT_FLOAT = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)  # cheaper than a record: each turn repeats all messages
class Call:
    """A tool call in an assistant's message.

    Attributes:
        name: Name of the tool.
        arguments: JSON text, as the client or the model wrote it.
        call_id: Id by which the tool's message refers to the call.
    """

    name: str
    arguments: str
    call_id: str = ""


class MessageImage(NamedTuple):
    """An image in a message.

    Attributes:
        at: Number of characters of the message's content before it.
        digest: Its digest in the store.
    """

    at: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: Author of the message; "developer" is read as "system".
        content: Text; text parts are joined.
        images: Images in the content of a user or a tool, in order.
        reasoning: An assistant's reasoning before the content.
        calls: Tool calls of an assistant.
        call_id: Id of the call that a tool's message answers.
    """

    role: MessageRole
    content: str = ""
    images: tuple[MessageImage, ...] = ()
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""

    @property
    def digest(self) -> bytes:
        """Digest that is equal for equivalent messages.

        It leaves out reasoning, which most message types cannot contain, and call ids, which some frameworks renumber.
        Arguments are compared as JSON values, and an assistant's text without leading and trailing white space.
        """
        content = self.content.strip() if self.role == "assistant" else self.content
        calls = [(call.name, canonical_json(call.arguments)) for call in self.calls]
        return _digest(json.dumps([self.role, content, calls, *self.images]))


def context_digests(tools: Sequence[Mapping[str, Json]], messages: Iterable[ChatMessage]) -> list[bytes]:
    """Return a digest of each prefix of a conversation: the tools alone, then one more message each."""
    digests = [_digest(json.dumps(list(tools)))]
    for message in messages:
        digests.append(next_digest(digests[-1], message))
    return digests


def next_digest(digest: bytes, message: ChatMessage) -> bytes:
    """Return the digest of a conversation with one more message."""
    return blake2b(digest + message.digest, digest_size=DIGEST_BYTES).digest()


def exact_digests(
    digests: Sequence[bytes], messages: Sequence[ChatMessage], is_sampled: Callable[[bytes, bytes], bool]
) -> list[bytes]:
    """Return digests of prefixes that also differ in what contexts show of messages that the model did not write.

    These are outer white space, reasoning and the writing of arguments in a foreign assistant's message, and which call
    a tool's message answers. In most conversations there is none of it, and the digests are those given.

    Args:
        digests: The result of `context_digests`.
        messages: The conversation.
        is_sampled: Whether a message is a sample, by the digest after it and the exact digest before it.
    """
    exact, shown = [digests[0]], b""
    calls: Sequence[Call] = ()
    num_answered = 0
    for digest, message in zip(digests[1:], messages, strict=True):
        seen: tuple[object, ...] = ()
        if message.role == "assistant":
            calls, num_answered = message.calls, 0
            if not is_sampled(digest, exact[-1]):
                text = message.content
                outer = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
                seen = (*outer, message.reasoning, *(call.arguments for call in calls))
        elif message.role == "tool":
            index = answered_call(message, calls, num_answered)
            seen = (f"call {index}",) if index != num_answered else ()
            num_answered += 1
        if any(seen):
            shown = blake2b(shown + digest + _digest(json.dumps(seen)), digest_size=DIGEST_BYTES).digest()
        exact.append(blake2b(digest + shown, digest_size=DIGEST_BYTES).digest() if shown else digest)
    return exact


def answered_call(message: ChatMessage, calls: Sequence[Call], num_answered: int) -> int:
    """Return the index of the call that a tool's message answers: the one with its id, else the next one."""
    named = (index for index, call in enumerate(calls) if call.call_id == message.call_id != "")
    return next(named, num_answered)


def canonical_json(text: str) -> str:
    """Return the canonical text of a JSON value; text that is not JSON is only stripped."""
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
    """Return messages in the format of chat templates. Control tokens in a client's text are broken up.

    The calls of each assistant's message are numbered; the tools' messages refer to these numbers.

    Args:
        messages: The messages, in order.
        control_tokens: Pattern of the control tokens to break up.
        arguments_are_text: True if the template expects call arguments as JSON text, not as objects.
        after: The preceding message, whose calls the messages may answer.
    """
    rendered: list[dict[str, Json]] = []
    calls = after.calls if after else ()
    num_answered = 0
    for message in messages:
        one: dict[str, Json] = {"role": message.role, "content": _content(message, control_tokens)}
        if message.role == "assistant":
            calls, num_answered = message.calls, 0
            if message.reasoning:
                one["reasoning_content"] = harmless(message.reasoning, control_tokens)
        if message.calls:
            one["tool_calls"] = [
                {
                    "id": numbered_call(index),
                    "type": "function",
                    "function": {
                        "name": harmless(call.name, control_tokens),
                        "arguments": _arguments(harmless(call.arguments, control_tokens), are_text=arguments_are_text),
                    },
                }
                for index, call in enumerate(message.calls)
            ]
        if message.role == "tool":
            index = answered_call(message, calls, num_answered)
            num_answered += 1
            one["tool_call_id"] = numbered_call(index)
            one["name"] = harmless(calls[index].name, control_tokens) if index < len(calls) else ""
        rendered.append(one)
    return rendered


def _content(message: ChatMessage, control_tokens: re.Pattern[str]) -> Json:
    """Return text, or parts if there are images."""
    if not message.images:
        return harmless(message.content, control_tokens)
    parts: list[Json] = []
    start = 0
    for at, digest in (*message.images, (len(message.content), "")):
        if at > start:
            parts.append({"type": "text", "text": harmless(message.content[start:at], control_tokens)})
        if digest:
            parts.append({"type": "image", "digest": digest})
        start = at
    return parts


def _arguments(text: str, *, are_text: bool) -> Json:
    if are_text:
        return text
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def _canonical(value: Json) -> Json:
    """Convert integral floats to ints, since JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT_FLOAT:
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    return [_canonical(inner) for inner in value] if isinstance(value, list) else value


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()
