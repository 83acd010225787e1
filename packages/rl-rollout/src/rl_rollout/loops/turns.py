"""Joining of a session's turns as token ids. Sampled tokens are never encoded again."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from rl_core.data import IntArray, Json, Prompt
from rl_core.errors import DataError, SettingsError
from rl_core.record_fields import settings_record
from rl_rollout.prompts.image_tokens import image_digests
from rl_rollout.prompts.tokenizer import PromptTokenizer

Role = Literal["tool", "user"]
"""Sender of replies to the model: its tools, or an environment in the user's place."""

Message = dict[str, Json]

QUESTION: Message = {"role": "user", "content": "Hello."}
MARK = "turnmark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply to the model's turn, from one tool or from the environment.

    Attributes:
        text: Text for the model.
        name: Name of the tool; empty if there is none.
        images: Digests of images after the text, in the run's store.
    """

    text: str
    name: str = ""
    images: tuple[str, ...] = ()

    @property
    def content(self) -> Json:
        """The content of a message: text, or parts if there are images."""
        if not self.images:
            return self.text
        text = [{"type": "text", "text": self.text}] if self.text else []
        return [*text, *({"type": "image", "digest": digest} for digest in self.images)]


@settings_record
class TurnFormat:
    """Format of turns.

    Attributes:
        kind: "chat" uses the tokenizer's chat template; "plain" puts a reply between `prefix` and `suffix`.
        prefix: Text before a reply in plain turns.
        suffix: Text after a reply in plain turns.
        stop_tokens: Tokens that end a turn, in addition to the tokenizer's end token.
    """

    kind: Literal["chat", "plain"] = "chat"
    prefix: str = "\n"
    suffix: str = "\n"
    stop_tokens: tuple[str, ...] = ()


class ChatTurns:
    """Turns in the chat template's format: returns the token ids of everything in a session that is not sampled.

    The text after a turn is extracted from the rendering of a short fixed conversation, whose assistant turn contains a
    mark: everything that the template writes after the mark and the turn's end token. Neither sampled turns nor the
    history are ever rendered, so a template that would write them differently cannot change them.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        *,
        role: Role,
        tools: Sequence[Mapping[str, Json]] = (),
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """Check the template.

        Args:
            tokenizer: A tokenizer with a chat template.
            role: Sender of replies.
            tools: Schemas, given to the template.
            end_token_ids: Tokens that can end a turn, in addition to the tokenizer's own.

        Raises:
            SettingsError: The template does not support several turns, or does not show the tools. The message
                describes what it does.
        """
        self._tokenizer = tokenizer
        self._role = role
        self._tools = list(tools)
        own = tokenizer.eos_token_id
        self._end_token_ids = frozenset({*end_token_ids, *(() if own is None else (own,))})
        special = (tokenizer.token_id(token) for token in tokenizer.special_tokens)
        self._may_end = self._end_token_ids.union(token_id for token_id in special if token_id is not None)
        self.control_tokens = re.compile("|".join(re.escape(token) for token in tokenizer.special_tokens) or r"(?!)")
        if not tokenizer.has_chat_template:
            raise SettingsError(
                'the tokenizer has no chat template, which several turns need. Add one, or set turns.kind = "plain".'
            )
        self._shape = self._find_shape()
        self._require_shown_tools()

    @property
    def arguments_are_text(self) -> bool:
        """True if the template reads call arguments as JSON text, not as objects."""
        return self._shape is _calls_as_text

    def prompt_ids(self, prompt: Prompt, *, observation: str | None = None) -> IntArray:
        """Return the [P] int32 input of the first turn. An observation comes after the prompt's own messages.

        A plain prompt stays unchanged, and shows no tools.

        Raises:
            DataError: The template refuses the messages, or an observation follows a prompt of plain text.
        """
        if observation is None and (not self._tools or not prompt.messages):
            return prompt.input_ids
        messages = [dict(message) for message in prompt.messages]
        if observation is not None:
            text = harmless(observation, self.control_tokens)
            content: Json = [{"type": "text", "text": text}] if prompt.images else text  # in the form of the others
            messages.append({"role": "user", "content": content})
        text = self._tokenizer.render(messages, where=f"prompt {prompt.uid}", tools=self._tools)
        return self._encode(text, image_digests(messages))

    def reply_ids(self, replies: Sequence[Reply], *, last_token: int) -> IntArray:
        """Return the [N] int32 tokens between a turn that ended with last_token and the next turn.

        Text in a reply never becomes a control token.

        Raises:
            DataError: The template refuses the reply.
        """
        named = [
            replace(one, text=harmless(one.text, self.control_tokens), name=one.name or self._any_name())
            for one in replies
        ]
        return self.following_ids(self._messages(named), calls=[one.name for one in named], last_token=last_token)

    def opening_ids(self, messages: Sequence[Message]) -> IntArray:
        """Return the [P] int32 input of the first turn, for any messages.

        Control tokens in them stay control tokens.

        Raises:
            DataError: The template refuses the messages.
        """
        text = self._tokenizer.render(messages, where="the messages", tools=self._tools)
        return self._encode(text, image_digests(messages))

    def following_ids(self, messages: Sequence[Message], *, calls: Sequence[str], last_token: int) -> IntArray:
        """Same as `reply_ids`, for any messages. Control tokens in them stay control tokens.

        Args:
            messages: Messages after the turn.
            calls: Names of the tools that the turn called.
            last_token: Last token of the turn.

        Raises:
            DataError: The template refuses the messages.
        """
        tail = self._encode(self._tail(messages, calls), image_digests(messages))
        first_end = int(np.flatnonzero(np.isin(tail, list(self._end_token_ids)))[0])
        ends = np.flatnonzero(tail[: first_end + 1] == last_token)
        if len(ends) and last_token in self._may_end:  # a turn truncated by a limit may end with any token
            return tail[ends[0] + 1 :]
        return tail[first_end:]  # the turn ended with another token; the template's end token follows it

    def _require_shown_tools(self) -> None:
        """Refuse a template that hides tools from the model.

        Raises:
            SettingsError: A tool's name is not in what the template adds for the tools.
        """
        if not self._tools:
            return
        text, without = self._render([QUESTION]), self._tokenizer.render([QUESTION], where="a question")
        names = [str(tool["function"]["name"]) for tool in self._tools]
        hidden = [name for name in names if text.count(name) <= without.count(name)]
        if hidden:
            raise SettingsError(
                f"the chat template does not show the model the tools {', '.join(hidden)}. Use a chat template that "
                'writes `tools`, or describe the tools in the prompts and set turns.kind = "plain".'
            )

    def _find_shape(self) -> "_Shape":
        """Return the first format of an assistant turn that the template keeps complete.

        Raises:
            SettingsError: The template keeps none.
        """
        shapes = (_calls_as_objects, _calls_as_text, _content) if self._role == "tool" else (_content,)
        faults = []
        for shape in shapes:
            try:
                fault = self._fault(shape)
            except DataError as error:
                fault = str(error)
            if fault is None:
                return shape
            faults.append(fault)
        raise SettingsError(
            f'the chat template cannot join turns: {faults[-1]} Use another chat template, or set turns.kind = "plain".'
        )

    def _fault(self, shape: "_Shape") -> str | None:
        """Describe why turns of this shape cannot be joined."""
        replies = [Reply(text="replymark", name=self._any_name())]
        turn = [*shape(replies, MARK), *self._messages(replies)]
        text = self._render([QUESTION, *turn])
        if not text.startswith(self._render([QUESTION], add_generation_prompt=False)):
            return "it renders earlier messages differently once later ones follow, so a session has no fixed prefix."
        _, mark, tail = text.rpartition(MARK)
        before, reply, _ = tail.partition("replymark")
        if not mark or not reply:
            return f"it omits {'the reply' if mark else 'the assistant message'}."
        if not np.isin(self._encode(before), list(self._end_token_ids)).any():
            return (
                f"after the assistant's turn it writes {before!r}, which contains none of the end tokens "
                f"{sorted(self._end_token_ids)}. Add the right one to turns.stop_tokens."
            )
        later = self._render([QUESTION, *turn, *shape(replies, MARK), *self._messages(replies)])
        if later.rpartition(MARK)[2] != tail:
            return "it renders a reply differently after two turns than after one."
        return None

    def _tail(self, messages: Sequence[Message], calls: Sequence[str]) -> str:
        """Return everything that the template writes after the assistant's text."""
        mark, others = MARK, f"{messages} {calls}"
        while mark in others:
            mark += "x"
        turn = self._shape([Reply(text="", name=name) for name in calls], mark)
        _, found, tail = self._render([QUESTION, *turn, *messages]).rpartition(mark)
        if not found:
            raise DataError("the chat template omits the assistant message before this reply.")
        return tail

    def _messages(self, replies: Sequence[Reply]) -> list[Message]:
        if self._role == "user":
            return [{"role": "user", "content": reply.content} for reply in replies]
        return [
            {"role": "tool", "tool_call_id": numbered_call(index), "name": reply.name, "content": reply.content}
            for index, reply in enumerate(replies)
        ]

    def _any_name(self) -> str:
        return str(self._tools[0]["function"]["name"]) if self._tools else "tool"

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        return self._tokenizer.render(
            messages, where="a reply", tools=self._tools, add_generation_prompt=add_generation_prompt
        )

    def _encode(self, text: str, images: Sequence[str] = ()) -> IntArray:
        if images:
            if self._tokenizer.images is None:
                raise SettingsError(
                    "messages with images need a tokenizer with image_folder, the folder of their images."
                )
            text = self._tokenizer.images.expanded(text, images)
        return np.array(self._tokenizer.encode([text], add_special_tokens=False)[0], dtype=np.int32)


