"""An agent's request and its answer, in a form independent of the API."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
import numpy as np

from rl_core.data import Json
from rl_core.record_fields import record
from rl_rollout.engines.protocol import NewTokens
from rl_rollout.gateway.messages import ChatMessage, context_digests
from rl_rollout.gateway.replies import NOTHING_SAID, ReplyForm, ReplyStream, unsaid
from rl_rollout.gateway.sampling import RequestedSampling
from rl_rollout.gateway.tree import Sample, digest_of


@record
class AgentRequest:
    """A request of an agent, from any API.

    Attributes:
        messages: The conversation.
        tools: Tools that the model may call, in the format of chat templates.
        prompt: Text or token ids to continue, instead of a conversation.
        may_call: Parse tool calls; otherwise they remain text.
        must_call: JSON schema of a forced call; None leaves the choice to the model.
        sampling: The sampling parameters that the client asks for.
        num_choices: Number of answers.
        trains: False for requests outside the agent's task.
        idempotency_key: Identical in all retries of one request.
        retry_count: Number of earlier tries of the request, as reported by the client.
    """

    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[Mapping[str, Json], ...] = ()
    prompt: str | Sequence[int] | None = None
    may_call: bool = True
    must_call: Json = None
    sampling: RequestedSampling = RequestedSampling()
    num_choices: int = 1
    trains: bool = True
    idempotency_key: str | None = None
    retry_count: int = 0

    @property
    def form(self) -> ReplyForm:
        """How the model's response is parsed."""
        return "text" if self.prompt is not None else "call" if self.must_call else "chat"

    @property
    def digests(self) -> list[bytes]:
        """Digests of the tools and of each prefix of the conversation, or a single digest of the prompt."""
        if self.prompt is None:
            return context_digests(self.tools, self.messages)
        if isinstance(self.prompt, str):
            return [digest_of(np.frombuffer(self.prompt.encode("utf-32-le", "surrogatepass"), dtype=np.int32))]
        return [digest_of(np.array(self.prompt, dtype=np.int32))]

    @property
    def num_chars(self) -> int:
        """Approximate number of characters to encode."""
        return sum(map(len, self._texts)) + len(msgspec.json.encode(self.tools))

    @property
    def has_images(self) -> bool:
        """True if a message has images."""
        return any(message.images for message in self.messages)

    @property
    def num_double_spaces(self) -> int:
        """Number of pairs of spaces in the texts."""
        return sum(text.count("  ") for text in self._texts)

    @property
    def _texts(self) -> list[str]:
        texts = [
            text for one in self.messages for text in (one.content, one.reasoning, *(c.arguments for c in one.calls))
        ]
        return [*texts, self.prompt] if isinstance(self.prompt, str) else texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a request.

    Attributes:
        samples: One sample per choice.
        num_prompt_tokens: Number of tokens in the engine's input.
        overridden: Fields of the request that were not honoured, each with its change, such as "0.2->1.0".
        name: Unique name of the request.
        texts_of: Returns the text of each token of a sample.
        on_delivered: Called with the samples when the client has received the answer.
    """

    name: str
    samples: Sequence[Sample]
    texts_of: Callable[[Sample], list[str]]
    num_prompt_tokens: int
    overridden: Mapping[str, str]
    on_delivered: Callable[[Sequence[Sample]], None] | None = None

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens in all choices."""
        return sum(len(sample.generation.token_ids) for sample in self.samples)

    def deliver(self) -> None:
        """Record that the client received the answer."""
        for sample in self.samples:
            sample.is_delivered = True
        if self.on_delivered is not None:
            self.on_delivered(self.samples)


class StreamedAnswer:
    """An answer in progress.

    Attributes:
        answer: Task that returns the complete answer.
        news: Set when new text is available, and when the answer is complete.
        name: Unique name of the request.
        num_prompt_tokens: Number of tokens in the engine's input.
        overridden: Fields that were not honoured, as in `Answer`.
        streams: Decode the engine's tokens, one per choice.
    """

    answer: "asyncio.Future[Answer]"

    def __init__(self) -> None:
        """Start without text."""
        self.news = asyncio.Event()
        self.name, self.num_prompt_tokens = "", 0
        self.overridden: Mapping[str, str] = {}
        self.streams: Sequence[ReplyStream] = ()
        self._pieces: list[tuple[int, str, str]] = []

    async def changes(self, *, within_s: float | None = None) -> bool:
        """Wait for new text or for the answer; return False if neither arrives within `within_s` seconds."""
        if not self.answer.done():
            limit = None if within_s is None else asyncio.get_running_loop().call_later(within_s, self.news.set)
            try:
                await self.news.wait()  # avoids creating a task or timeout per token
            finally:
                if limit is not None:
                    limit.cancel()
        return bool(self._pieces) or self.answer.done()

    def begin(self, name: str, num_prompt_tokens: int, overridden: Mapping[str, str]) -> None:
        """Set the attributes of an accepted request."""
        self.name, self.num_prompt_tokens, self.overridden = name, num_prompt_tokens, overridden
        self.news.set()

    def feed(self, new: NewTokens) -> None:
        """Decode new tokens of one choice."""
        pieces = self.streams[new.sample_index].feed(new.token_ids.tolist(), has_ended=new.ended is not None)
        self._pieces += ((new.sample_index, *piece) for piece in pieces)
        if self._pieces:
            self.news.set()

    def take(self) -> list[tuple[int, str, str]]:
        """Return and clear the new pieces: index of the choice, "reasoning" or "content", and text."""
        pieces, self._pieces = self._pieces, []
        runs = groupby(pieces, key=lambda piece: piece[:2])
        return [(index, kind, "".join(piece[2] for piece in run)) for (index, kind), run in runs]

    def take_rest(self, answer: Answer) -> list[tuple[int, str, str]]:
        """Return the remaining pieces of the complete messages."""
        for index, sample in enumerate(answer.samples):
            said = self.streams[index].said if self.streams else NOTHING_SAID
            self._pieces += ((index, *piece) for piece in unsaid(sample.message, said))
        return self.take()
