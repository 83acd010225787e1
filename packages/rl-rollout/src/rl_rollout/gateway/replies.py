"""Turns a model's tokens into the client's message: reasoning, text and calls."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rl_core.data import IntArray, Json
from rl_rollout.engines.response_text import ResponseText
from rl_rollout.gateway.messages import Call, ChatMessage
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.tools.parsers.markup import THINKING, THOUGHT
from rl_rollout.tools.parsers.protocol import ParsedTurn, ToolParser

ReplyForm = Literal["chat", "call", "text"]
NOTHING_SAID: Mapping[str, str] = {"reasoning": "", "content": ""}
TAIL_TOKENS = 16
"""Tokens in which a prompt that opens the reasoning has done so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyReader:
    """Reads turns.

    Attributes:
        tokenizer: Of the policy.
        parser: Reads calls; None where the model makes none.
        ends: Texts of the tokens that end a turn, which a client does not see.
    """

    tokenizer: PromptTokenizer
    parser: ToolParser | None
    ends: Mapping[int, str]

    @classmethod
    def of(cls, tokenizer: PromptTokenizer, parser: ToolParser | None, stop_token_ids: Sequence[int]) -> "ReplyReader":
        """One that knows the tokenizer's own end token too."""
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        ends = list(dict.fromkeys((*stop_token_ids, *own)))
        texts = tokenizer.decode([[end] for end in ends], skip_special_tokens=False)
        return cls(tokenizer=tokenizer, parser=parser, ends=dict(zip(ends, texts, strict=True)))

    def opens_reasoning(self, new_ids: IntArray) -> bool:
        """True where what the engine is asked to continue ends within `<think>`."""
        (tail,) = self.tokenizer.decode([new_ids[-TAIL_TOKENS:]], skip_special_tokens=False)
        return _opens_reasoning(tail)

    def read(
        self,
        token_ids: IntArray,
        *,
        after: IntArray,
        tools: Sequence[Mapping[str, Json]] = (),
        stop: str | None = None,
        form: ReplyForm = "chat",
    ) -> ChatMessage:
        """A turn as a message.

        Calls that cannot be read stay in the text, as they stand: a client then sees what is wrong with them.

        Args:
            token_ids: [R] int32 as sampled.
            after: [N] int32 what the engine was asked to continue, or its end.
            tools: That the model may call, as chat templates take them.
            stop: The stop string that ended it; what comes with it is not shown.
            form: "call" where it had to be the JSON of a call, "text" where it is shown as it is.
        """
        tail, text = self.tokenizer.decode([after[-TAIL_TOKENS:], token_ids], skip_special_tokens=False)
        shown = text if stop is None else text[: text.find(stop)]
        if len(token_ids) and int(token_ids[-1]) in self.ends:
            shown = shown.removesuffix(self.ends[int(token_ids[-1])])
        if form != "chat":
            calls = _forced_call(shown) if form == "call" else ()
            return ChatMessage(role="assistant", content="" if calls else shown, calls=calls)
        parsed = self._parsed(text if stop is None else shown, tools)
        if parsed.answer is not None:
            return _message(parsed.answer, parsed.reasoning, parsed)
        reasoning, start = split_reasoning(shown, is_open=_opens_reasoning(tail))
        end = len(shown) if parsed.calls_at is None or not parsed.calls else max(parsed.calls_at, start)
        return _message(shown[start:end], reasoning, parsed)

    def streams(
        self,
        num_choices: int,
        *,
        after: IntArray,
        tools: Sequence[Mapping[str, Json]],
        stop: Sequence[str],
        form: ReplyForm,
    ) -> list["ReplyStream"]:
        """What becomes the messages of a turn that is being sampled; the arguments are those of `read`."""
        openings = () if self.parser is None else getattr(self.parser, "openings", None)
        if form == "call":
            openings = None
        is_reasoning = self.opens_reasoning(after)
        tail = after[-TAIL_TOKENS:].tolist()
        return [
            ReplyStream(
                self.tokenizer.response_text(tail, stop=stop),
                is_reasoning=is_reasoning,
                openings=openings if tools or openings is None else (),
                is_raw=form == "text",
                end_token_ids=frozenset(self.ends),
            )
            for _ in range(num_choices)
        ]

    def without_reasoning(self, token_ids: IntArray, *, after: IntArray) -> IntArray:
        """[K] int32 the tokens of a turn from its answer on; the same array where nothing was thought."""
        is_open = self.opens_reasoning(after)
        (text,) = self.tokenizer.decode([token_ids], skip_special_tokens=False)
        reasoning, start = split_reasoning(text, is_open=is_open)
        if not reasoning or THOUGHT not in text:
            return token_ids
        wanted = text.index(THOUGHT) if is_open else start  # a prompt that opens it needs it closed
        low, high = 0, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            (head,) = self.tokenizer.decode([token_ids[:middle]], skip_special_tokens=False)
            low, high = (middle + 1, high) if len(head) < wanted else (low, middle)
        return token_ids[low:]

    def _parsed(self, text: str, tools: Sequence[Mapping[str, Json]]) -> ParsedTurn:
        if self.parser is None:
            return ParsedTurn()
        schemas = {str(tool["function"]["name"]): tool["function"].get("parameters") or {} for tool in tools}
        parsed = self.parser.parse(text, parameters=schemas)
        if tools and all(call.fault is None for call in parsed.calls):
            return parsed
        return ParsedTurn(answer=parsed.answer if not parsed.calls else None, reasoning=parsed.reasoning)


