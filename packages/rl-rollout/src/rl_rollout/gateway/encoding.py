"""Conversations as tokens: an opening is encoded whole, and later only what follows a turn that was sampled."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from rl_core.data import IntArray, Json
from rl_core.errors import SettingsError
from rl_rollout.gateway.messages import ChatMessage, template_messages
from rl_rollout.loops.turns import ChatTurns, Role
from rl_rollout.prompts.tokenizer import PromptTokenizer

MAX_TOOLSETS = 64
"""Sets of tools whose templates are kept; agents change theirs seldom."""


class ConversationEncoder:
    """Writes messages by the tokenizer's chat template, which `ChatTurns` tries first with each set of tools."""

    def __init__(self, tokenizer: PromptTokenizer, *, end_token_ids: Sequence[int] = ()) -> None:
        """Try nothing yet.

        Args:
            tokenizer: With a chat template.
            end_token_ids: What can end a turn, beside the tokenizer's own end token.
        """
        self._tokenizer = tokenizer
        self._end_token_ids = tuple(end_token_ids)
        self._known: OrderedDict[tuple[bytes, Role], ChatTurns] = OrderedDict()

    def try_template(self) -> None:
        """Try the template without tools.

        Raises:
            SettingsError: It cannot be used for several turns; the message says what it does.
        """
        self._turns(b"", (), role="user")

    def opening_ids(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Json]], toolset: bytes
    ) -> IntArray:
        """[P] int32 tokens of a conversation from its beginning to where the model is to answer.

        Args:
            messages: All of them.
            tools: As chat templates take them.
            toolset: A digest of the tools.

        Raises:
            DataError: The template refuses the messages.
            SettingsError: It cannot show tools.
        """
        has_calls = any(message.calls for message in messages)
        turns = self._turns(toolset, tools, role="tool" if tools and has_calls else "user")
        return turns.opening_ids(self._as_template(messages, turns))

    def following_ids(
        self,
        messages: Sequence[ChatMessage],
        *,
        after: ChatMessage,
        last_token: int,
        tools: Sequence[Mapping[str, Json]],
        toolset: bytes,
    ) -> IntArray:
        """[N] int32 tokens between a turn that was sampled and the next one.

        Args:
            messages: What follows the turn.
            after: The turn, as the client knows it.
            last_token: The last token that was sampled for it.
            tools: As chat templates take them.
            toolset: A digest of the tools.

        Raises:
            DataError: The template refuses the messages.
            SettingsError: It cannot show tools.
        """
        turns = self._turns(toolset, tools, role="tool" if after.calls else "user")
        written = self._as_template(messages, turns, after=after)
        return turns.following_ids(written, calls=[call.name for call in after.calls], last_token=last_token)

    def _as_template(
        self, messages: Sequence[ChatMessage], turns: ChatTurns, *, after: ChatMessage | None = None
    ) -> list[dict[str, Json]]:
        return template_messages(
            messages,
            control_tokens=turns.control_tokens,
            arguments_are_text=turns.arguments_are_text,
            after=after,
        )

    def _turns(self, toolset: bytes, tools: Sequence[Mapping[str, Json]], *, role: Role) -> ChatTurns:
        key = (toolset, role)
        if key not in self._known:
            try:
                self._known[key] = ChatTurns(self._tokenizer, role=role, tools=tools, end_token_ids=self._end_token_ids)
            except SettingsError as error:
                raise SettingsError(f"the gateway cannot serve this tokenizer's chat template: {error}") from error
            if len(self._known) > MAX_TOOLSETS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]
