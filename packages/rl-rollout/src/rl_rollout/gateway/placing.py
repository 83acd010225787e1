"""Encodes requests and finds their place in the tree of their session."""

import asyncio
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from rl_core.data import ImageSpan, IntArray, Json
from rl_core.errors import DataError, SettingsError
from rl_rollout.gateway.agent_requests import AgentRequest
from rl_rollout.gateway.images import image_places, keep_images
from rl_rollout.gateway.messages import ChatMessage, context_digests, template_messages
from rl_rollout.gateway.refusals import RefusedError
from rl_rollout.gateway.sessions import Session
from rl_rollout.gateway.tree import Sample, TreePosition, Turn
from rl_rollout.loops.turns import ChatTurns, Role
from rl_rollout.prompts.tokenizer import PromptTokenizer

LONG_CHARS = 1 << 15
"""Texts from this length are encoded in a thread, since encoding them in the event loop would block all sessions."""
NUM_THREADS = 2
MAX_TOOLSETS = 64
"""Number of tool sets whose checked templates are kept; agents rarely change their tools."""
ResultT = TypeVar("ResultT")
NewTokens = tuple[IntArray, tuple[ImageSpan, ...]]
"""[N] int32 tokens, and the images among them."""


class ConversationEncoder:
    """Encodes messages: first the entire opening, then only what follows a sampled turn.

    `ChatTurns` first checks the tokenizer's chat template with each tool set.
    """

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
        return _encode_or_refuse(messages, 0, lambda some: turns.opening_ids(_as_template(some, turns)))

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

        return _encode_or_refuse(messages[after:], after, follow)

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


def _encode_or_refuse(
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


@dataclass(slots=True, kw_only=True)
class PlacedRequest:
    """An encoded request and its place in the session's tree."""

    session: Session
    ask: AgentRequest
    digests: Sequence[bytes]
    place: TreePosition
    turn: Turn
    input_ids: IntArray
    number: int = 0  # of the turn, known once the request is admitted
    is_own: bool = True  # sampled from the session's own distribution
    started_at: float = field(default_factory=time.perf_counter)


class Placer:
    """Encodes what is new in requests; long texts of a session one after another, in a thread."""

    def __init__(self, encoder: ConversationEncoder, tokenizer: PromptTokenizer) -> None:
        """Set the encoder of conversations, and the tokenizer of prompts without messages."""
        self._encoder, self._tokenizer = encoder, tokenizer
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="gateway-encoding")

    async def keep_images(self, session: Session, body: dict[str, Json], *, max_images: int) -> None:
        """Keep the images of a request; see `rl_rollout.gateway.images`. Those of a policy of text are refused later.

        Raises:
            RefusedError: There are too many, or one cannot be used.
        """
        images = self._tokenizer.images
        if images is not None and max_images and (places := image_places(body)):
            keep = partial(keep_images, places, session, images, max_images=max_images)
            await self._encoded(session, keep, is_long=True)

    async def placed(self, session: Session, ask: AgentRequest) -> PlacedRequest:
        """Encode a request and find its place, which is valid until the caller awaits something else.

        Raises:
            RefusedError: The tokenizer or the chat template refuses the request.
        """
        started_at = time.perf_counter()
        if isinstance(ask.prompt, str):
            ask = replace(ask, prompt=await self._prompt_ids(session, ask.prompt))
        digests = ask.digests
        messages = session.tree.with_dropped_text(digests[0], ask.messages)
        if messages is not ask.messages:
            ask = replace(ask, messages=tuple(messages))
            digests = ask.digests
        images: tuple[ImageSpan, ...] = ()
        if ask.prompt is None:
            place, (new_ids, images) = await self._place(session, ask, digests)
        else:
            input_ids = np.array(ask.prompt, dtype=np.int32)
            place, num_said = session.tree.place_tokens(input_ids)
            new_ids = input_ids[num_said:]
        asked_by = ask.messages[-1].role if ask.messages else "user"
        turn = place.turn or Turn(
            after=place.after, new_ids=new_ids, new_images=images, asked_by=asked_by, key=place.key
        )
        return PlacedRequest(
            session=session,
            ask=ask,
            digests=digests,
            place=place,
            turn=turn,
            input_ids=turn.input_ids,
            started_at=started_at,
        )

    async def num_tokens(self, session: Session, ask: AgentRequest) -> int:
        """Return the number of tokens of a conversation, without placing it.

        Raises:
            RefusedError: The chat template refuses the conversation.
        """
        toolset = context_digests(ask.tools, ())[0]
        opening = partial(self._encoder.opening_ids, ask.messages, tools=ask.tools, toolset=toolset)
        return len(await self._encoded(session, opening, is_long=_is_long(ask)))

    async def _place(
        self, session: Session, ask: AgentRequest, digests: Sequence[bytes]
    ) -> tuple[TreePosition, NewTokens]:
        """Return the place of a conversation and its new tokens, which are encoded again if the place changed."""
        encoded: tuple[Sample | None, NewTokens] | None = None
        while True:
            place = session.tree.place(digests, ask.messages)
            if place.turn is not None:
                return place, (place.turn.new_ids, place.turn.new_images)
            if encoded is not None and encoded[0] is place.after:
                return place, encoded[1]
            new = replace(ask, messages=ask.messages[place.num_matched :])
            encode = partial(self._new_tokens, place, ask, digests[0])
            encoded = place.after, await self._encoded(session, encode, is_long=_is_long(new))

    def _new_tokens(self, place: TreePosition, ask: AgentRequest, toolset: bytes) -> NewTokens:
        if place.after is None:
            ids = self._encoder.opening_ids(ask.messages, tools=ask.tools, toolset=toolset)
        else:
            ids = self._encoder.following_ids(
                ask.messages,
                after=place.num_matched,
                last_token=int(place.after.generation.token_ids[-1]),
                tools=ask.tools,
                toolset=toolset,
            )
        digests = [image.digest for message in ask.messages[place.num_matched :] for image in message.images]
        images = self._tokenizer.images
        return ids, images.spans(ids, digests) if digests and images is not None else ()

    async def _prompt_ids(self, session: Session, prompt: str) -> list[int]:
        encode = partial(self._tokenizer.encode, [prompt], add_special_tokens=True)
        try:
            (ids,) = await self._encoded(session, encode, is_long=len(prompt) >= LONG_CHARS)
        except DataError as error:
            raise RefusedError(str(error), param="prompt") from error
        return ids

    async def _encoded(self, session: Session, encode: Callable[[], ResultT], *, is_long: bool) -> ResultT:
        if not is_long:
            return encode()
        async with session.encoding:  # so that one session never occupies all threads
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode)


def _is_long(ask: AgentRequest) -> bool:
    """True if encoding would block other sessions: images are read from files."""
    return ask.num_chars >= LONG_CHARS or ask.has_images