def split_reasoning(text: str, *, is_open: bool) -> tuple[str, int]:
    """The reasoning at the beginning of a turn, and where the rest begins.

    Args:
        text: The turn.
        is_open: The prompt has opened the reasoning, so that the turn begins within it.
    """
    indent = len(text) - len(text.lstrip())
    begins = text.startswith(THINKING, indent)
    if not begins and not is_open:
        return "", 0
    start, end = indent + len(THINKING) if begins else 0, text.find(THOUGHT)
    return (text[start:].strip(), len(text)) if end < 0 else (text[start:end].strip(), end + len(THOUGHT))


def _opens_reasoning(tail: str) -> bool:
    return tail.rfind(THINKING) > tail.rfind(THOUGHT)


class ReplyStream:
    """What a client may see of a turn while it is sampled: always a beginning of the message that it will be.

    Attributes:
        said: Of "reasoning" and "content", what was given so far.
    """

    def __init__(
        self,
        text: ResponseText,
        *,
        is_reasoning: bool,
        openings: Sequence[str] | None,
        end_token_ids: frozenset[int] = frozenset(),
        is_raw: bool = False,
    ) -> None:
        """Begin with nothing.

        Args:
            text: Of the turn.
            is_reasoning: The prompt has opened the reasoning.
            openings: What calls begin with; None where a turn cannot be distinguished before its end.
            end_token_ids: Tokens that end a turn, which a client does not see.
            is_raw: All that is said is content, as it is.
        """
        self.said: Mapping[str, str] = NOTHING_SAID
        self._is_reasoning, self._openings, self._end_token_ids = is_reasoning, openings, end_token_ids
        self._response, self._is_raw = text, is_raw
        self._text = ""

    def feed(self, token_ids: Sequence[int], *, has_ended: bool = False) -> list[tuple[str, str]]:
        """More of the turn; gives "reasoning" or "content", and what is new of it."""
        if self._openings is None and not self._is_raw:
            return []
        shown = [token_id for token_id in token_ids if token_id not in self._end_token_ids]
        self._text += self._response.feed(shown) + (self._response.finish() if has_ended else "")
        if self._is_raw or self._openings is None:
            return self._say(reasoning="", content=self._text)
        seen = self._text[: len(self._text) - _held_back(self._text, (THINKING, THOUGHT, *self._openings))]
        reasoning, start = split_reasoning(seen, is_open=self._is_reasoning)
        if not reasoning and THINKING.startswith(self._text.strip()[: len(THINKING)]):
            return []
        content = seen[start:]
        ends = [end for opening in self._openings if (end := content.find(opening)) >= 0]
        content = content[: min(ends, default=len(content))].strip()
        return self._say(reasoning=reasoning, content=content)

    def _say(self, *, reasoning: str, content: str) -> list[tuple[str, str]]:
        pieces = unsaid(ChatMessage(role="assistant", reasoning=reasoning, content=content), self.said)
        self.said = {"reasoning": reasoning, "content": content}
        return pieces


def unsaid(message: ChatMessage, said: Mapping[str, str]) -> list[tuple[str, str]]:
    """What of a message has not been said: "reasoning" or "content", and text."""
    whole = {"reasoning": message.reasoning, "content": message.content}
    return [(kind, text[len(said[kind]) :]) for kind, text in whole.items() if len(text) > len(said[kind])]


def _held_back(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of a text that may become a mark."""
    longest = max(map(len, marks))
    if not any(mark[:1] in text[-longest:] for mark in marks):
        return 0  # most often
    ends = (size for size in range(min(longest - 1, len(text)), 0, -1))
    return next((size for size in ends if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def _forced_call(text: str) -> tuple[Call, ...]:
    """The call that a structure made the model write; none where a limit cut it."""
    try:
        call = json.loads(text)
        return (_call(call["name"], call["arguments"]),)
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()


def _call(name: str, arguments: Mapping[str, Json]) -> Call:
    written = json.dumps(dict(arguments), ensure_ascii=False)
    return Call(name=name, arguments=written, call_id=f"call_{secrets.token_hex(12)}")


def _message(content: str, reasoning: str, parsed: ParsedTurn) -> ChatMessage:
    calls = tuple(_call(call.name, call.arguments) for call in parsed.calls)
    return ChatMessage(role="assistant", content=content.strip(), reasoning=reasoning, calls=calls)
