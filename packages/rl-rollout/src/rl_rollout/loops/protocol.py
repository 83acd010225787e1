"""Interfaces of agent loops, which turn a prompt into sessions, and each session into trajectories; agents' tasks."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Protocol

from rl_core.data import IntArray, Json, Prompt, Trajectory, encodable
from rl_core.errors import RLError, RolloutError
from rl_core.record_fields import record
from rl_rollout.engines.protocol import RolloutEngine, SamplingParams
from rl_rollout.prompts.image_tokens import message_text
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rewards.answers import opens_thinking
from rl_rollout.rewards.outputs import preview_error
from rl_rollout.rewards.protocol import AgentRun, RewardResult
from rl_rollout.rewards.scorer import RewardScorer
from rl_rollout.user_code import describe_raised, ends_the_run

SEED_BITS = 52
"""Seeds are below 2**52, so that seed + i is exact in JSON, int64 and double."""


@record
class SessionResult:
    """The result of one session.

    Attributes:
        trajectories: Trajectories to train on. Those of a failed session have reward None.
        failure: Why the session cannot train; None if it can.
    """

    trajectories: tuple[Trajectory, ...] = ()
    failure: str | None = None


@record
class LoopContext:
    """The objects that a loop works with, for one prompt.

    Attributes:
        engine: The engine.
        sampling: Sampling parameters. A seed, if any, is this prompt's own.
        scorer: Computes rewards.
        decode: Decodes token sequences, for rewards and display.
        tokenizer: Required by loops with more than one turn. None if the caller passed none.
    """

    engine: RolloutEngine
    sampling: SamplingParams
    scorer: RewardScorer
    decode: Callable[[Sequence[IntArray]], list[str]]
    tokenizer: PromptTokenizer | None = None

    def session_sampling(self, session_index: int, *, turn: int = 0) -> SamplingParams:
        """Return the sampling parameters of one turn, independent of other sessions and turns.

        Turn 0 of session i is sampled like sample i of one request for all sessions.
        """
        seed = self.sampling.seed
        if seed is None:
            return self.sampling
        session_seed = seed + session_index
        return replace(self.sampling, seed=session_seed if turn == 0 else stable_seed(session_seed, f"turn {turn}"))

    def begins_thinking(self, prompt_ids: IntArray) -> bool:
        """Return True if a turn's prompt opens its thinking, also in the beginning of an answer that it continues."""
        if self.tokenizer is None:
            return opens_thinking(*self.decode([prompt_ids]))
        (text,) = self.tokenizer.decode([prompt_ids], skip_special_tokens=False)
        return opens_thinking(text, self.tokenizer.special_tokens)


class AgentLoop(Protocol):
    """Runs the sessions of one prompt.

    A loop may also have these methods:

    - `async def start(self, tokenizer: PromptTokenizer | None) -> None`, awaited once before the first group; it raises
      if the loop cannot work.
    - `def close(self) -> None`.
    - `async def check(self, tokenizer: PromptTokenizer | None) -> list[str]`, awaited before a model loads. It raises
      what `start` would raise, leaves nothing running, and returns lines for the plan of a dry run.
    - `def judged(self, prompt: Prompt, session: SessionResult, context: LoopContext) -> RewardInput`, if the input of
      its reward follows from the trajectories, so that stored sessions can be scored again.
    """

    async def run_group(self, prompt: Prompt, *, num_sessions: int, context: LoopContext) -> list[SessionResult]:
        """Return one result per session, in order. Raise only if no session can have a result."""
        ...


class SessionLoop(ABC):
    """Base of loops that run one session at a time. An exception fails only that session."""

    @abstractmethod
    async def run_session(self, prompt: Prompt, *, session_index: int, context: LoopContext) -> SessionResult:
        """Run one session from its prompt to its scored trajectories."""

    async def run_group(self, prompt: Prompt, *, num_sessions: int, context: LoopContext) -> list[SessionResult]:
        """Run all sessions of a prompt at once."""
        sessions = (self._guarded(prompt, index, context) for index in range(num_sessions))
        settled = await asyncio.gather(*sessions, return_exceptions=True)
        return [  # a remaining error is a cancellation of a single session
            SessionResult(failure=describe_failure(self, one)) if isinstance(one, BaseException) else one
            for one in settled
        ]

    async def _guarded(self, prompt: Prompt, session_index: int, context: LoopContext) -> SessionResult:
        try:
            return await self.run_session(prompt, session_index=session_index, context=context)
        except BaseException as error:
            if ends_the_run(error):
                raise
            return SessionResult(failure=describe_failure(self, error))


@record
class AgentTask:
    """The task of a third-party agent, which calls the policy through the gateway.

    Attributes:
        prompt: The row, with its messages, columns and ground truth. Images are `data:` URLs, as OpenAI's clients send
            them.
        base_url: URL of the gateway. Clients of OpenAI's API append "/v1".
        api_key: Key of the session.
        session_index: Index of the session in the group.
    """

    prompt: Prompt
    base_url: str
    api_key: str
    session_index: int = 0

    @property
    def text(self) -> str:
        """The prompt as one text."""
        if not self.prompt.messages:
            return str(self.prompt.columns.get("prompt", ""))
        return "\n\n".join(map(message_text, self.prompt.messages))

    def shown(self, columns: tuple[str, ...]) -> dict[str, Json]:
        """Return the prompt for a program: without its ground truth, and with only these columns."""
        prompt = self.prompt
        chosen = {name: prompt.columns.get(name) for name in columns}
        return {"uid": prompt.uid, "prompt": self.text, "messages": list(prompt.messages), "columns": chosen}


@record
class AgentOutcome:
    """The outcome of a third-party agent.

    Attributes:
        run: How its program ran; None if it was not a program.
        reward: The reward that it returned; None leaves it to the scorer.
    """

    run: AgentRun | None = None
    reward: RewardResult | None = None


def describe_failure(loop: object, error: BaseException) -> str:
    """Describe why a session failed: what raised, the error, and the place.

    This package's own errors are described by their message alone, because an engine error, for example, is unrelated
    to the loop that received it.
    """
    if isinstance(error, RolloutError):
        return encodable(str(error))
    if isinstance(error, RLError):
        return preview_error(error)
    return describe_raised(loop_name(loop), error)


def loop_name(loop: object) -> str:
    """Return the name of a loop, for messages."""
    return f"agent loop {type(loop).__name__}"


def stable_seed(seed: int, name: str) -> int:
    """Return a seed for a name, below 2**SEED_BITS and equal in every process and on every machine."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
