"""Converts a model's tokens to the client's message: reasoning, text and tool calls."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rl_core.data import IntArray, Json, encodable, encodable_json
from rl_core.errors import DataError
from rl_rollout.engines.response_text import ResponseText
from rl_rollout.gateway.messages import Call, ChatMessage
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rewards.answers import THINKING, THOUGHT, opens_thinking
from rl_rollout.tools.parsers.protocol import ParsedTurn, ToolParser
from rl_rollout.tools.protocol import ToolCall

ReplyForm = Literal["chat", "call", "text"]
NOTHING_SAID: Mapping[str, str] = {"reasoning": "", "content": ""}
TAIL_TOKENS = 16
"""Least number of tokens at the end of a prompt that are searched for the start of the reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyReader:
    """Parses the turns of a model.

    Attributes:
        tokenizer: The policy's tokenizer.
        parser: Parser of tool calls; None leaves them in the text.
        ends: Text of each token that ends a turn, by token id; removed from the message.
        asking: The template's generation prompt; empty if it cannot be told from the messages.
        num_tail: Number of tokens at the end of a prompt that contain the generation prompt.
    """

    tokenizer: PromptTokenizer
    parser: ToolParser | None
    ends: Mapping[int, str]
    asking: str = ""
    num_tail: int = TAIL_TOKENS

    @classmethod
    def of(cls, tokenizer: PromptTokenizer, parser: ToolParser | None, stop_token_ids: Sequence[int]) -> "ReplyReader":
        """Create a reader whose `ends` also include the tokenizer's own end token."""
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        ends = list(dict.fromkeys((*stop_token_ids, *own)))
        texts = tokenizer.decode([[end] for end in ends], skip_special_tokens=False)
        asking = _generation_prompt(tokenizer)
        return cls(
            tokenizer=tokenizer,
            parser=parser,
            ends=dict(zip(ends, texts, strict=True)),
            asking=asking,
            num_tail=max(TAIL_TOKENS, *map(len, tokenizer.encode([asking], add_special_tokens=False))),
        )

    def opens_reasoning(self, new_ids: IntArray) -> bool:
        """Return True if the engine's input ends with a generation prompt that opens `<think>`."""
        (tail,) = self.tokenizer.decode([new_ids[-self.num_tail :]], skip_special_tokens=False)
        return self._is_open(tail)

    def _is_open(self, tail: str) -> bool:
        """Search only what the template added: `<think>` in a client's text opens nothing."""
        if self.asking and tail.endswith(self.asking):
            return self.asking.rfind(THINKING) > self.asking.rfind(THOUGHT)
        # There is no generation prompt, or it depends on the conversation.
        return opens_thinking(tail, self.tokenizer.special_tokens)

    def read(
        self,
        token_ids: IntArray,
        *,
        after: IntArray,
        tools: Sequence[Mapping[str, Json]] = (),
        stop: str | None = None,
        form: ReplyForm = "chat",
    ) -> ChatMessage:
        """Convert a turn to a message.

        Invalid calls stay in the text unchanged, so that the client sees what is wrong with them.

        Args:
            token_ids: [R] int32 sampled tokens.
            after: [N] int32 input of the engine, or its end.
            tools: Tools that the model may call, in the format of chat templates.
            stop: Stop string that ended the turn; the message ends before it.
            form: "chat" parses reasoning and calls, "call" parses the JSON of a forced call, "text" keeps the text.
        """
        tail, text = self.tokenizer.decode([after[-self.num_tail :], token_ids], skip_special_tokens=False)
        shown = text if stop is None else self._before(stop, token_ids, after=after)
        if len(token_ids) and int(token_ids[-1]) in self.ends:
            shown = shown.removesuffix(self.ends[int(token_ids[-1])])
        if form != "chat":
            calls = _forced_call(shown) if form == "call" else ()
            return ChatMessage(role="assistant", content="" if calls else shown, calls=calls)
        parsed = self._parsed(text if stop is None else shown, tools)
        if parsed.answer is not None:
            reasoning, start = parsed.reasoning, 0
            if not reasoning and THOUGHT in parsed.answer and self._is_open(tail):
                reasoning, start = split_reasoning(parsed.answer, is_open=True)
            return _message(parsed.answer[start:], reasoning, parsed)
        reasoning, start = split_reasoning(shown, is_open=self._is_open(tail))
        end = len(shown) if parsed.calls_at is None or not parsed.calls else max(parsed.calls_at, start)
        return _message(shown[start:end], reasoning, parsed)

    def _before(self, stop: str, token_ids: IntArray, *, after: IntArray) -> str:
        """Return the text before a stop string, as the engine read it: in the prompt's context, with a first space."""
        text = self.tokenizer.response_text(after[-TAIL_TOKENS:].tolist(), stop=[stop])
        return encodable(text.feed(token_ids.tolist()) + text.finish())

    def streams(
        self,
        num_choices: int,
        *,
        after: IntArray,
        tools: Sequence[Mapping[str, Json]],
        stop: Sequence[str],
        form: ReplyForm,
    ) -> list["ReplyStream"]:
        """Create the streams of a turn's choices while they are sampled; the arguments are those of `read`."""
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
                ends=self.ends,
            )
            for _ in range(num_choices)
        ]

    def texts_of(self, token_ids: IntArray, *, after: IntArray) -> list[str]:
        """Return the text of each token of a turn. A character of several tokens counts to its last one."""
        text = self.tokenizer.response_text(after[-TAIL_TOKENS:].tolist())
        texts = [text.feed([token_id]) for token_id in token_ids.tolist()]
        return [*texts[:-1], texts[-1] + text.finish()] if texts else []

    def without_reasoning(self, token_ids: IntArray, *, after: IntArray) -> IntArray:
        """Return the [K] int32 tokens of a turn from its answer on; the same array if it has no reasoning."""
        is_open = self.opens_reasoning(after)
        (text,) = self.tokenizer.decode([token_ids], skip_special_tokens=False)
        reasoning, start = split_reasoning(text, is_open=is_open)
        if not reasoning or THOUGHT not in text:
            return token_ids
        wanted = text.index(THOUGHT) if is_open else start  # keep the closing tag if the prompt has the opening one
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
        try:
            calls = tuple(map(_encodable, parsed.calls))
        except DataError:  # JSON that no client could read
            calls = None
        if tools and calls is not None and all(call.fault is None for call in calls):
            return replace(parsed, calls=calls)
        return ParsedTurn(answer=parsed.answer if not parsed.calls else None, reasoning=parsed.reasoning)