class PlainTurns:
    """Turns as plain text, for models without a chat template. Each reply has a prefix and a suffix."""

    def __init__(self, tokenizer: PromptTokenizer, *, prefix: str, suffix: str) -> None:
        """Store the two texts. Several replies to one turn are separated by a line break."""
        self._tokenizer = tokenizer
        self._prefix = prefix
        self._suffix = suffix

    def prompt_ids(self, prompt: Prompt, *, observation: str | None = None) -> IntArray:
        """See `ChatTurns.prompt_ids`."""
        if observation is None:
            return prompt.input_ids
        return np.concatenate([prompt.input_ids, self.reply_ids([Reply(text=observation)], last_token=-1)])

    def reply_ids(self, replies: Sequence[Reply], *, last_token: int) -> IntArray:  # noqa: ARG002
        """See `ChatTurns.reply_ids`. Replies have no images."""
        if any(reply.images for reply in replies):
            raise DataError(
                'plain turns cannot show the images of a reply, which need a chat template. Set turns.kind = "chat".'
            )
        text = self._prefix + "\n".join(reply.text for reply in replies) + self._suffix
        return np.array(self._tokenizer.encode([text], add_special_tokens=False)[0], dtype=np.int32)


Turns = ChatTurns | PlainTurns
Joined = tuple[Turns, tuple[int, ...]]
"""Checked turns for a tokenizer, and the tokens that end a turn in addition to the model's own."""


