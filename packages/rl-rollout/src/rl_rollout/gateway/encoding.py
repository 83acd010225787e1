"""Encodes conversations as tokens: first the entire opening, then only what follows a sampled turn."""

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from rl_core.data import IntArray, Json
from rl_core.errors import DataError, SettingsError
from rl_rollout.gateway.messages import ChatMessage, template_messages
from rl_rollout.gateway.refusals import RefusedError
from rl_rollout.loops.turns import ChatTurns, Role
from rl_rollout.prompts.tokenizer import PromptTokenizer

MAX_TOOLSETS = 64
"""Number of tool sets whose checked templates are kept; agents rarely change their tools."""


class ConversationEncoder:
    """Encodes messages with the tokenizer's chat template; `ChatTurns` first checks the template with each tool set."""

    def __init__(self, tokenizer: PromptTokenizer, *, end_token_ids: Sequence[int] = ()) -> None:
        """Set the tokenizer, without checking its template yet.

        Args:
            tokenizer: A tokenizer with a chat template.
            end_token_ids: Tokens that can end a turn, in addition to the tokenizer's own end token.
        """
        self._tokenizer = tokenizer
        self._end_token_ids = tuple(end_token_ids)
        self._known: OrderedDict[tuple[bytes, Role], ChatTurns] = OrderedDict()
        self._lock = threading.Lock()

    def try_template(self) -> None:
        """Check the template without tools.

        Raises:
            SettingsError: The template does not support several turns; the message has the reason.
        """
        self._turns(b"", (), role="user")

    def opening_ids(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Json]], toolset: bytes
    ) -> IntArray:
        """Return the [P] int32 tokens of a conversation, including the generation prompt.

        Args:
            messages: All messages.
            tools: Tools in the format of chat templates.
            toolset: Digest of the tools.

        Raises:
            RefusedError: The template refuses a message or does not support tools.
        """
        has_calls = any(message.calls for message in messages)
        turns = self._turns_for(toolset, tools, role="tool" if tools and has_calls else "user")
        return _encoded(messages, 0, lambda some: turns.opening_ids(_as_template(some, turns)))

    def following_ids(
        self,
        messages: Sequence[ChatMessage],
        *,
        after: int,
        last_token: int,
        tools: Sequence[Mapping[str, Json]],
        toolset: bytes,
    ) -> IntArray:
        """Return the [N] int32 tokens between a sampled turn and the next one.

        Args:
            messages: The conversation.
            after: Number of messages up to and including the sampled turn.
            last_token: Last sampled token of the turn.
            tools: Tools in the format of chat templates.
            toolset: Digest of the tools.

        Raises:
            RefusedError: The template refuses a message or does not support tools.
        """
        turn = messages[after - 1]
        turns = self._turns_for(toolset, tools, role="tool" if turn.calls else "user")

        def follow(some: Sequence[ChatMessage]) -> IntArray:
            written = _as_template(some, turns, after=turn)
            return turns.following_ids(written, calls=[call.name for call in turn.calls], last_token=last_token)

        return _encoded(messages[after:], after, follow)

    def _turns_for(self, toolset: bytes, tools: Sequence[Mapping[str, Json]], *, role: Role) -> ChatTurns:
        try:
            return self._turns(toolset, tools, role=role)
        except SettingsError as error:
            raise RefusedError(str(error), param="messages") from error

    def _turns(self, toolset: bytes, tools: Sequence[Mapping[str, Json]], *, role: Role) -> ChatTurns:
        key = (toolset, role)
        with self._lock:  # long texts are encoded in threads
            if key not in self._known:
                self._known[key] = self._checked(tools, role=role)
                if len(self._known) > MAX_TOOLSETS:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return self._known[key]

    def _checked(self, tools: Sequence[Mapping[str, Json]], *, role: Role) -> ChatTurns:
        try:
            return ChatTurns(self._tokenizer, role=role, tools=tools, end_token_ids=self._end_token_ids)
        except SettingsError as error:
            raise SettingsError(
                f"the gateway cannot serve this tokenizer's chat template: {error} In the gateway, set stop_tokens "
                "(`rl-rollout serve --stop-token`) or another template (`--chat-template`)."
            ) from error


def _as_template(
    messages: Sequence[ChatMessage], turns: ChatTurns, *, after: ChatMessage | None = None
) -> list[dict[str, Json]]:
    control_tokens, are_text = turns.control_tokens, turns.arguments_are_text
    return template_messages(messages, control_tokens=control_tokens, arguments_are_text=are_text, after=after)


def _encoded(
    messages: Sequence[ChatMessage], num_before: int, encode: Callable[[Sequence[ChatMessage]], IntArray]
) -> IntArray:
    """Encode messages.

    Raises:
        RefusedError: The template refuses the messages; the error names the first refused one.
    """

    def is_refused(count: int) -> bool:
        try:
            encode(messages[:count])
        except DataError:
            return True
        return False

    try:
        return encode(messages)
    except DataError as error:
        first = bisect_left(range(1, len(messages)), True, key=is_refused)
        where = f"message {num_before + first + 1} of the conversation, of role {messages[first].role}"
        raise RefusedError(f"{where}: {error}", param="messages") from error
