"""Agent loops: how a prompt becomes sessions, and each session trajectories."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

from rl_core.records import IntArray, Prompt, Trajectory
from rl_rollout.engines.protocol import RolloutEngine, SamplingParams
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rewards.scorer import RewardScorer

SEED_BITS = 52
"""Seeds stay below 2**52, so that seed + i is exact in JSON, int64 and a double."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """What one session gave.

    Attributes:
        trajectories: What trains; of a failed session, what there was, with reward None.
        failure: Why the session cannot train; None when it can.
    """

    trajectories: tuple[Trajectory, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """What a loop works with, for one prompt.

    Attributes:
        engine: Generates.
        sampling: How tokens are drawn; its seed, if any, is this prompt's own.
        scorer: Gives rewards.
        decode: Text of each token sequence, for rewards and people.
        tokenizer: For loops that have more than one turn; None where the caller gave none.
    """

    engine: RolloutEngine
    sampling: SamplingParams
    scorer: RewardScorer
    decode: Callable[[Sequence[IntArray]], list[str]]
    tokenizer: PromptTokenizer | None = None

    def session_sampling(self, session_index: int, *, turn: int = 0) -> SamplingParams:
        """How one session draws its turn, independent of the other sessions and turns.

        Turn 0 of session i is the draw that sample i of one request for all sessions would be.
        """
        seed = self.sampling.seed
        if seed is None:
            return self.sampling
        session_seed = seed + session_index
        return replace(self.sampling, seed=session_seed if turn == 0 else stable_seed(session_seed, f"turn {turn}"))


class AgentLoop(Protocol):
    """Runs the sessions of one prompt.

    A loop may also have `async def start(self, tokenizer: PromptTokenizer | None) -> None`, which is awaited once
    before the first group and refuses what cannot work, and `def close(self) -> None`.
    """

    async def run_group(self, prompt: Prompt, *, num_sessions: int, context: LoopContext) -> list[SessionResult]:
        """One result a session, in order; raises only when no session can have a result."""
        ...


class SessionLoop(ABC):
    """Base of loops that are written for one session; a session that raises fails alone."""

    @abstractmethod
    async def run_session(self, prompt: Prompt, *, session_index: int, context: LoopContext) -> SessionResult:
        """Run one session from its prompt to its scored trajectories."""

    async def run_group(self, prompt: Prompt, *, num_sessions: int, context: LoopContext) -> list[SessionResult]:
        """All sessions of a prompt at once."""
        sessions = (self._guarded(prompt, index, context) for index in range(num_sessions))
        return list(await asyncio.gather(*sessions))

    async def _guarded(self, prompt: Prompt, session_index: int, context: LoopContext) -> SessionResult:
        try:
            return await self.run_session(prompt, session_index=session_index, context=context)
        except Exception as error:
            return SessionResult(failure=describe_error(error))


def describe_error(error: BaseException) -> str:
    """An error in one line, as a session's failure."""
    return f"{type(error).__name__}: {error}"


def stable_seed(seed: int, name: str) -> int:
    """A seed for a name, the same in every process and on every machine; below 2**SEED_BITS."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