def join_turns(
    tokenizer: PromptTokenizer,
    turn_format: TurnFormat,
    *,
    role: Role,
    tools: Sequence[Mapping[str, Json]] = (),
    known_stops: Sequence[str] = (),
) -> Joined:
    """Check a turn format against a tokenizer and its chat template.

    Args:
        tokenizer: The policy's tokenizer.
        turn_format: The format of turns.
        role: Who replies.
        tools: Schemas for the chat template.
        known_stops: Tokens that end a turn if the tokenizer has them.

    Raises:
        SettingsError: A stop token is unknown, or the chat template cannot join turns.
    """
    found = [tokenizer.token_id(token) for token in known_stops]
    stop_token_ids = [token_id for token_id in found if token_id is not None]
    for token in turn_format.stop_tokens:
        token_id = tokenizer.token_id(token)
        if token_id is None:
            raise SettingsError(f"turns.stop_tokens: the tokenizer has no token {token!r}.")
        stop_token_ids.append(token_id)
    turns: Turns = (
        PlainTurns(tokenizer, prefix=turn_format.prefix, suffix=turn_format.suffix)
        if turn_format.kind == "plain"
        else ChatTurns(tokenizer, role=role, tools=tools, end_token_ids=stop_token_ids)
    )
    return turns, tuple(stop_token_ids)


_Shape = Callable[[Sequence[Reply], str], list[Message]]
"""Renders the assistant's turn before some replies, with the mark as near to its end as the format allows."""


def _calls_as_objects(replies: Sequence[Reply], mark: str) -> list[Message]:
    return _calls(replies, {"mark": mark})


def _calls_as_text(replies: Sequence[Reply], mark: str) -> list[Message]:
    return _calls(replies, f'{{"mark": "{mark}"}}')


def _content(_replies: Sequence[Reply], mark: str) -> list[Message]:
    return [{"role": "assistant", "content": mark}]


def _calls(replies: Sequence[Reply], arguments: Any) -> list[Message]:
    calls = [
        {"id": numbered_call(index), "type": "function", "function": {"name": reply.name, "arguments": arguments}}
        for index, reply in enumerate(replies)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls}]


def numbered_call(index: int) -> str:
    """Return a call id of nine letters and digits, the format that Mistral's templates require."""
    return f"call{index:05d}"


def harmless(text: str, control_tokens: re.Pattern[str]) -> str:
    """Return the text with control tokens broken up, so that it cannot end a turn or speak for someone else."""
    return control_tokens.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
