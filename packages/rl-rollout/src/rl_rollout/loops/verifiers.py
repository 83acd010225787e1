"""Environments of the verifiers library, which runs them with tokens from this package's engine."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.data import NO_VERSION, BoolArray, FloatArray, IntArray, Json, Prompt, Timings, Trajectory
from rl_core.errors import DataError, MissingExtraError, RolloutError, SettingsError
from rl_core.record_fields import settings_record
from rl_core.registry import unknown_name
from rl_core.secret_settings import hide
from rl_rollout.audit import SampledSpan
from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.gateway import Gateway, GatewayOptions, ServiceOptions, Session, SessionLimits
from rl_rollout.loops.agent import SessionEngines
from rl_rollout.loops.outcomes import join_experts
from rl_rollout.loops.protocol import LoopContext, SessionLoop, SessionResult
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rewards.outputs import preview_error

MAX_BODY_BYTES = 256 << 20
MAX_SESSIONS = 1 << 20
UNLIMITED = {"max_turns": 1 << 40, "max_tokens": 1 << 40, "max_concurrent": 1024}
"""Effectively no limit, because verifiers has its own."""


@settings_record
class VerifiersOptions:
    """Options of the `verifiers` loop.

    Attributes:
        tokenizer: Folder of the policy's tokenizer, with which verifiers renders turns; nothing is downloaded.
        environment: The `[env]` table of a verifiers run, such as {taskset = {id = "sums"}, agent = {runtime = {type =
            "subprocess"}}}.
        renderer: Table of a `renderers.RendererConfig`; None lets verifiers choose by the tokenizer's model.
        task_column: Column of the prompts with the index of the task in the taskset.
        max_tasks: Maximum number of tasks to load from the taskset.
        timeout_s: Maximum seconds of one episode; then the session fails.
    """

    tokenizer: str
    environment: Mapping[str, Any] = field(default_factory=dict)
    renderer: Mapping[str, Any] | None = None
    task_column: str = "task"
    max_tasks: int = 100_000
    timeout_s: float = 1800.0


class VerifiersLoop(SessionLoop):
    """Runs an episode of a verifiers environment as a session. Each branch of a trace is a trajectory.

    verifiers renders turns as tokens and appends them to the sampled ones. The gateway returns the engine's tokens, and
    supplies logprobs and versions. verifiers scores the episode, and its reward is the session's.
    """

    Options = VerifiersOptions

    def __init__(self, options: VerifiersOptions) -> None:
        """Store the options. `start` imports the library."""
        self._options = options
        self._verifiers: Any = None
        self._environment: Any = None
        self._gateway: Gateway | None = None
        self._engines = SessionEngines()
        self._tasks: list[Any] = []
        self._serving: asyncio.Task[None] | None = None

    async def start(self, tokenizer: PromptTokenizer | None = None) -> None:  # noqa: ARG002 - verifiers loads its own
        """Load the environment and serve.

        Raises:
            SettingsError: verifiers refuses the options, or has no tasks; or the tokenizer is not a local folder.
            MissingExtraError: verifiers is not installed.
        """
        self._load()
        is_ready = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(is_ready))
        await is_ready

    async def check(self, tokenizer: PromptTokenizer | None = None) -> list[str]:  # noqa: ARG002 - as `start`
        """Load everything, and report the number of tasks. Raises the same errors as `start`."""
        self._load()
        return [f"taskset with {len(self._tasks):,} tasks"]

    def _load(self) -> None:
        self.close()
        options, library = self._options, _library()
        self._verifiers = library
        with _refused("environment", options.environment):
            config = library.resolve_env_config(dict(options.environment))
            self._environment = library.load_environment(config)
            self._tasks = list(self._environment.taskset.take(options.max_tasks))
        if not self._tasks:
            raise SettingsError("the taskset of the verifiers environment has no tasks.")
        _require_account(config)
        try:
            PromptTokenizer.load(Path(options.tokenizer))
        except SettingsError as error:
            raise SettingsError(f"agent loop 'verifiers': tokenizer: {error}") from error
        with _refused("renderer", options.renderer):
            renderer = self._client(url="http://127.0.0.1").renderer
            tokenizer = import_module("renderers.base").load_tokenizer(options.tokenizer)
            import_module("renderers").create_renderer(tokenizer, renderer)

    def close(self) -> None:
        """Stop serving when the event loop runs next."""
        if self._serving is not None and not self._serving.get_loop().is_closed():
            self._serving.cancel()
        self._serving = self._gateway = None

    async def run_group(self, prompt: Prompt, *, num_sessions: int, context: LoopContext) -> list[SessionResult]:
        """See `AgentLoop.run_group`. Starts if not yet started on this event loop."""
        if self._serving is None or self._serving.get_loop() is not asyncio.get_running_loop():
            await self.start()
        return await super().run_group(prompt, num_sessions=num_sessions, context=context)

    async def run_session(self, prompt: Prompt, *, session_index: int, context: LoopContext) -> SessionResult:
        """See `SessionLoop.run_session`."""
        gateway = self._gateway
        if gateway is None:
            raise RolloutError("the agent loop was closed.")
        session = gateway.open(
            prompt.uid,
            session_index,
            sampling=lambda turn: context.session_sampling(session_index, turn=turn),
            limits=SessionLimits(**UNLIMITED, wall_s=self._options.timeout_s + 1),
        )
        self._engines.add(session, context.engine)
        url = f"{gateway.url}/{session.key}/v1"
        started_at = time.perf_counter()
        try:
            async with asyncio.timeout(self._options.timeout_s) as deadline:
                episode = await self._environment.run_episode(self._task(prompt), self._model(url, context))
        except TimeoutError:
            if not deadline.expired():
                raise
            return SessionResult(failure=f"the episode took longer than {self._options.timeout_s:g} s")
        finally:
            gateway.sessions.forget(session)
            self._engines.drop(session)
        wall_s = time.perf_counter() - started_at
        if not episode.ok:
            return SessionResult(failure=next(iter(session.faults.values()), None) or _reason(episode))
        return SessionResult(trajectories=tuple(_trajectories(episode, session, wall_s=wall_s)))

    async def _serve(self, is_ready: "asyncio.Future[None]") -> None:
        options = GatewayOptions(
            max_body_bytes=MAX_BODY_BYTES,
            max_sessions=MAX_SESSIONS,
            service=ServiceOptions(tool_parser=None, chats=False),
        )
        tokenizer, sampling = PromptTokenizer.load(Path(self._options.tokenizer)), SamplingParams(max_tokens=1)
        gateway = Gateway(self._engines, tokenizer, options, sampling=sampling)
        try:
            await gateway.start()
            async with self._environment.serving():
                self._gateway = gateway
                is_ready.set_result(None)
                await asyncio.Event().wait()
        except (Exception, SystemExit) as error:
            if is_ready.done():
                raise
            is_ready.set_exception(_refusal("environment", error, self._options.environment))
        finally:
            await gateway.close()

    def _task(self, prompt: Prompt) -> Any:
        column = self._options.task_column
        index = prompt.columns.get(column)
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(self._tasks):
            raise DataError(
                f"column {column!r} of prompt {prompt.uid} must be the index of a task, 0 to {len(self._tasks) - 1}; "
                f"found {index!r}."
            )
        return self._tasks[index]

    def _client(self, url: str) -> Any:
        return self._verifiers.TrainClientConfig(
            base_url=url,
            api_key_var="RL_ROLLOUT_NO_KEY",
            renderer_model_name=self._options.tokenizer,
            renderer=None if self._options.renderer is None else dict(self._options.renderer),
        )

    def _model(self, url: str, context: LoopContext) -> Any:
        library = self._verifiers
        sampling = {"temperature": context.sampling.temperature, "max_tokens": context.sampling.max_tokens}
        return library.ModelContext(
            model=GatewayOptions().model, client=self._client(url), sampling=library.SamplingConfig(**sampling)
        )


def _trajectories(episode: Any, session: Session, *, wall_s: float) -> list[Trajectory]:
    """Return a trajectory for each branch that trains. The last one has the session's timings."""
    spans, samples = session.tree.spans(), session.tree.samples
    trained: set[int] = set()
    trajectories: list[Trajectory] = []
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    for trace in traces:
        for branch in trace.branches:
            if not branch.trainable:
                continue
            ids = np.array(branch.token_ids, dtype=np.int32)
            sampled = np.array(branch.sampled_mask, dtype=np.bool_)
            columns = columns_of(ids, sampled, spans, trained=trained)
            if columns[0].any():
                trajectories.append(_trajectory(trace, ids, columns, session, spans, output_index=len(trajectories)))
    if not trajectories:
        raise DataError("no branch of the episode has sampled tokens.")
    reward_s = sum(trace.timing.scoring.duration for trace in traces)
    generate_s = sum(sample.generate_s for sample in samples)
    timings = Timings(
        generate_s=generate_s,
        tools_s=max(wall_s - generate_s - reward_s, 0.0),
        reward_s=reward_s,
        preemptions=sum(sample.generation.num_preempted for sample in samples),
    )
    trajectories[-1] = replace(trajectories[-1], timings=timings)
    return trajectories


