"""Sessions of several turns with an environment, which observes each turn and may reward it."""

import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, Protocol

import numpy as np
import structlog
from annotated_types import Gt

from rl_core.data import Json, Prompt, encodable
from rl_core.errors import DataError, RolloutError, SettingsError
from rl_core.record_fields import PositiveInt, settings_record
from rl_core.registry import Registry
from rl_rollout.loops.conversation import Conversation, TurnLimits
from rl_rollout.loops.protocol import LoopContext, SessionLoop, SessionResult, describe_failure
from rl_rollout.loops.turns import Joined, Reply, TurnFormat, Turns, join_turns
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rewards.outputs import preview_error, read_output, typed_preview
from rl_rollout.rewards.protocol import RewardOutput, RewardResult
from rl_rollout.rewards.scorer import Scored
from rl_rollout.tools.protocol import shortened
from rl_rollout.user_code import BlockingCalls, Outcome, describe_raised, ends_the_run, find_in, outcome_within

log = structlog.get_logger(__name__)

HURRIED_S = 1.0
"""Maximum seconds for an environment to close when the run is ending."""


class Environment(Protocol):
    """One episode; each session creates a new object. Methods may be `def`, which may block, or `async def`.

    An environment may also have `close()`, which is called when its session ends, however it ends.
    """

    def reset(self, prompt: Prompt) -> str | None:
        """Return the text after the prompt; None adds nothing."""
        ...

    def step(self, text: str) -> tuple[str, RewardOutput | None, bool]:
        """Return the text after the model's turn, the turn's reward if it has one, and whether the episode is done.

        A reward is a number, or a mapping with "reward" and named components, as for reward functions.
        """
        ...


