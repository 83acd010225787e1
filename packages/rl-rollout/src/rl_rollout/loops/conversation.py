"""A session of several turns, as token ids. It may continue in a new trajectory when the context is full."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

import numpy as np

from rl_core.data import FinishReason, ImageSpan, IntArray, Json, Prompt, Timings, Trajectory
from rl_core.errors import EngineError, SettingsError
from rl_core.record_fields import PositiveInt, settings_record
from rl_rollout.engines.protocol import GenerateRequest, Generation
from rl_rollout.loops.outcomes import join_experts, join_parts
from rl_rollout.loops.protocol import LoopContext, SessionResult
from rl_rollout.loops.single_turn import with_reward
from rl_rollout.rewards.scorer import Scored, reward_input


@settings_record
class TurnLimits:
    """Limits of a session.

    The sampling parameters' max_tokens limits all tokens after the prompt of a trajectory, including replies.

    Attributes:
        max_turns: Maximum number of the model's turns.
        max_turn_tokens: Maximum tokens of one turn; None applies only the other limits.
        on_context_full: "stop" ends the session when a reply no longer fits. "new_trajectory" continues, when a reply
            leaves less than a quarter of the room, in a new trajectory that begins with the prompt and the latest
            turns.
        max_trajectories: Maximum number of trajectories of a session, for "new_trajectory".
    """

    max_turns: PositiveInt = 8
    max_turn_tokens: PositiveInt | None = None
    on_context_full: Literal["stop", "new_trajectory"] = "stop"
    max_trajectories: PositiveInt = 4


@dataclass(slots=True, kw_only=True)
class _Open:
    """The trajectory in progress.

    Attributes:
        parts: Token ids of the prompt, then alternately of sampled turns and replies.
        sampled: The engine's output for each part; None for parts that were not sampled.
        images: The images among the tokens of each part.
        first_own: Index of the first part after the prompt and the turns that an earlier trajectory trains.
    """

    parts: list[IntArray]
    sampled: list[Generation | None]
    images: list[tuple[ImageSpan, ...]]
    first_own: int
    generate_s: float = 0.0
    tools_s: float = 0.0
    num_preempted: int = 0
    finish_reason: FinishReason = "stop"

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.parts))

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        """The images among all tokens."""
        starts = accumulate(map(len, self.parts), initial=0)
        return tuple(
            replace(one, start=start + one.start)
            for start, images in zip(starts, self.images, strict=False)
            for one in images
        )

    def add(self, ids: IntArray, generation: Generation | None = None, *, images: tuple[ImageSpan, ...] = ()) -> None:
        self.parts.append(ids)
        self.sampled.append(generation)
        self.images.append(images)

    def close(self, prompt: Prompt, *, session_index: int, output_index: int) -> Trajectory:
        trained = [*[None] * self.first_own, *self.sampled[self.first_own :]]
        joined = join_parts(list(zip(self.parts, trained, strict=True)))
        experts = (generation.routed_experts for generation in trained if generation is not None)
        return Trajectory(
            prompt_uid=prompt.uid,
            session_index=session_index,
            output_index=output_index,
            **joined,
            finish_reason=self.finish_reason,
            routed_experts=join_experts(experts, len(joined["input_ids"])),
            timings=Timings(generate_s=self.generate_s, tools_s=self.tools_s, preemptions=self.num_preempted),
            images=self.spans,
        )


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A session in progress.

    Attributes:
        prompt: Its prompt.
        prompt_ids: [P] int32 input of the first turn.
        session_index: Index of the session in the group.
        context: Objects that the loop works with.
        limits: Limits of the session.
        stop_token_ids: Tokens that end a turn, in addition to those of the sampling parameters.
        num_turns: Number of sampled turns.
    """

    prompt: Prompt
    prompt_ids: IntArray
    session_index: int
    context: LoopContext
    limits: TurnLimits
    stop_token_ids: tuple[int, ...] = ()
    num_turns: int = 0
    _open: _Open = field(init=False)
    _closed: list[Trajectory] = field(init=False, default_factory=list)
    _turns: list[Generation] = field(init=False, default_factory=list)
    _turn_prompt: IntArray = field(init=False)

    def __post_init__(self) -> None:
        """Start with the prompt."""
        images = self.prompt.images
        if images and self.prompt_ids is not self.prompt.input_ids:  # rendered again, with tools or an observation
            images = self._image_spans(self.prompt_ids, [one.digest for one in images])
        self._open = _Open(parts=[self.prompt_ids], sampled=[None], images=[images], first_own=1)
        self._turn_prompt = self.prompt_ids

    @property
    def is_last_turn(self) -> bool:
        """True if no further turn may be sampled."""
        return self.num_turns >= self.limits.max_turns

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Return all trajectories so far, unscored."""
        last = self._open.close(self.prompt, session_index=self.session_index, output_index=len(self._closed))
        return (*self._closed, last)

    async def sample(self) -> Generation:
        """Sample the model's next turn.

        Raises:
            EngineError: The engine cannot serve the request, aborted it, or returned no tokens.
        """
        request = self._request()
        self._turn_prompt = request.input_ids
        started_at = time.perf_counter()
        (generation,) = await self.context.engine.generate(request)
        current = self._open
        current.generate_s += time.perf_counter() - started_at
        current.num_preempted += generation.num_preempted
        current.finish_reason = generation.finish_reason
        current.add(generation.token_ids, generation)
        self.num_turns += 1
        if generation.finish_reason == "abort":
            raise EngineError(f"the engine aborted turn {self.num_turns} after {len(generation.token_ids)} tokens.")
        if not len(generation.token_ids):
            raise EngineError(f"the engine returned no tokens in turn {self.num_turns}.")
        self._turns.append(generation)
        return generation

    def append(self, reply_ids: IntArray, *, images: Sequence[str] = ()) -> bool:
        """Append replies. Return False, and append nothing, if they, their images and a further turn do not fit.

        Args:
            reply_ids: Tokens of the replies.
            images: Digests of the images among them, in order.
        """
        reply_images = self._image_spans(reply_ids, images)
        if images and len(self._open.spans) + len(images) > self.context.engine.traits.max_images:
            return False
        room = self._max_tokens - self._open.num_tokens - len(reply_ids)
        may_go_on = (
            self.limits.on_context_full == "new_trajectory" and len(self._closed) + 1 < self.limits.max_trajectories
        )
        if room >= (self._room // 4 if may_go_on else 1):
            self._open.add(reply_ids, images=reply_images)
            return True
        fresh = self._compacted(reply_ids, reply_images) if may_go_on else None
        if fresh is None:
            return False
        self.mark_cut()
        self._closed.append(self.trajectories[-1])
        self._open = fresh
        return True

    def add_tools_time(self, seconds: float) -> None:
        """Add time spent in tools."""
        self._open.tools_s += seconds

    def mark_cut(self) -> None:
        """Record that a limit ended the trajectory."""
        self._open.finish_reason = "length"

    def failed(self, reason: str) -> SessionResult:
        """Return the trajectories so far, as a failed session."""
        return SessionResult(trajectories=self.trajectories, failure=reason)

    async def scored(self, *, text: str | None = None, extras: Mapping[str, Json]) -> SessionResult:
        """Return the session with its reward from the scorer.

        Args:
            text: The text to judge; the last turn's by default.
            extras: Stored with the last trajectory.
        """
        if text is None:
            (text,) = self.context.decode([self._turns[-1].token_ids])
        given = reward_input(
            self.prompt,
            text=text,
            ids=np.concatenate([turn.token_ids for turn in self._turns]),
            finish_reason=self._open.finish_reason,
            begins_thinking=self.context.begins_thinking(self._turn_prompt),
        )
        (scored,) = await self.context.scorer.score([given])
        return self.settled(scored, extras=extras)

    def settled(self, scored: Scored, *, extras: Mapping[str, Json]) -> SessionResult:
        """Return the session with a reward on every trajectory, and its timings on the last."""
        *others, last = self.trajectories
        return with_reward([*others, replace(last, extras={**last.extras, **extras})], scored)

    @property
    def _max_tokens(self) -> int:
        longest = len(self.prompt_ids) + self.context.sampling.max_tokens
        return min(longest, self.context.engine.traits.max_model_len)

    @property
    def _room(self) -> int:
        """Number of tokens that fit after the prompt."""
        return max(self._max_tokens - len(self.prompt_ids), 4)

    def _request(self) -> GenerateRequest:
        sampling = self.context.session_sampling(self.session_index, turn=self.num_turns)
        room = self._max_tokens - self._open.num_tokens
        if self.limits.max_turn_tokens is not None:
            room = min(room, self.limits.max_turn_tokens)
        return GenerateRequest(
            input_ids=np.concatenate(self._open.parts).astype(np.int32, copy=False),
            sampling=replace(
                sampling,
                max_tokens=max(room, 1),  # the engine refuses a prompt that leaves no room
                stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *self.stop_token_ids))),
            ),
            request_id=f"{self.prompt.uid}/{self.session_index}",
            images=self._open.spans,
        )

    def _image_spans(self, ids: IntArray, digests: Sequence[str]) -> tuple[ImageSpan, ...]:
        if not digests:
            return ()
        if self.context.tokenizer is None or self.context.tokenizer.images is None:
            raise SettingsError("sessions with images need a tokenizer with image_folder, the folder of their images.")
        return self.context.tokenizer.images.spans(ids, digests)

    def _compacted(self, reply_ids: IntArray, reply_images: tuple[ImageSpan, ...]) -> _Open | None:
        """Start a trajectory with the prompt and the latest turns, in half of the room.

        None if not even one turn fits.
        """
        parts, sampled = [*self._open.parts[1:], reply_ids], [*self._open.sampled[1:], None]
        images = [*self._open.images[1:], reply_images]
        starts = [index for index, generation in enumerate(sampled) if generation is not None]
        half = len(self.prompt_ids) + self._room // 2
        kept = starts[-1]
        if len(self.prompt_ids) + sum(map(len, parts[kept:])) >= self._max_tokens:
            return None
        for start in starts[-2::-1]:
            if len(self.prompt_ids) + sum(map(len, parts[start:])) > half:
                break
            kept = start
        return _Open(
            parts=[self.prompt_ids, *parts[kept:]],
            sampled=[None, *sampled[kept:]],
            images=[self._open.images[0], *images[kept:]],
            first_own=1 + len(parts) - kept,
        )