def _trajectory(
    trace: Any,
    input_ids: IntArray,
    columns: tuple[BoolArray, FloatArray, IntArray, IntArray | None],
    session: Session,
    spans: Sequence[SampledSpan],
    *,
    output_index: int,
) -> Trajectory:
    mask, logprobs, versions, nucleus_ids = columns
    components = {name: part.value for name, part in trace.rewards.items() if part is not None}
    told = (span.routed_experts for span in spans if _begins_with(input_ids, span))
    extras: dict[str, Json] = {"ended_by": trace.stop_condition or "done", "num_turns": trace.num_turns}
    return Trajectory(
        prompt_uid=session.prompt_uid,
        session_index=session.session_index,
        output_index=output_index,
        input_ids=input_ids,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        policy_versions=versions,
        finish_reason="length" if trace.is_truncated else "stop",
        routed_experts=join_experts(told, len(input_ids)),
        nucleus_ids=nucleus_ids,
        reward=float(trace.reward),
        reward_components={**components, **{k: v for k, v in trace.metrics.items() if v is not None}},
        extras=extras,
    )


def columns_of(
    input_ids: IntArray, sampled: BoolArray, spans: Sequence[SampledSpan], *, trained: set[int]
) -> tuple[BoolArray, FloatArray, IntArray, IntArray | None]:
    """Return the engine's logprob, version and nucleus for each sampled token of a sequence.

    A token marked as sampled that no span sampled after the same tokens stays in the mask without a version. The audit
    then fails its session.

    Args:
        input_ids: [T] int32.
        sampled: [T] bool, tokens that the program marks as sampled.
        spans: The engine's outputs.
        trained: Indices of spans that an earlier sequence trains, which this one masks. Newly trained spans are added.

    Returns:
        [T] loss_mask, rollout_logprobs and policy_versions; [T, K] nucleus_ids, None if no span has them.
    """
    mask = sampled.copy()
    logprobs = np.zeros(len(input_ids), dtype=np.float32)
    versions = np.full(len(input_ids), NO_VERSION, dtype=np.int32)
    nucleus_ids: IntArray | None = None
    for index, span in enumerate(spans):
        start = len(span.input_ids)
        stop = start + len(span.token_ids)
        if not mask[start:stop].any() or not _begins_with(input_ids, span):
            continue
        if index in trained:
            mask[start:stop] = False
            continue
        trained.add(index)
        logprobs[start:stop] = np.where(mask[start:stop], span.logprobs, 0)
        versions[start:stop] = np.where(mask[start:stop], span.policy_versions, NO_VERSION)
        if span.nucleus_ids is not None:
            if nucleus_ids is None:
                nucleus_ids = np.full((len(input_ids), span.nucleus_ids.shape[1]), -1, np.int32)
            nucleus_ids[start:stop] = np.where(mask[start:stop, None], span.nucleus_ids, -1)
    return mask, logprobs, versions, nucleus_ids