class Episode:
    """An environment, its rewards and its times.

    Attributes:
        earned: Sums of the steps' rewards and of their components by name; None if no step returned any.
        reward_s: Seconds of the steps with a reward.
        other_s: Seconds of `reset` and of the other steps.
    """

    def __init__(
        self, make: Callable[[], Any], blocking: BlockingCalls, *, timeout_s: float, max_observation_chars: int
    ) -> None:
        """Create without an environment.

        Args:
            make: Creates the environment.
            blocking: Runs methods that are not `async def`.
            timeout_s: Maximum seconds of one call.
            max_observation_chars: Maximum characters of an observation; longer ones are truncated.
        """
        self.earned: RewardResult | None = None
        self.reward_s = 0.0
        self.other_s = 0.0
        self._make = make
        self._blocking = blocking
        self._timeout_s = timeout_s
        self._max_observation_chars = max_observation_chars
        self._environment: Any = None

    async def reset(self, prompt: Prompt) -> str | None:
        """Create and reset the environment.

        Raises:
            RolloutError: It raised, timed out, or did not return a string or None. The message has the details.
        """
        started_at = time.perf_counter()
        self._environment = await self._guarded("__init__", self._blocking.run(self._make, timeout_s=self._timeout_s))
        observation = await self._call("reset", prompt)
        self.other_s += time.perf_counter() - started_at
        if observation is not None and not isinstance(observation, str):
            raise RolloutError(
                f"the environment's reset returned {typed_preview(observation)}; expected a string or None."
            )
        return None if observation is None else self._readable(observation)

    async def step(self, text: str) -> tuple[str, bool]:
        """Return the observation, and whether the episode is over.

        Raises:
            RolloutError: It raised, timed out, or did not return observation, reward and is_done.
        """
        started_at = time.perf_counter()
        outcome = await self._call("step", text)
        elapsed_s = time.perf_counter() - started_at
        if not isinstance(outcome, tuple | list) or len(outcome) != 3:
            raise RolloutError(
                f"the environment's step returned {typed_preview(outcome)}; expected (observation, reward or None, "
                "is_done)."
            )
        observation, reward, is_done = outcome
        if not isinstance(observation, str):
            raise RolloutError(
                f"the environment's step returned observation = {typed_preview(observation)}; expected a string."
            )
        if not isinstance(is_done, bool | np.bool_):
            raise RolloutError(
                f"the environment's step returned is_done = {typed_preview(is_done)}; expected True or False."
            )
        if reward is None:
            self.other_s += elapsed_s
        else:
            self.reward_s += elapsed_s
            self._earn(reward)
        return self._readable(observation), bool(is_done)

    def hurry(self) -> None:
        """Limit closing to a second, because the run is ending."""
        self._timeout_s = min(self._timeout_s, HURRIED_S)

    async def close(self) -> None:
        """Close the environment. A failure to close does not affect its session."""
        if not callable(getattr(self._environment, "close", None)):
            return
        try:
            await self._call("close")
        except RolloutError as error:
            log.warning("environment_not_closed", reason=str(error))

    def _earn(self, reward: Any) -> None:
        earned = self.earned or RewardResult(reward=0.0)
        whose = "the environment's step returned"
        try:
            given = read_output(reward)
            whose = "the rewards of the environment's steps add up to"
            names = {**earned.components, **given.components}
            self.earned = read_output(
                RewardResult(
                    reward=earned.reward + given.reward,
                    components={n: earned.components.get(n, 0.0) + given.components.get(n, 0.0) for n in names},
                    extras={**earned.extras, **given.extras},
                )
            )
        except DataError as error:
            raise RolloutError(f"{whose} {error}") from error
        except Exception as error:  # user-defined mappings or numbers can raise anything when read
            raise RolloutError(f"{whose} a reward that cannot be read ({preview_error(error)})") from error

    def _readable(self, observation: str) -> str:
        """Return an observation as the model reads it."""
        return encodable(shortened(observation, max_chars=self._max_observation_chars))

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._guarded(name, self._run(name, *arguments))

    async def _run(self, name: str, *arguments: Any) -> Outcome:
        method = getattr(self._environment, name)
        if not inspect.iscoroutinefunction(method):
            return await self._blocking.run(lambda: method(*arguments), timeout_s=self._timeout_s)
        return await outcome_within(self._timeout_s, method(*arguments))

    async def _guarded(self, name: str, call: Awaitable[Outcome]) -> Any:
        """Return a call's result.

        Raises:
            RolloutError: It raised, or took too long.
        """
        try:
            value, error = await call
        except TimeoutError as late:
            raise RolloutError(f"the environment's {name} took longer than {self._timeout_s:g} s") from late
        except BaseException as raised:
            value, error = None, raised
        if error is None:
            return value
        if ends_the_run(error):
            raise error
        raise RolloutError(describe_raised(f"the environment's {name}", error)) from error


ENVIRONMENTS: Registry[Any] = Registry("environment", {}, group="rl_rollout.environments")


@settings_record
class EnvironmentOptions:
    """Options of the `environment` loop.

    Attributes:
        environment: Registered name, or `path.py:Class`.
        arguments: Keyword arguments of each environment.
        timeout_s: Maximum seconds of one `reset` or `step`; then the session fails.
        max_observation_chars: Maximum characters of an observation; longer ones are truncated with a note.
        limits: Limits of a session.
        turns: Format of turns.
    """

    environment: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: Annotated[float, Gt(0)] = 60.0
    max_observation_chars: PositiveInt = 8192
    limits: TurnLimits = field(default_factory=TurnLimits)
    turns: TurnFormat = field(default_factory=TurnFormat)


