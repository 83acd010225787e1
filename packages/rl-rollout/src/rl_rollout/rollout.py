"""Runs an agent loop over many prompts concurrently."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from rl_core.data import IntArray, Json, Prompt, Trajectory
from rl_core.errors import DataError, RolloutError, SettingsError
from rl_core.record_fields import PositiveInt, record, settings_record
from rl_rollout.audit import AuditOptions, RecordingEngine, audit_session, is_stray
from rl_rollout.engines.images import EngineImages
from rl_rollout.engines.protocol import RolloutEngine, SamplingParams
from rl_rollout.loops.outcomes import check_sessions, with_baseline_of
from rl_rollout.loops.protocol import (
    SEED_BITS,
    AgentLoop,
    LoopContext,
    SessionResult,
    describe_failure,
    loop_name,
    stable_seed,
)
from rl_rollout.loops.single_turn import with_reward
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rewards.protocol import RewardInput
from rl_rollout.rewards.scorer import RewardScorer
from rl_rollout.score_audit import Rescored, ScoreAudit, ServedVersion
from rl_rollout.user_code import ends_the_run

log = structlog.get_logger(__name__)


@record
class GroupResult:
    """The outcome of all sessions of one prompt.

    Attributes:
        prompt: The prompt.
        sessions: One result per session, in order.
        error: The loop's error, if the whole group failed at once.
        num_audited: Number of audited sessions.
        num_audit_failures: Number of sessions that failed the audit.
        rescored: Results of the sessions that the engine scored again.
    """

    prompt: Prompt
    sessions: tuple[SessionResult, ...]
    error: BaseException | None = None
    num_audited: int = 0
    num_audit_failures: int = 0
    rescored: Rescored = Rescored()

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Return the trajectories of the sessions that succeeded."""
        return tuple(t for session in self.sessions if session.failure is None for t in session.trajectories)

    @property
    def timed(self) -> tuple[Trajectory, ...]:
        """Return the trajectories of the sessions that reached their reward, including those whose reward failed."""
        return tuple(
            trajectory
            for session in self.sessions
            if session.failure is None or any(one.timings.reward_s > 0 for one in session.trajectories)
            for trajectory in session.trajectories
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """Return one reason per failed session."""
        return tuple(session.failure for session in self.sessions if session.failure is not None)


Judge = Callable[[Prompt, SessionResult, LoopContext], RewardInput]
OnGroup = Callable[[GroupResult], Awaitable[None] | None]
"""Called with each group when its last session ends, in the order of completion."""


@settings_record
class RolloutOptions:
    """Options of a rollout.

    Attributes:
        max_concurrent_groups: Maximum number of concurrent groups; None starts all.
        audit: Options of the audit.
    """

    max_concurrent_groups: PositiveInt | None = None
    audit: AuditOptions = AuditOptions()


class Rollout:
    """Runs groups of sessions. A failed group does not affect the others.

    Sessions are audited first. A session fails if its tokens are not those that the engine sampled.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        loop: AgentLoop,
        *,
        scorer: RewardScorer,
        decode: Callable[[Sequence[IntArray]], list[str]],
        tokenizer: PromptTokenizer | None = None,
        options: RolloutOptions | None = None,
        served: ServedVersion | None = None,
    ) -> None:
        """Store the parts. Nothing runs yet.

        Args:
            engine: The engine. The caller starts and closes it.
            loop: The agent loop. This object starts and closes it.
            scorer: Computes rewards.
            decode: Decodes token sequences, for example `PromptTokenizer.decode`.
            tokenizer: Required by loops with more than one turn.
            options: Concurrency and audit.
            served: Returns the weight version that the engine serves. None if weights never change during `run`.
        """
        self._engine = engine
        self._loop = loop
        self._scorer = scorer
        self._decode = decode
        self._tokenizer = tokenizer
        self._options = options or RolloutOptions()
        images = None if tokenizer is None else tokenizer.images
        self._images = None if images is None else EngineImages(images.processor, images.store)
        self._image_token_id = None if tokenizer is None else tokenizer.image_token_id
        self._score_audit = ScoreAudit(engine, served, tolerance=self._options.audit.rescored_tolerance)
        limit = self._options.max_concurrent_groups
        self._slots = None if limit is None else asyncio.Semaphore(limit)
        self._is_started = False

    async def start(self) -> None:
        """Start the loop's tools, servers and checks. `run` does this if the caller does not.

        Raises:
            SettingsError: The loop does not support these settings or this tokenizer.
        """
        start = getattr(self._loop, "start", None)
        if start is not None and not self._is_started:
            await start(self._tokenizer)
        self._is_started = True

    @property
    def scorer(self) -> RewardScorer:
        """Return the reward scorer."""
        return self._scorer

    @property
    def tool_schemas(self) -> list[dict[str, Json]]:
        """Return the loop's tools as the chat template shows them. Empty if the loop has none or is not started."""
        return list(getattr(self._loop, "tool_schemas", ()))

    def close(self) -> None:
        """Close the loop and stop its tool servers. Safe to call twice."""
        close = getattr(self._loop, "close", None)
        if close is not None:
            close()
        self._is_started = False

    async def run(
        self,
        prompts: Sequence[Prompt],
        *,
        num_sessions: int,
        sampling: SamplingParams,
        seed: int | None = None,
        on_group: OnGroup | None = None,
        with_baseline: bool = False,
    ) -> list[GroupResult]:
        """Run num_sessions sessions of each prompt.

        If this call is cancelled or `on_group` raises, all of the engine's requests are aborted.

        Args:
            prompts: Prompts with distinct uids.
            num_sessions: Number of sessions per prompt.
            sampling: Sampling parameters. `seed` replaces their seed.
            seed: The run's seed. A prompt's samples depend only on it and the prompt's uid, not on order or on other
                prompts. None samples without seeds; greedy sampling needs none.
            on_group: Called with each result as its group ends. An awaitable result is awaited.
            with_baseline: Run one more session per prompt, with greedy sampling, and keep only its reward, as the
                `reward_baseline` of each trajectory. If it fails, all sessions of the group do.

        Returns:
            One result per prompt, in the order of `prompts`.

        Raises:
            SettingsError: num_sessions is below 1, or the loop cannot start.
            DataError: Two prompts have the same uid.
        """
        if num_sessions < 1:
            raise SettingsError(f"num_sessions must be at least 1; found {num_sessions}.")
        _check_distinct(prompts)
        await self.start()
        on_group_error: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                run = partial(self._run_prompt, count=num_sessions, on_group=on_group, with_baseline=with_baseline)
                groups = [tasks.create_task(run(prompt, _seeded(sampling, seed, prompt))) for prompt in prompts]
        except BaseExceptionGroup as errors:
            on_group_error = errors
            while isinstance(on_group_error, BaseExceptionGroup):
                on_group_error = on_group_error.exceptions[0]
        except asyncio.CancelledError:
            await self._engine.abort(None)
            raise
        if on_group_error is not None:  # raised here to preserve its cause
            await self._engine.abort(None)
            raise on_group_error
        return [group.result() for group in groups]

    async def score_again(self, groups: Sequence[GroupResult]) -> list[GroupResult]:
        """Return the same trajectories with rewards from the current scorer. Failed sessions stay unchanged.

        Reward components stay if the new reward has none of the same name.

        Raises:
            SettingsError: The loop cannot recover the text that its reward judges from a stored session.
        """
        await self.start()
        judged: Judge | None = getattr(self._loop, "judged", None)
        if judged is None:
            raise SettingsError(
                f"{loop_name(self._loop)} cannot recover the text that its reward judges from a stored session: it has "
                "no `judged` method. Keep the stored rewards, or generate the sessions again."
            )
        context = self._context(self._engine, SamplingParams(max_tokens=1))
        again = await asyncio.gather(*(self._judged_again(group, judged, context) for group in groups))
        return [replace(group, sessions=sessions) for group, sessions in zip(groups, again, strict=True)]

    async def _judged_again(self, group: GroupResult, judged: Judge, context: LoopContext) -> tuple[SessionResult, ...]:
        prompt, sessions = group.prompt, group.sessions
        finished = [session for session in sessions if session.failure is None]
        inputs = [judged(prompt, session, context) for session in finished]
        scores = await context.scorer.score(inputs) if inputs else []
        unscored = [[replace(row, reward=None, reward_components={}) for row in one.trajectories] for one in finished]
        scored = map(with_reward, unscored, scores)
        again = [next(scored) if session.failure is None else session for session in sessions]
        return check_sessions(again, loop=self._loop, prompt=prompt, num_sessions=len(again))

    def _context(self, engine: RolloutEngine, sampling: SamplingParams) -> LoopContext:
        return LoopContext(
            engine=engine, sampling=sampling, scorer=self._scorer, decode=self._decode, tokenizer=self._tokenizer
        )

    async def _run_prompt(
        self, prompt: Prompt, sampling: SamplingParams, *, count: int, on_group: OnGroup | None, with_baseline: bool
    ) -> GroupResult:
        recording = RecordingEngine(self._engine)
        context = self._context(recording.as_engine, sampling)
        greedy = self._context(self._engine, replace(sampling, temperature=0.0, top_p=1.0, top_k=None, seed=None))
        async with self._slots or nullcontext(), asyncio.TaskGroup() as tasks:
            baseline = tasks.create_task(self._run_loop(prompt, 1, greedy)) if with_baseline else None
            result = self._trainable(await self._run_loop(prompt, count, context))
            result = self._audited(result, recording)
            result = await self._scored_again(result, sampling)
            if baseline is not None:
                (session,) = (await baseline).sessions
                result = replace(result, sessions=with_baseline_of(session, result.sessions))
        if result.failures:
            log.info("sessions_failed", prompt=prompt.uid, num_failed=len(result.failures), first=result.failures[0])
        if on_group is not None:
            settled = on_group(result)
            if settled is not None:
                await settled
        return result

    async def _run_loop(self, prompt: Prompt, num_sessions: int, context: LoopContext) -> GroupResult:
        attempt = self._attempt(prompt, num_sessions, context)
        gathered: tuple[Any] = await asyncio.gather(attempt, return_exceptions=True)  # keeps the loop's cancellation
        given = gathered[0]
        if isinstance(given, BaseException):
            failed = SessionResult(failure=describe_failure(self._loop, given))
            return GroupResult(prompt=prompt, sessions=(failed,) * num_sessions, error=given)
        sessions = check_sessions(given, loop=self._loop, prompt=prompt, num_sessions=num_sessions)
        return GroupResult(prompt=prompt, sessions=sessions)

    async def _attempt(self, prompt: Prompt, num_sessions: int, context: LoopContext) -> Any:
        """Return the loop's result, or the error that it raised."""
        try:
            return await self._loop.run_group(prompt, num_sessions=num_sessions, context=context)
        except BaseException as error:
            if ends_the_run(error):
                raise
            return error

    def _trainable(self, result: GroupResult) -> GroupResult:
        """Mark the sessions as failed that have placeholders without an image, which the learner would take for one."""
        token_id = self._image_token_id
        if token_id is None:
            return result
        sessions = list(result.sessions)
        for index, one in enumerate(sessions):
            strays = [is_stray(row, token_id) for row in one.trajectories] if one.failure is None else []
            if any(stray.any() for stray in strays):
                is_sampled = any(
                    (stray & row.loss_mask).any() for stray, row in zip(strays, one.trajectories, strict=True)
                )
                who = "the policy sampled" if is_sampled else "the session has"
                sessions[index] = SessionResult(
                    trajectories=tuple(replace(row, reward=None) for row in one.trajectories),
                    failure=f"{who} token {token_id}, the placeholder of images, which stands for no image here",
                )
        return replace(result, sessions=tuple(sessions))

    def _audited(self, result: GroupResult, recording: RecordingEngine) -> GroupResult:
        """Mark the sessions as failed whose tokens the engine did not sample."""
        trajectories, spans = result.trajectories, recording.spans
        num_audited = 0
        refused: dict[int, DataError] = {}
        for index in self._chosen(result, "audit", self._options.audit.share):
            num_audited += 1
            try:
                sessions = result.sessions[index].trajectories
                audit_session(sessions, spans, group=trajectories, images=self._images)
            except DataError as error:
                refused[index] = error
        return replace(_without(result, refused), num_audited=num_audited)

    async def _scored_again(self, result: GroupResult, sampling: SamplingParams) -> GroupResult:
        """Mark the sessions as failed whose logprobs differ when the engine scores them again."""
        chosen = self._chosen(result, "score", self._options.audit.rescored_share)
        if not chosen or not self._score_audit.can_compare(sampling):
            return result
        found: list[Rescored] = []
        refused: dict[int, DataError] = {}
        for index in chosen:
            try:
                found.append(await self._score_audit.check(result.sessions[index].trajectories))
            except DataError as error:
                refused[index] = error
        return replace(_without(result, refused), rescored=Rescored.total(found))

    def _chosen(self, result: GroupResult, what: str, share: float) -> list[int]:
        """Draw sessions among those that succeeded. The same seed always draws the same sessions."""
        seed, uid = self._options.audit.seed, result.prompt.uid
        return [
            index
            for index, session in enumerate(result.sessions)
            if session.failure is None and stable_seed(seed, f"{what} {uid} {index}") < share * (1 << SEED_BITS)
        ]


def _without(result: GroupResult, refused: Mapping[int, DataError]) -> GroupResult:
    """Mark the sessions as failed that an audit refuses."""
    sessions = list(result.sessions)
    for index, error in refused.items():
        log.error("audit_failed", prompt=result.prompt.uid, session=index, reason=str(error))
        unscored = tuple(replace(trajectory, reward=None) for trajectory in sessions[index].trajectories)
        sessions[index] = SessionResult(trajectories=unscored, failure=f"audit: {error}")
    num_failures = result.num_audit_failures + len(refused)
    return replace(result, sessions=tuple(sessions), num_audit_failures=num_failures)


def _check_distinct(prompts: Sequence[Prompt]) -> None:
    seen: set[str] = set()
    for position, prompt in enumerate(prompts):
        if prompt.uid in seen:
            raise DataError(
                f"prompts of a run must have distinct uids; prompts[{position}] repeats {prompt.uid!r}. Use unique "
                "uids, or request more sessions per prompt."
            )
        seen.add(prompt.uid)


def _seeded(sampling: SamplingParams, seed: int | None, prompt: Prompt) -> SamplingParams:
    if seed is None or sampling.temperature == 0:
        return replace(sampling, seed=None)
    return replace(sampling, seed=stable_seed(seed, prompt.uid))


def require_some_success(results: Sequence[GroupResult]) -> None:
    """Raise an error if every session failed, which indicates a problem of the run.

    Raises:
        RolloutError: Every session failed. The message has the first reason, and the error's cause is the original
            exception.
    """
    failures = [failure for result in results for failure in result.failures]
    if failures and len(failures) == sum(len(result.sessions) for result in results):
        raise RolloutError(f"all {len(failures)} sessions failed; the first: {failures[0]}") from next(
            (result.error for result in results if result.error is not None), None
        )


def can_score_again(loop: AgentLoop | type[AgentLoop]) -> bool:
    """Return True if a loop, or a class of loops, can recover the text that its reward judges from a stored session."""
    return callable(getattr(loop, "judged", None))