def split_reasoning(text: str, *, is_open: bool) -> tuple[str, int]:
    """Return the reasoning at the beginning of a turn, and the index at which the rest begins.

    Args:
        text: Text of the turn.
        is_open: The prompt has opened the reasoning, so the turn begins inside it.
    """
    indent = len(text) - len(text.lstrip())
    begins = text.startswith(THINKING, indent)
    if not begins and not is_open:
        return "", 0
    start, end = indent + len(THINKING) if begins else 0, text.find(THOUGHT)
    return (text[start:].strip(), len(text)) if end < 0 else (text[start:end].strip(), end + len(THOUGHT))


def _generation_prompt(tokenizer: PromptTokenizer) -> str:
    """Return the text with which the template asks for a turn; empty if it writes none after a question."""
    if not tokenizer.has_chat_template:
        return ""
    question = [{"role": "user", "content": "Hello."}]
    try:
        asked, before = (tokenizer.render(question, add_generation_prompt=asks) for asks in (True, False))
    except DataError:
        return ""
    return asked[len(before) :] if asked.startswith(before) else ""


class ReplyStream:
    """Decodes a turn while it is sampled. Its output is always a prefix of the final message.

    Attributes:
        said: The "reasoning" and "content" returned so far.
    """

    def __init__(
        self,
        text: ResponseText,
        *,
        is_reasoning: bool,
        openings: Sequence[str] | None,
        ends: Mapping[int, str],
        is_raw: bool = False,
    ) -> None:
        """Start an empty stream.

        Args:
            text: Decoder of the turn's tokens.
            is_reasoning: The prompt has opened the reasoning.
            openings: Strings that begin a call; None if calls are only recognized at the end of the turn.
            ends: Text of each token that ends a turn, by token id; not shown at the end.
            is_raw: Return all text unchanged as content.
        """
        self.said: Mapping[str, str] = NOTHING_SAID
        self._is_reasoning, self._openings, self._ends = is_reasoning, openings, ends
        self._response, self._is_raw = text, is_raw
        self._text, self._last_token = "", -1

    def feed(self, token_ids: Sequence[int], *, has_ended: bool = False) -> list[tuple[str, str]]:
        """Decode more tokens; return pairs of "reasoning" or "content" and the new text."""
        if self._openings is None and not self._is_raw:
            return []
        self._text += self._response.feed(token_ids) + (self._response.finish() if has_ended else "")
        *_, self._last_token = self._last_token, *token_ids
        ending = self._ends.get(self._last_token, "")
        if ending and not has_ended:
            return []
        text = self._text if self._response.matched_stop is not None else self._text.removesuffix(ending)
        if self._is_raw or self._openings is None:
            return self._say(reasoning="", content=text)
        seen = text[: len(text) - _held_back(text, (THINKING, THOUGHT, *self._openings))]
        reasoning, start = split_reasoning(seen, is_open=self._is_reasoning)
        if not reasoning and THINKING.startswith(text.strip()[: len(THINKING)]):
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
    """Return the rest of a message after `said`, as pairs of "reasoning" or "content" and text."""
    whole = {"reasoning": message.reasoning, "content": message.content}
    return [(kind, text[len(said[kind]) :]) for kind, text in whole.items() if len(text) > len(said[kind])]


def _held_back(text: str, marks: Sequence[str]) -> int:
    """Return the number of characters at the end of a text that may be the start of a mark."""
    longest = max(map(len, marks))
    if not any(mark[:1] in text[-longest:] for mark in marks):
        return 0  # the most frequent case
    ends = (size for size in range(min(longest - 1, len(text)), 0, -1))
    return next((size for size in ends if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def _forced_call(text: str) -> tuple[Call, ...]:
    """Parse a call that was sampled under a structure; return an empty tuple if a length limit truncated it."""
    try:
        call = json.loads(text)
        return (_call(_encodable(ToolCall(name=call["name"], arguments=call["arguments"]))),)
    except (ValueError, TypeError, KeyError, RecursionError, DataError):
        return ()


def _encodable(call: ToolCall) -> ToolCall:
    """Return a call that every client and encoder accepts: no lone surrogates, and no NaN.

    Raises:
        DataError: The arguments are nested too deeply, or two of their keys become equal.
    """
    return replace(call, name=encodable(call.name), arguments=encodable_json(call.arguments))


def _call(call: ToolCall) -> Call:
    written = json.dumps(dict(call.arguments), ensure_ascii=False)
    return Call(name=call.name, arguments=written, call_id=f"call_{secrets.token_hex(12)}")


def _message(content: str, reasoning: str, parsed: ParsedTurn) -> ChatMessage:
    calls = tuple(map(_call, parsed.calls))
    content, reasoning = encodable(content.strip()), encodable(reasoning)
    return ChatMessage(role="assistant", content=content, reasoning=reasoning, calls=calls)