class EnvironmentLoop(SessionLoop):
    """Alternates between generation and environment steps, and appends observations as masked tokens.

    A session's reward is the sum over its steps, and so is each component. If no step returned a reward, the scorer
    judges the last turn. The time of steps with a reward is `reward_s`. The time of other steps and of `reset` is
    `tools_s`. A turn truncated for length is the last one, and is stepped too.
    """

    Options = EnvironmentOptions

    def __init__(self, options: EnvironmentOptions) -> None:
        """Find the environment.

        Raises:
            SettingsError: It does not exist, or has no `reset` or `step`.
        """
        self._options = options
        self._make = _factory(options)
        self._blocking = BlockingCalls()
        self._joined: Joined | None = None

    async def start(self, tokenizer: PromptTokenizer | None) -> None:
        """Check tokenizer and chat template.

        Raises:
            SettingsError: There is no tokenizer, a stop token is unknown, or the chat template cannot join turns.
        """
        if tokenizer is None:
            raise SettingsError("the agent loop 'environment' needs a tokenizer. Pass tokenizer=... to Rollout.")
        self._joined = join_turns(tokenizer, self._options.turns, role="user")

    async def check(self, tokenizer: PromptTokenizer | None) -> list[str]:
        """Check the same as `start`. Adds nothing to a plan."""
        await self.start(tokenizer)
        return []

    def close(self) -> None:
        """Stop the idle threads."""
        self._blocking.close()

    async def run_group(self, prompt: Prompt, *, num_sessions: int, context: LoopContext) -> list[SessionResult]:
        """See `AgentLoop.run_group`. Starts if not yet started."""
        if self._joined is None:
            await self.start(context.tokenizer)
        return await super().run_group(prompt, num_sessions=num_sessions, context=context)

    async def run_session(self, prompt: Prompt, *, session_index: int, context: LoopContext) -> SessionResult:
        """See `SessionLoop.run_session`."""
        turns, stop_token_ids = self._ready
        episode = Episode(
            self._make,
            self._blocking,
            timeout_s=self._options.timeout_s,
            max_observation_chars=self._options.max_observation_chars,
        )
        try:
            observation = await episode.reset(prompt)
            conversation = Conversation(
                prompt=prompt,
                prompt_ids=turns.prompt_ids(prompt, observation=observation),
                session_index=session_index,
                context=context,
                limits=self._options.limits,
                stop_token_ids=stop_token_ids,
            )
            conversation.add_tools_time(episode.other_s)
            try:
                return await self._converse(conversation, episode, turns)
            except BaseException as error:
                if ends_the_run(error):
                    raise
                return conversation.failed(describe_failure(self, error))
        except BaseException as error:
            if ends_the_run(error):
                episode.hurry()
            raise
        finally:
            await episode.close()

    async def _converse(self, conversation: Conversation, episode: Episode, turns: Turns) -> SessionResult:
        while True:
            generation = await conversation.sample()
            (text,) = conversation.context.decode([generation.token_ids])
            before_s = episode.other_s
            observation, is_done = await episode.step(text)
            conversation.add_tools_time(episode.other_s - before_s)
            if is_done:
                ended_by = "done"
                break
            if generation.finish_reason == "length":
                ended_by = "length"
                break
            if conversation.is_last_turn:
                ended_by = "max_turns"
                break
            reply_ids = turns.reply_ids([Reply(text=observation)], last_token=int(generation.token_ids[-1]))
            if not conversation.append(reply_ids):
                ended_by = "context"
                break
        if ended_by in ("max_turns", "context"):
            conversation.mark_cut()
        extras: dict[str, Json] = {"ended_by": ended_by, "num_turns": conversation.num_turns}
        if episode.earned is None:
            return await conversation.scored(extras=extras)
        return conversation.settled(Scored(result=episode.earned, reward_s=episode.reward_s), extras=extras)

    @property
    def _ready(self) -> Joined:
        if self._joined is None:
            raise SettingsError("the agent loop 'environment' was not started.")
        return self._joined


def _factory(options: EnvironmentOptions) -> Callable[[], Any]:
    reference = options.environment
    found = find_in(ENVIRONMENTS, reference)
    if not callable(found) or (
        isinstance(found, type) and not all(callable(getattr(found, name, None)) for name in ("reset", "step"))
    ):
        raise SettingsError(f"environment {reference!r} must be a class with `reset` and `step`; found {found!r}.")
    return lambda: found(**options.arguments)
