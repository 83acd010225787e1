"""An agent's request and its answer, independent of the API."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rl_core.data import Json
from rl_core.record_fields import record
from rl_rollout.engines.protocol import NewTokens
from rl_rollout.gateway.messages import ChatMessage, context_digests
from rl_rollout.gateway.replies import NOTHING_SAID, ReplyForm, ReplyStream, unsaid
from rl_rollout.gateway.sampling import Wishes
from rl_rollout.gateway.tree import Sample, digest_of

if TYPE_CHECKING:
    from rl_rollout.gateway.journal import SessionLog

MAX_CHOICES = 16


@record
class Ask:
    """A request of an agent, whichever API it came in by.

    Attributes:
        messages: The conversation.
        tools: That the model may call, as chat templates take them.
        prompt: What is to be continued, as text or tokens, in the place of a conversation.
        may_call: Calls are read; else they are text.
        must_call: JSON schema of the call that is to be made; None where the model is free.
        wishes: How it is to be drawn.
        num_choices: Answers to give.
        trains: False for what the agent asks outside of its task.
        idempotency_key: Equal in requests that are one.
        retry_count: How often the client has made the request before.
    """

    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[Mapping[str, Json], ...] = ()
    prompt: str | Sequence[int] | None = None
    may_call: bool = True
    must_call: Json = None
    wishes: Wishes = Wishes()
    num_choices: int = 1
    trains: bool = True
    idempotency_key: str | None = None
    retry_count: int = 0

    @property
    def form(self) -> ReplyForm:
        """How what the model says is to be read."""
        return "text" if self.prompt is not None else "call" if self.must_call else "chat"

    @property
    def digests(self) -> list[bytes]:
        """Of the tools, then of each beginning of the conversation; or of the prompt as a whole."""
        if self.prompt is None:
            return context_digests(self.tools, self.messages)
        if isinstance(self.prompt, str):
            return [digest_of(np.frombuffer(self.prompt.encode("utf-32-le", "surrogatepass"), dtype=np.int32))]
        return [digest_of(np.array(self.prompt, dtype=np.int32))]

    @property
    def num_chars(self) -> int:
        """Of all that is to be encoded, about."""
        texts = [
            text for one in self.messages for text in (one.content, one.reasoning, *(c.arguments for c in one.calls))
        ]
        return sum(map(len, (*texts, self.prompt or ""))) + len(msgspec.json.encode(self.tools))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request is answered with.

    Attributes:
        samples: One a choice.
        num_prompt_tokens: That the engine was given.
        overridden: What of the request is not honoured, by field.
        name: Of the request, unlike all others.
        log: Keeps that it was delivered.
    """

    name: str
    samples: Sequence[Sample]
    num_prompt_tokens: int
    overridden: Mapping[str, str]
    log: "SessionLog | None" = None

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled."""
        return sum(len(sample.generation.token_ids) for sample in self.samples)

    def deliver(self) -> None:
        """Say that the client got it."""
        for sample in self.samples:
            sample.is_delivered = True
        if self.log is not None:
            self.log.delivered(self.samples)


class Live:
    """An answer under way.

    Attributes:
        answer: What it will be.
        news: Set when there is more to take, and when there is the answer.
        name: Of the request.
        num_prompt_tokens: That the engine was given.
        overridden: See `Answer`.
    """

    answer: "asyncio.Future[Answer]"

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.news = asyncio.Event()
        self.name, self.num_prompt_tokens = "", 0
        self.overridden: Mapping[str, str] = {}
        self._streams: list[ReplyStream] = []
        self._pieces: list[tuple[int, str, str]] = []

    async def changes(self, *, within_s: float | None = None) -> bool:
        """Wait for news or for the answer; False where neither came in time."""
        if not self.answer.done():
            limit = None if within_s is None else asyncio.get_running_loop().call_later(within_s, self.news.set)
            try:
                await self.news.wait()  # neither a task nor a timeout for each token
            finally:
                if limit is not None:
                    limit.cancel()
        return bool(self._pieces) or self.answer.done()

    def begin(self, name: str, num_prompt_tokens: int, overridden: Mapping[str, str]) -> None:
        """The request is placed, and nothing refuses it."""
        self.name, self.num_prompt_tokens, self.overridden = name, num_prompt_tokens, overridden
        self.news.set()

    def read_along(self, streams: Sequence[ReplyStream]) -> None:
        """Take what the engine gives, one stream a choice."""
        self._streams = list(streams)

    def feed(self, new: NewTokens) -> None:
        """Take tokens of one choice."""
        pieces = self._streams[new.sample_index].feed(new.token_ids.tolist(), has_ended=new.ended is not None)
        self._pieces += ((new.sample_index, *piece) for piece in pieces)
        if self._pieces:
            self.news.set()

    def take(self) -> list[tuple[int, str, str]]:
        """What is new: choice, "reasoning" or "content", and text."""
        pieces, self._pieces = self._pieces, []
        runs = groupby(pieces, key=lambda piece: piece[:2])
        return [(index, kind, "".join(piece[2] for piece in run)) for (index, kind), run in runs]

    def take_rest(self, answer: Answer) -> list[tuple[int, str, str]]:
        """All that has not been taken of the messages."""
        for index, sample in enumerate(answer.samples):
            said = self._streams[index].said if self._streams else NOTHING_SAID
            self._pieces += ((index, *piece) for piece in unsaid(sample.message, said))
        return self.take()
