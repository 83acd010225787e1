"""Third-party agents: each session runs one, which calls the policy through the gateway."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from rl_core.data import Json, Prompt
from rl_core.errors import DataError, RolloutError, SettingsError
from rl_core.registry import Registry
from rl_core.secret_settings import hide
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, RolloutEngine, SamplingParams
from rl_rollout.gateway import Gateway, Session
from rl_rollout.loops.agent_options import AgentOptions
from rl_rollout.loops.agent_program import AgentProgram, describe_run
from rl_rollout.loops.protocol import AgentOutcome, AgentTask, LoopContext, SessionLoop, SessionResult, describe_failure
from rl_rollout.loops.single_turn import with_reward
from rl_rollout.prompts.image_tokens import with_data_urls
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rewards.outputs import read_output
from rl_rollout.rewards.protocol import AgentRun, RewardInput, RewardResult
from rl_rollout.rewards.scorer import Scored, function_name, reward_input
from rl_rollout.user_code import describe_raised, ends_the_run, find_in, outcome_within

AGENTS: Registry[Any] = Registry("agent", {}, group="rl_rollout.agents")


class AgentFunction:
    """Runs an `async def` with one `AgentTask`. It may return the session's reward."""

    def __init__(self, options: AgentOptions) -> None:
        """Find the function.

        Raises:
            SettingsError: It does not exist, or is not an `async def`.
        """
        self._function: Callable[[AgentTask], Any] = find_in(AGENTS, str(options.function))
        self._time_limit_s = options.time_limit_s
        if not inspect.iscoroutinefunction(self._function):
            raise SettingsError(f"agent {options.function!r} must be an `async def`; found {self._function!r}.")

    async def check(self) -> str:
        """Return a line for a plan."""
        return f"agent: {function_name(self._function)}"

    @asynccontextmanager
    async def running(self, task: AgentTask) -> AsyncIterator[AgentOutcome]:
        """Run the function and yield its outcome.

        Raises:
            RolloutError: It raised.
            DataError: Its result is not a reward.
        """
        try:
            value, error = await outcome_within(self._time_limit_s, self._function(task))
        except TimeoutError:
            outcome = AgentOutcome(run=AgentRun(ended="wall_time"))
        else:
            outcome = self._outcome(value, error)
        yield outcome

    def _outcome(self, value: Any, error: BaseException | None) -> AgentOutcome:
        name = f"agent {function_name(self._function)!r}"
        if error is not None:
            raise RolloutError(describe_raised(name, error)) from error
        try:
            return AgentOutcome(reward=None if value is None else read_output(value))
        except DataError as invalid:
            raise DataError(f"{name} returned {invalid}") from invalid


class RemoteAgents:
    """Offers sessions to remote workers, which claim and finish them at the gateway."""

    def __init__(self, options: AgentOptions, gateway: Callable[[], Gateway | None]) -> None:
        """Store the options, and a way to find the gateway once it serves."""
        self._options, self._gateway = options, gateway

    async def check(self) -> str:
        """Return a line for a plan."""
        gateway = self._options.gateway
        return f"agent: workers that claim sessions at {gateway.host}:{gateway.port}/sessions/claim"

    @asynccontextmanager
    async def running(self, task: AgentTask) -> AsyncIterator[AgentOutcome]:
        """Offer a session to remote workers, and yield its outcome.

        Raises:
            RolloutError: No worker claimed it or finished it in time.
        """
        gateway = self._gateway()
        if gateway is None:
            raise RolloutError("the agent loop was closed.")
        session, shown = gateway.sessions.by_key(task.api_key), task.shown(self._options.columns)
        await gateway.offers.finished(session, shown, deadline_s=self._options.time_limit_s)
        if session.reward is None:
            yield AgentOutcome()
        else:
            yield AgentOutcome(reward=RewardResult(reward=session.reward, components=session.reward_components))