def _begins_with(input_ids: IntArray, span: SampledSpan) -> bool:
    start = len(span.input_ids)
    stop = start + len(span.token_ids)
    is_sampled = stop <= len(input_ids) and np.array_equal(input_ids[start:stop], span.token_ids)
    return is_sampled and np.array_equal(input_ids[:start], span.input_ids)


def _reason(episode: Any) -> str:
    errors: Sequence[Any] = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not errors:
        return "the episode did not complete, without a reported reason"
    return f"{errors[-1].type}: {errors[-1].message}"


@contextmanager
def _refused(what: str, given: Any) -> Iterator[None]:
    """Convert the library's exceptions and process exits into a SettingsError."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise _refusal(what, error, given) from error


def _refusal(what: str, error: BaseException, given: Any) -> SettingsError:
    problems = getattr(error, "errors", None)  # pydantic's errors have this method
    reason = "; ".join(map(_problem, problems())) if callable(problems) else preview_error(error)
    return SettingsError(f"verifiers rejected the {what}: {hide(reason, given)}")


def _problem(problem: Mapping[str, Any]) -> str:
    """Format one of pydantic's errors, with the path of the option."""
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] != "union_tag_invalid":
        return f"{place}: {problem['msg']}" if place else str(problem["msg"])
    known = problem["ctx"]["expected_tags"].replace("'", "").split(", ")
    return f"{place}: {unknown_name(problem['ctx']['discriminator'].strip(chr(39)), problem['ctx']['tag'], known)}"


def _require_account(config: Any) -> None:
    """Refuse a hosted runtime without an account, because verifiers would then end the process from its own task."""
    is_local = import_module("verifiers.v1.runtimes").runtime_is_local
    seats = {name: seat.runtime for name, seat in vars(config).items() if hasattr(seat, "runtime")}
    for name, runtime in seats.items():
        if is_local(runtime):
            continue
        try:
            import_module("verifiers.v1.utils.prime").ensure_prime_auth()
        except SystemExit as error:
            raise SettingsError(
                f"environment.{name}.runtime is {runtime.type!r}, a hosted runtime, which is the default of verifiers: "
                f'{error}. Set environment.{name}.runtime = {{ type = "subprocess" }} to run on this machine, or '
                '"docker" to run in a container, or log in.'
            ) from error


def _library() -> Any:
    try:
        return import_module("verifiers.v1")
    except ImportError as error:
        raise MissingExtraError(
            f"the agent loop 'verifiers' needs the library verifiers ({error}). Install rl-rollout[verifiers] as "
            "docs/guides/agent-loops.md explains; it cannot be installed together with vLLM 0.32."
        ) from error
