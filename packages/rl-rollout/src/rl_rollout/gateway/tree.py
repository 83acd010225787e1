"""The prompts and samples of a session, as a tree of tokens. Each leaf becomes a trajectory."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from rl_core.data import ImageSpan, IntArray, Json, Timings, Trajectory
from rl_core.errors import DataError
from rl_rollout.audit import SampledSpan
from rl_rollout.engines.protocol import Generation
from rl_rollout.gateway.messages import ChatMessage, MessageRole, exact_digests, next_digest
from rl_rollout.loops.outcomes import join_experts, join_parts

PROBE = "probe"
MAX_NAMES = 8
MAX_NAME_CHARS = 64
"""Limits on the tool names of a turn in the extra "turns"."""


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One input of the engine, with all samples drawn from it.

    Attributes:
        after: The preceding sample; None at the beginning of a conversation.
        new_ids: [N] int32 tokens after that sample, including the generation prompt.
        new_images: Images among new_ids.
        asked_by: Role of the last message.
        key: Exact digest of its conversation, from `exact_digests`.
        samples: Samples of this input; several if the request was retried or asked for several choices.
    """

    after: "Sample | None"
    new_ids: IntArray
    new_images: tuple[ImageSpan, ...] = ()
    asked_by: MessageRole = "user"
    key: bytes = b""
    samples: list["Sample"] = field(default_factory=list)

    @property
    def input_ids(self) -> IntArray:
        """[P] int32 complete input of the engine."""
        parts = [self.new_ids]
        turn = self
        while turn.after is not None:
            parts.append(turn.after.kept_ids)
            turn = turn.after.turn
            parts.append(turn.new_ids)
        return np.concatenate(parts[::-1]).astype(np.int32, copy=False)

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        """The images among `input_ids`."""
        turns: list[Turn] = [self]
        while (before := turns[-1].after) is not None:
            turns.append(before.turn)
        images: list[ImageSpan] = []
        start = 0
        for turn in reversed(turns):
            start += 0 if turn.after is None else len(turn.after.kept_ids)
            images += (replace(one, start=start + one.start) for one in turn.new_images)
            start += len(turn.new_ids)
        return tuple(images)


@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """One response of the model.

    Attributes:
        turn: The turn that it answers.
        message: The message sent to the client.
        generation: The engine's result.
        asked_digest: Digest of the engine's input: its tokens and images.
        kept_ids: [K] int32 tokens that later turns contain: all, or those without the reasoning.
        request_index: Index of the request in the session; all choices of a request share it.
        generate_s: The engine's time in seconds, divided by the number of choices.
        never_trains: True for probes and for samples from another distribution than the session's.
        is_delivered: True if the client received it.
        turns: The turns that follow it, by `Turn.key`.
    """

    turn: Turn
    message: ChatMessage
    generation: Generation
    asked_digest: bytes
    kept_ids: IntArray
    request_index: int
    generate_s: float = 0.0
    never_trains: bool = False
    is_delivered: bool = True
    turns: dict[bytes, Turn] = field(default_factory=dict)


class TreePosition(NamedTuple):
    """The place of a request in the tree.

    Attributes:
        after: The last sample in the conversation; None if it contains none.
        num_matched: Number of messages up to and including that sample.
        turn: The turn of an identical earlier request; None if there is none.
        num_known: Length in messages of the longest prefix shared with an earlier request.
        knows_tools: True if an earlier request of the session had the same tools.
        is_fork: True if another conversation also continues from `after`.
        key: Exact digest of the conversation.
    """

    after: Sample | None
    num_matched: int
    turn: Turn | None
    num_known: int
    knows_tools: bool
    is_fork: bool
    key: bytes


