"""Rollouts from the engine, or replayed from a skip cache."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rl_core import Prompt
from rl_core.data import Json
from rl_core.errors import NotReadyError, SettingsError
from rl_core.images import ImageStore
from rl_core.secret_settings import redact
from rl_core.weights import PublishReport
from rl_distill.teacher import model_fingerprint
from rl_metrics.reductions import Recorder
from rl_rollout import GroupResult, Rollout
from rl_rollout.engines import SamplingParams
from rl_rollout.prompts import PromptTokenizer
from rl_rollout.skip import (
    EntryKey,
    GroupwiseCache,
    RolloutOrigin,
    SkipCache,
    StepRollouts,
    package_versions,
    with_file_contents,
)
from rl_trainer_parts.learning.objective import needs_greedy
from rl_trainer_parts.rollouts.setup import sampling_params
from rl_trainer_parts.settings.schema import Settings, SettingsT


class SkipCacheReplay:
    """A run's skip cache, with the fingerprint of its rollouts."""

    def __init__(self, settings: Settings, tokenizer: PromptTokenizer, *, say: Callable[..., None]) -> None:
        """Open the cache, if the settings enable it.

        Args:
            settings: The run's settings.
            tokenizer: The policy's tokenizer.
            say: Receives events.

        Raises:
            CacheError: The directory cannot be used.
            MissingExtraError: The cache needs a library that is not installed.
        """
        self._settings = settings
        self._cache = _open_cache(settings, say)
        self._common: RolloutOrigin | None = None
        if settings.rollout_cache.enabled:
            self._common = _common_circumstances(settings, tokenizer)
        self._report: PublishReport | None = None
        self._engine = ""

    def served(self, report: PublishReport, *, engine: str) -> None:
        """Remember which weights are served, and by which engine."""
        self._report, self._engine = report, engine

    async def rollouts(
        self,
        key: EntryKey,
        prompts: Sequence[Prompt],
        generate: Callable[[], Awaitable[Sequence[GroupResult]]],
        *,
        rollout: Rollout,
        sampling: SamplingParams,
        num_sessions: int,
    ) -> StepRollouts:
        """Stored rollouts, or those of `generate`; see `SkipCache.rollouts`."""
        if self._common is None or not self._cache.serves(key):
            return StepRollouts(groups=tuple(await generate()))
        if self._report is None:
            raise NotReadyError("rollouts were requested before weights were published. Publish first.")
        policy: Json = {
            "weights": self._report.fingerprint,
            "origin": str(self._settings.policy.path.absolute()),
            "version": self._report.version,
        }
        circumstances = await _circumstances(
            replace(self._common, policy=policy, group_size=num_sessions), rollout, sampling, engine=self._engine
        )
        step = await self._cache.rollouts(key, prompts, circumstances, generate)
        if step.is_replayed and self._settings.rollout_cache.rewards == "again":
            return replace(step, groups=tuple(await rollout.score_again(step.groups)))
        return step


def _open_cache(settings: Settings, say: Callable[..., None]) -> SkipCache:
    folder = settings.image_folder
    images = None if folder is None else ImageStore(folder)
    return SkipCache(settings.rollout_cache, on_event=say, images=images)


def with_absolute_cache(settings: SettingsT) -> SettingsT:
    """Return settings whose skip cache has an absolute path, so that roles with other working directories share it.

    Raises:
        SettingsError: The path starts with ~, and the user has no home folder.
    """
    directory = settings.rollout_cache.directory
    if not settings.rollout_cache.enabled or "://" in directory:
        return settings
    try:
        absolute = str(Path(directory).expanduser().absolute())
    except RuntimeError as error:  # "~" without a home folder
        raise SettingsError(
            f"rollout_cache.directory = {directory!r} cannot be used: {error} Write the whole path."
        ) from error
    skip = replace(settings.rollout_cache, directory=absolute)
    return settings.model_copy(update={"rollout_cache": skip})


def groupwise_cache(
    settings: Settings,
    tokenizer: PromptTokenizer,
    rollout: Rollout,
    *,
    engine: str,
    prompts_digest: str,
    replaces_failed: bool,
    say: Callable[..., None],
) -> GroupwiseCache:
    """The skip cache of an asynchronous run.

    Time decides which versions of the policy sample a step, so entries are identified by the policy at the start.

    Args:
        settings: The run's settings.
        tokenizer: The policy's tokenizer.
        rollout: Scores replayed groups again if the settings ask for it.
        engine: The engine's name.
        prompts_digest: Digest of the training prompts.
        replaces_failed: True if another group replaces one whose sessions all failed.
        say: Receives events.

    Raises:
        CacheError: The directory cannot be used.
        MissingExtraError: The cache needs a library that is not installed.
    """
    groups_per_step, path = settings.rollout.prompts_per_step, settings.policy.path
    common = replace(
        _common_circumstances(settings, tokenizer),
        policy={"start": model_fingerprint(path), "origin": str(path.absolute()), "versions": None},
        group_size=settings.rollout.group_size,
        source={"prompts": prompts_digest, "groups_per_step": groups_per_step},
    )
    return GroupwiseCache(
        _open_cache(settings, say),
        partial(_circumstances, common, rollout, sampling_params(settings), engine=engine),
        groups_per_step=groups_per_step,
        replaces_failed=replaces_failed,
        score_again=rollout.score_again if settings.rollout_cache.rewards == "again" else None,
    )


async def _circumstances(
    common: RolloutOrigin, rollout: Rollout, sampling: SamplingParams, *, engine: str
) -> RolloutOrigin:
    """Add sampling, tools and engine; a tool server lists its tools only while it runs."""
    await rollout.start()
    versions = {**common.versions, "engine": engine}
    return replace(common, sampling=drawn_by(sampling), tools=rollout.tool_schemas, versions=versions)


def drawn_by(sampling: SamplingParams) -> Json:
    """Sampling parameters in a fingerprint. The run's seed is elsewhere; no stop strings equal an absent list."""
    found = asdict(replace(sampling, seed=None))
    return {name: value for name, value in found.items() if name != "stop" or value}  # older entries lack the field


def _common_circumstances(settings: Settings, tokenizer: PromptTokenizer) -> RolloutOrigin:
    """The run's constants, read once at its start: later changes to files are ignored.

    For secrets, only names are included.
    """
    reward = redact(asdict(settings.reward), keep_references=False)
    loop_options = redact(settings.rollout.loop_options, keep_references=False)
    return RolloutOrigin(
        policy=None,
        tokenizer=tokenizer.fingerprint,
        sampling=None,
        group_size=0,
        loop={
            "name": settings.rollout.loop,
            "options": with_file_contents(loop_options),
            **({"baseline": "greedy"} if needs_greedy(settings) else {}),  # older entries lack the field
        },
        reward=with_file_contents({name: reward[name] for name in ("function", "options", "parts", "on_failure")}),
        seed=settings.run.seed,
        versions=package_versions(),
    )


def record_replay(recorder: Recorder, found: StepRollouts) -> None:
    """Record the source of the rollouts; the time of their original generation stays apart from loading time."""
    recorder.record("rollout/replayed", float(found.is_replayed), weight=len(found.groups))
    if found.is_replayed:
        recorder.record("timing_s/load_rollouts", found.load_s)
        recorder.record("timing_s/replayed_gen", found.generate_s)
