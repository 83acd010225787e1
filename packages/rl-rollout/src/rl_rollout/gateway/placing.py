"""Encodes requests and finds their place in the tree of their session."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from rl_core.data import IntArray
from rl_core.errors import DataError
from rl_rollout.gateway.agent_requests import AgentRequest
from rl_rollout.gateway.encoding import ConversationEncoder
from rl_rollout.gateway.messages import context_digests
from rl_rollout.gateway.refusals import RefusedError
from rl_rollout.gateway.sessions import Session
from rl_rollout.gateway.tree import Sample, TreePosition, Turn
from rl_rollout.prompts.tokenizer import PromptTokenizer

LONG_CHARS = 1 << 15
"""Texts from this length are encoded in a thread, since encoding them in the event loop would block all sessions."""
NUM_THREADS = 2
ResultT = TypeVar("ResultT")


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
        if ask.prompt is None:
            place, new_ids = await self._place(session, ask, digests)
        else:
            input_ids = np.array(ask.prompt, dtype=np.int32)
            place, num_said = session.tree.place_tokens(input_ids)
            new_ids = input_ids[num_said:]
        asked_by = ask.messages[-1].role if ask.messages else "user"
        turn = place.turn or Turn(after=place.after, new_ids=new_ids, asked_by=asked_by)
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
        return len(await self._encoded(session, ask.num_chars, opening))

    async def _place(
        self, session: Session, ask: AgentRequest, digests: Sequence[bytes]
    ) -> tuple[TreePosition, IntArray]:
        """Return the place of a conversation and its new tokens, which are encoded again if the place changed."""
        encoded: tuple[Sample | None, IntArray] | None = None
        while True:
            place = session.tree.place(digests, ask.messages)
            if place.turn is not None:
                return place, place.turn.new_ids
            if encoded is not None and encoded[0] is place.after:
                return place, encoded[1]
            new = replace(ask, messages=ask.messages[place.num_matched :])
            new_ids = await self._encoded(session, new.num_chars, partial(self._new_ids, place, ask, digests[0]))
            encoded = place.after, new_ids

    def _new_ids(self, place: TreePosition, ask: AgentRequest, toolset: bytes) -> IntArray:
        if place.after is None:
            return self._encoder.opening_ids(ask.messages, tools=ask.tools, toolset=toolset)
        return self._encoder.following_ids(
            ask.messages,
            after=place.num_matched,
            last_token=int(place.after.generation.token_ids[-1]),
            tools=ask.tools,
            toolset=toolset,
        )

    async def _prompt_ids(self, session: Session, prompt: str) -> list[int]:
        encode = partial(self._tokenizer.encode, [prompt], add_special_tokens=True)
        try:
            (ids,) = await self._encoded(session, len(prompt), encode)
        except DataError as error:
            raise RefusedError(str(error), param="prompt") from error
        return ids

    async def _encoded(self, session: Session, num_chars: int, encode: Callable[[], ResultT]) -> ResultT:
        if num_chars < LONG_CHARS:
            return encode()
        async with session.encoding:  # so that one session never occupies all threads
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