class SessionTree:
    """The turns and samples of a session.

    Requests are placed by digests of their messages, so that sampled tokens are never encoded again.
    """

    def __init__(self) -> None:
        """Create an empty tree."""
        self._roots: dict[bytes, Turn] = {}
        self._samples: dict[bytes, list[Sample]] = {}
        self._known: set[bytes] = set()
        self._in_order: list[Sample] = []
        self._with_text: dict[str, Sample] = {}
        self._said: Prefixes[Sample] = Prefixes()
        self._num_indexed = 0

    @property
    def is_empty(self) -> bool:
        """True before the first request."""
        return not self._known

    @property
    def samples(self) -> Sequence[Sample]:
        """All samples, in the order of their completion."""
        return self._in_order

    def with_dropped_text(self, toolset: bytes, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Return a conversation in which the model's calls have their text again, which some frameworks drop.

        A message gets the text of a sample if it has the same calls with the same ids, in the same conversation.

        Args:
            toolset: Digest of the tools.
            messages: The conversation as the client sent it.
        """
        if not any(self._sample_of(message) for message in messages):
            return messages
        digest, whole = toolset, []
        for message in messages:
            sample = self._sample_of(message)
            if sample is not None and sample in self._samples.get(next_digest(digest, sample.message), ()):
                message = replace(message, content=sample.message.content)
            digest = next_digest(digest, message)
            whole.append(message)
        return tuple(whole)

    def _sample_of(self, message: ChatMessage) -> Sample | None:
        """Return the sample with text whose calls a message without text has."""
        if not message.calls or message.content.strip():
            return None
        sample = self._with_text.get(message.calls[0].call_id)
        if sample is None or replace(sample.message, content="").digest != replace(message, content="").digest:
            return None
        ids = [[call.call_id for call in one.calls] for one in (sample.message, message)]
        return sample if ids[0] == ids[1] else None

    def place(self, digests: Sequence[bytes], messages: Sequence[ChatMessage]) -> TreePosition:
        """Find the place of a conversation.

        Args:
            digests: Digests of the tools and of each prefix of the conversation, from `context_digests`.
            messages: The conversation.
        """
        num_known = next((i for i, digest in enumerate(digests) if digest not in self._known), len(digests))
        exact = exact_digests(digests, messages, lambda after, before: bool(self._samples_after(after, before)))
        for num_matched in range(len(messages), 0, -1):
            if candidates := self._samples_after(digests[num_matched], exact[num_matched - 1]):
                after = _likeliest(candidates, messages[num_matched - 1])
                break
        else:
            after, num_matched = None, 0
        beside = self._roots if after is None else after.turns
        turn = beside.get(exact[-1])
        return TreePosition(
            after=after,
            num_matched=num_matched,
            turn=turn,
            num_known=max(num_known - 1, 0),
            knows_tools=num_known > 0,
            is_fork=after is not None and bool(beside) and turn is None,
            key=exact[-1],
        )

    def _samples_after(self, digest: bytes, before: bytes) -> list[Sample]:
        """Return the samples that end a prefix, by its digest and the exact digest of the conversation before them."""
        return [sample for sample in self._samples.get(digest, ()) if sample.turn.key == before]

    def place_tokens(self, input_ids: IntArray) -> tuple[TreePosition, int]:
        """Find the place of a prompt of tokens, after the longest matching sample; also return the matched length."""
        for sample in self._in_order[self._num_indexed :]:
            self._said.add(np.concatenate([sample.turn.input_ids, sample.kept_ids]), sample)
        self._num_indexed = len(self._in_order)
        after, num_said = self._said.longest(input_ids)
        beside = self._roots if after is None else after.turns
        key = digest_of(input_ids)
        turn = beside.get(key)
        is_fork = after is not None and bool(beside) and turn is None
        return TreePosition(
            after, num_matched=0, turn=turn, num_known=0, knows_tools=True, is_fork=is_fork, key=key
        ), num_said

    def open_turn(self, turn: Turn, digests: Sequence[bytes]) -> Turn:
        """Add the turn of a request, whose conversation has these digests; return the existing turn if it is equal."""
        beside = self._roots if turn.after is None else turn.after.turns
        self._known.update(digests)
        return beside.setdefault(turn.key, turn)

    def add(self, sample: Sample, digests: Sequence[bytes]) -> None:
        """Add a sample to its turn, whose conversation has these digests."""
        digest = next_digest(digests[-1], sample.message)
        if sample.message.content:
            self._with_text.update((call.call_id, sample) for call in sample.message.calls)
        sample.turn.samples.append(sample)
        self._samples.setdefault(digest, []).append(sample)
        self._known.add(digest)
        self._in_order.append(sample)

    def trained(self) -> set[Sample]:
        """Return the samples that train.

        For each turn these are the samples from which the agent continued. If there are none, it is the first delivered
        choice of the last request. The agent did not act on samples that it asked for again or did not choose.
        """
        chosen: set[Sample] = set()
        for turn in {sample.turn: None for sample in self._in_order}:
            usable = [sample for sample in turn.samples if not sample.never_trains]
            continued = [sample for sample in usable if sample.turns]
            delivered = [sample for sample in usable if sample.is_delivered]
            chosen.update(
                continued or [one for one in delivered if one.request_index == delivered[-1].request_index][:1]
            )
        return chosen

    @property
    def num_untrained_tokens(self) -> int:
        """Number of sampled tokens that do not train: those of retries, unused choices and probes."""
        trains = self.trained()
        return sum(len(one.generation.token_ids) for one in self._in_order if one not in trains)

    def trajectories(self, prompt_uid: str, session_index: int) -> tuple[Trajectory, ...]:
        """Return one trajectory per leaf, without reward, in the order of their completion.

        A token shared by several trajectories trains only in the first. `parent` is the trajectory that trains the last
        shared token. The extra "turns" describes each turn; see `_told`.
        """
        trains = self.trained()
        owners: dict[Sample, int] = {}
        built: list[Trajectory] = []
        for leaf in self._leaves(trains):
            path = _path(leaf)
            own = [one for one in path if one in trains and one not in owners and (one is leaf or _is_whole(one))]
            shared = [owners[one] for one in path if one in owners]
            index = len(built)
            owners.update(dict.fromkeys(own, index))
            row = _trajectory(path, own, (prompt_uid, session_index, index), shared[-1] if shared else None)
            built.append(replace(row, extras={"turns": _told(path, owners, trains)}))
        return tuple(built)

    def spans(self) -> list[SampledSpan]:
        """Return the inputs and results of the engine, for the audit.

        Raises:
            DataError: The tokens or images of a turn differ from the engine's input.
        """
        spans = []
        for number, sample in enumerate(self._in_order):
            input_ids, images = sample.turn.input_ids, sample.turn.images
            if digest_of(input_ids, images) != sample.asked_digest:
                raise DataError(f"the tree's tokens of request {number} differ from the engine's input.")
            spans.append(SampledSpan.of(input_ids, sample.generation, images=images))
        return spans

    def _leaves(self, trains: set[Sample]) -> Iterator[Sample]:
        """Yield the trained samples without a trained successor, and those that later turns keep only in part."""
        has_later: set[Sample] = set()
        for sample in trains:
            above = sample.turn.after
            while above is not None and above not in has_later:
                has_later.add(above)
                above = above.turn.after
        return (one for one in self._in_order if one in trains and (one not in has_later or not _is_whole(one)))


def digest_of(input_ids: IntArray, images: Sequence[ImageSpan] = ()) -> bytes:
    """Return the digest of an engine's input: tokens and images."""
    placed = "".join(f" {one.digest} {one.start} {one.length}" for one in images)
    return blake2b(_bytes_of(input_ids) + placed.encode(), digest_size=DIGEST_BYTES).digest()


def _likeliest(candidates: Sequence[Sample], sent: ChatMessage) -> Sample:
    """Return the sample among equivalent ones whose call ids or reasoning the client repeats, else the last one."""
    ids = [call.call_id for call in sent.calls]
    return max(
        enumerate(candidates),
        key=lambda one: (
            bool(ids) and [call.call_id for call in one[1].message.calls] == ids,
            bool(sent.reasoning) and one[1].message.reasoning.strip() == sent.reasoning.strip(),
            one[1].is_delivered and not one[1].never_trains,
            one[0],
        ),
    )[1]


def _is_whole(sample: Sample) -> bool:
    return sample.kept_ids is sample.generation.token_ids


def _path(leaf: Sample) -> list[Sample]:
    path = [leaf]
    while path[-1].turn.after is not None:
        path.append(path[-1].turn.after)
    return path[::-1]


def _placed(path: Sequence[Sample]) -> Iterator[tuple[Sample, int, int]]:
    """Yield each sample of a path with the start and stop of its tokens."""
    start = 0
    for sample in path:
        start += len(sample.turn.new_ids)
        stop = start + len(sample.generation.token_ids if sample is path[-1] else sample.kept_ids)
        yield sample, start, stop
        start = stop


def _told(path: Sequence[Sample], owners: Mapping[Sample, int], trains: set[Sample]) -> list[Json]:
    """Describe the turns of a path for reports.

    Each turn is a list: role of the last message, start and stop of the sampled tokens, index of the output that trains
    them (or "probe"), names of the called tools, and numbers of discarded tokens by reason.
    """
    told: list[Json] = []
    for sample, start, stop in _placed(path):
        unused: Counter[str] = Counter()
        for other in sample.turn.samples:
            if other is not sample and other not in trains:
                unused[_why_unused(other, sample)] += len(other.generation.token_ids)
        tools = [call.name[:MAX_NAME_CHARS] for call in sample.message.calls[:MAX_NAMES]]
        told.append([sample.turn.asked_by, start, stop, owners.get(sample, PROBE), list[Json](tools), dict(unused)])
    return told


def _why_unused(sample: Sample, used: Sample) -> str:
    if sample.never_trains:
        return PROBE
    if not sample.is_delivered:
        return "disconnected"
    return "choice" if sample.request_index == used.request_index else "retry"


def _trajectory(
    path: Sequence[Sample], own: Sequence[Sample], name: tuple[str, int, int], parent: int | None
) -> Trajectory:
    """Build the trajectory of a path, in which only `own` samples train."""
    leaf = path[-1]
    parts: list[tuple[IntArray, Generation | None]] = []
    for one in path:
        said = one.generation.token_ids if one is leaf else one.kept_ids
        parts += [(one.turn.new_ids, None), (said, one.generation if one in own else None)]
    joined = join_parts(parts)
    return Trajectory(
        prompt_uid=name[0],
        session_index=name[1],
        output_index=name[2],
        parent=parent,
        **joined,
        finish_reason=leaf.generation.finish_reason,
        routed_experts=join_experts((one.generation.routed_experts for one in own), len(joined["input_ids"])),
        timings=Timings(
            generate_s=sum(one.generate_s for one in own),
            preemptions=sum(one.generation.num_preempted for one in own),
        ),
        images=leaf.turn.images,
    )


ValueT = TypeVar("ValueT")
DIGEST_BYTES = 16


class Prefixes(Generic[ValueT]):
    """Values by token sequence. A search reads the prompt once, however many sequences are stored."""

    def __init__(self) -> None:
        """Start empty."""
        self._by_length: dict[int, dict[bytes, ValueT]] = {}

    def add(self, token_ids: IntArray, value: ValueT) -> None:
        """Store a value; it replaces that of an equal sequence."""
        self._by_length.setdefault(len(token_ids), {})[digest_of(token_ids)] = value

    def longest(self, prompt_ids: IntArray) -> tuple[ValueT | None, int]:
        """Return the value of the longest sequence with which a prompt begins, and its length; else (None, 0)."""
        read, start = blake2b(digest_size=DIGEST_BYTES), 0
        longest: tuple[ValueT | None, int] = (None, 0)
        for length in sorted(length for length in self._by_length if length <= len(prompt_ids)):
            read.update(_bytes_of(prompt_ids[start:length]))
            start = length
            if (value := self._by_length[length].get(read.digest())) is not None:
                longest = value, length
        return longest


def _bytes_of(token_ids: IntArray) -> bytes:
    return np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