class AgentsLoop(SessionLoop):
    """Runs a program as a session. Its gateway requests become trajectories, which the scorer rewards.

    A session trains with its reward however the program ends: with an error, killed, or at a limit. A session fails
    only for reasons outside the program: it cannot start, its workspace cannot be copied, or the engine, the gateway or
    the sandbox failed.
    """

    Options = AgentOptions

    def __init__(self, options: AgentOptions) -> None:
        """Store the options. Nothing runs yet."""
        self._options = options
        self._agents: AgentProgram | AgentFunction | RemoteAgents
        if options.remote:
            self._agents = RemoteAgents(options, lambda: self._gateway)
        else:
            self._agents = AgentFunction(options) if options.function else AgentProgram(options)
        self._gateway: Gateway | None = None
        self._ready: asyncio.Future[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(options.max_concurrent)
        self._engines = SessionEngines()

    async def start(self, tokenizer: PromptTokenizer | None) -> None:
        """Check the command and the chat template, and serve on this event loop, unless already done.

        Raises:
            SettingsError: The command or the template does not work, or the gateway cannot listen.
        """
        loop = asyncio.get_running_loop()
        if self._ready is None or self._ready.get_loop() is not loop:
            self.close()
            self._ready = loop.create_future()
            self._serving = loop.create_task(self._serve(tokenizer, self._ready))
        await asyncio.shield(self._ready)

    async def _serve(self, tokenizer: PromptTokenizer | None, ready: "asyncio.Future[None]") -> None:
        """Serve until cancelled, or until the event loop ends."""
        try:
            await self._agents.check()
            gateway = self._make_gateway(tokenizer)
        except Exception as error:
            ready.set_exception(error)
            return
        try:
            await gateway.start()
            self._gateway, self._slots = gateway, asyncio.Semaphore(self._options.max_concurrent)
            ready.set_result(None)
            await asyncio.Event().wait()
        except Exception as error:
            ready.set_exception(error)
        finally:
            await gateway.close()

    async def check(self, tokenizer: PromptTokenizer | None) -> list[str]:
        """Check the same as `start`, leave nothing running, and describe what a session runs."""
        line = await self._agents.check()
        gateway = self._make_gateway(tokenizer)
        await gateway.start()
        await gateway.close()
        reasoning = self._options.gateway.service.reasoning
        return [line, f"the chat template joins its turns, and {reasoning}s reasoning"]

    def close(self) -> None:
        """Stop serving when the event loop runs next."""
        if self._serving is not None and not self._serving.get_loop().is_closed():
            self._serving.cancel()
        self._serving = self._ready = self._gateway = None

    async def run_group(self, prompt: Prompt, *, num_sessions: int, context: LoopContext) -> list[SessionResult]:
        """See `AgentLoop.run_group`. Starts if not yet started on this event loop."""
        await self.start(context.tokenizer)
        return await super().run_group(prompt, num_sessions=num_sessions, context=context)

    async def run_session(self, prompt: Prompt, *, session_index: int, context: LoopContext) -> SessionResult:
        """See `SessionLoop.run_session`."""
        gateway = self._gateway
        if gateway is None:
            raise RolloutError("the agent loop was closed.")
        async with self._slots:
            session = gateway.open(
                prompt.uid,
                session_index,
                sampling=lambda turn: context.session_sampling(session_index, turn=turn),
                limits=self._options.limits,
            )
            self._engines.add(session, context.engine)
            try:
                return await self._run(gateway, session, prompt, context)
            except BaseException as error:
                if ends_the_run(error):
                    raise
                if not session.faults:  # an engine fault is the cause of the agent's error
                    session.failure = describe_failure(self, error)
                return await gateway.finish(session)
            finally:
                gateway.sessions.forget(session)
                self._engines.drop(session)

    def judged(self, prompt: Prompt, session: SessionResult, context: LoopContext) -> RewardInput:
        """Return the model's last response as its reward judges it. How the program ran is not stored."""
        last = session.trajectories[-1]
        stop = int(np.flatnonzero(last.loss_mask)[-1]) + 1
        start = int(np.flatnonzero(~last.loss_mask[:stop]).max(initial=-1)) + 1
        ids = last.input_ids[start:stop]
        (text,) = context.decode([ids])
        begins_thinking = context.begins_thinking(last.input_ids[:start])
        return reward_input(
            prompt, text=text, ids=ids, finish_reason=last.finish_reason, begins_thinking=begins_thinking
        )

    async def _run(self, gateway: Gateway, session: Session, prompt: Prompt, context: LoopContext) -> SessionResult:
        index = session.session_index
        images = None if context.tokenizer is None else context.tokenizer.images
        shown = prompt
        if prompt.images and images is not None:
            messages = await asyncio.to_thread(with_data_urls, prompt.messages, images.store)
            shown = replace(prompt, messages=tuple(messages))
        task = AgentTask(prompt=shown, base_url=gateway.url, api_key=session.key, session_index=index)
        started_at = time.perf_counter()
        async with self._agents.running(task) as outcome:
            wall_s = time.perf_counter() - started_at
            if session.failure is None and not session.tree.samples and not session.faults:
                how = f": {describe_run(outcome.run)}" if outcome.run else ""
                reason = f"the agent received no response from the policy{how}"
                session.failure = hide(reason, {"env": dict(self._options.env)})
            session.counts["agent_failed"] += bool(
                outcome.run and (outcome.run.ended, outcome.run.exit_code) != ("exited", 0)
            )
            result = await gateway.finish(session)
            if result.failure is not None:
                return result
            result = _timed(result, outcome.run, wall_s=wall_s)
            if outcome.reward is not None:
                return with_reward(result.trajectories, Scored(result=outcome.reward))
            given = replace(self.judged(prompt, result, context), agent=outcome.run)
            (scored,) = await context.scorer.score([given])
            return with_reward(result.trajectories, scored)

    def _make_gateway(self, tokenizer: PromptTokenizer | None) -> Gateway:
        if tokenizer is None:
            raise SettingsError("the agent loop 'agent' needs a tokenizer. Pass tokenizer=... to Rollout.")
        sampling = SamplingParams(max_tokens=1)  # each session sets its own
        return Gateway(self._engines, tokenizer, self._options.gateway, sampling=sampling)


def _timed(result: SessionResult, run: AgentRun | None, *, wall_s: float) -> SessionResult:
    """Add the time outside the engine, and how the program ended."""
    *others, last = result.trajectories
    generate_s = sum(row.timings.generate_s for row in result.trajectories)
    timings = replace(last.timings, tools_s=max(wall_s - generate_s, 0.0))
    ended: dict[str, Json] = {} if run is None else {"ended_by": run.ended, "exit_code": run.exit_code}
    last = replace(last, timings=timings, extras={**last.extras, **ended})
    return replace(result, trajectories=(*others, last))


class SessionEngines:
    """Combines the engines of a gateway's sessions. Each group has its own, which records what it samples."""

    def __init__(self) -> None:
        """Start without engines."""
        self._by_session: dict[str, RolloutEngine] = {}
        self._latest: RolloutEngine | None = None

    def add(self, session: Session, engine: RolloutEngine) -> None:
        """Assign an engine to a session."""
        self._by_session[session.session_id] = self._latest = engine

    def drop(self, session: Session) -> None:
        """Forget a session, whose last requests may still be in progress."""
        self._by_session.pop(session.session_id, None)

    @property
    def traits(self) -> EngineTraits:
        """See `RolloutEngine.traits`. All engines of a Rollout have equal traits."""
        return self._any.traits

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        session_id = str(request.request_id).rpartition("/")[0]
        return await self._by_session.get(session_id, self._any).generate(request)

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `RolloutEngine.abort`."""
        await self._any.abort(request_ids)

    @property
    def _any(self) -> RolloutEngine:
        if self._latest is None:
            raise RolloutError("no session has been opened yet.")
        return self._latest
