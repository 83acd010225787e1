"""Sessions of several turns with an environment, which observes each turn and may reward it."""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from rl_core.data import Json, Prompt
from rl_core.errors import SettingsError
from rl_core.record_fields import settings_record
from rl_core.registry import Registry
from rl_rollout.loops.conversation import Conversation, TurnLimits
from rl_rollout.loops.episode import Episode
from rl_rollout.loops.protocol import LoopContext, SessionLoop, SessionResult, describe_failure
from rl_rollout.loops.turns import Joined, Reply, TurnFormat, Turns, join_turns
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rewards.scorer import Scored
from rl_rollout.tools.blocking import BlockingCalls
from rl_rollout.user_errors import ends_the_run
from rl_rollout.user_files import find_in

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
    timeout_s: float = 60.0
    max_observation_chars: int = 8192
    limits: TurnLimits = field(default_factory=TurnLimits)
    turns: TurnFormat = field(default_factory=TurnFormat)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            SettingsError: timeout_s or max_observation_chars is not positive.
        """
        if not self.timeout_s > 0 or self.max_observation_chars < 1:
            raise SettingsError(
                f"an environment needs timeout_s > 0 and max_observation_chars >= 1; found {self.timeout_s} and "
                f"{self.max_observation_chars}."
            )


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
                return await self._settled(conversation, episode, ended_by="done")
            if generation.finish_reason == "length":
                return await self._settled(conversation, episode, ended_by="length")
            ended_by = "max_turns"
            if not conversation.is_last_turn:
                last_token = int(generation.token_ids[-1])
                if conversation.append(turns.reply_ids([Reply(text=observation)], last_token=last_token)):
                    continue
                ended_by = "context"
            conversation.mark_cut()
            return await self._settled(conversation, episode, ended_by=ended_by)

    async def _settled(self, conversation: Conversation, episode: Episode, *, ended_by: str) -> SessionResult:
        extras: dict[str, Json] = {"ended_by": ended_by, "num_turns": conversation.num_turns}
        if episode.earned is None:
            return await conversation.scored(extras=extras)
        scored = Scored(result=episode.earned, reward_s=episode.reward_s)
        return conversation.settled(scored, extras=extras)

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
