"""All checks that run before models load: arithmetic, names and files."""

import contextlib
import datetime
import math
from collections.abc import Iterable, Iterator
from operator import attrgetter

from rl_core.errors import RLError, SettingsError
from rl_distill import check_ranks
from rl_metrics.health import GUIDE, require_rules, with_thresholds, without
from rl_rollout import can_score_again, resolve_filter
from rl_rollout.engines import known_engines
from rl_rollout.loops import LOOPS
from rl_rollout.skip import EntryStore, StepSelection
from rl_trainer_parts.checks.algorithm import algorithm_names, algorithm_problems, unknown_names
from rl_trainer_parts.checks.distillation import distillation_problems, teacher_files
from rl_trainer_parts.checks.model_folder import check_policy_folder, missing_path
from rl_trainer_parts.checks.models import image_problems, lora_problems
from rl_trainer_parts.learning.mixtures import model_config
from rl_trainer_parts.settings.fields import problems_of, setting_fields, with_value
from rl_trainer_parts.settings.other_names import value_hint
from rl_trainer_parts.settings.schema import LEVELS, Settings

SCRIPTED = "scripted"
"""A test engine that takes responses instead of a model folder."""


def check_settings(settings: Settings, also: Iterable[str] = ()) -> None:
    """Check all settings and report every problem at once.

    Args:
        settings: The run's settings.
        also: Further problems, from settings that only one trainer has.

    Raises:
        SettingsError: Each line names a setting, what was expected and what was found.
    """
    _refuse([*also, *_value_problems(settings), *_lengths(settings), *_files(settings)])


def check_values(settings: Settings) -> None:
    """Check values without looking at files.

    Raises:
        SettingsError: As in `check_settings`.
    """
    _refuse([*_value_problems(settings)])


def _value_problems(settings: Settings) -> Iterator[str]:
    for find in (
        _options,
        _validation,
        _date,
        _arithmetic,
        _truncation,
        _names,
        algorithm_problems,
        lora_problems,
        _parallel,
        distillation_problems,
        _health,
    ):
        yield from find(settings)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise SettingsError("\n".join(problems))


SHOWN_NAMES = ("run.name", "metrics.wandb_project", "metrics.mlflow_experiment")
"""Settings that the trackers' libraries print too."""


def _options(settings: Settings) -> Iterator[str]:
    names = ("optimizer", "reward", "rollout_cache", "trainer.target")
    for name in (name for name in names if f"{name}." not in settings.left_out):
        yield from (f"{name}.{problem}" for problem in attrgetter(name)(settings).problems())
    yield from _rollout_cache(settings)
    if group_filter := settings.dynamic_sampling.filter:
        hint = value_hint("dynamic_sampling.filter", group_filter)
        for problem in problems_of("dynamic_sampling.filter: ", resolve_filter, group_filter):
            yield f"{problem}{hint}"


def _rollout_cache(settings: Settings) -> Iterator[str]:
    """Problems of a rollout cache that depend on other settings or on the disk."""
    cache = settings.rollout_cache
    if not cache.enabled or any(cache.problems()):
        return
    yield from problems_of("rollout_cache.directory: ", lambda: EntryStore(cache.directory).folder.check())
    if StepSelection.parse(cache.steps).first > settings.trainer.steps:
        yield f"rollout_cache.steps = {cache.steps!r} selects no step up to {with_value(settings, 'trainer.steps')}."
    if cache.rewards == "again":
        with contextlib.suppress(SettingsError):  # another check reports an unknown loop
            if not can_score_again(LOOPS.get(settings.rollout.loop)):
                yield (
                    f'rollout_cache.rewards = "again" needs an agent loop whose stored sessions can be scored again; '
                    f'found {settings.rollout.loop!r}. Set rollout_cache.rewards = "stored".'
                )


def _validation(settings: Settings) -> Iterator[str]:
    samples, temperature = settings.prompts.validation_samples, settings.prompts.validation_temperature
    if samples > 1 and temperature == 0:
        yield (
            f"prompts.validation_samples = {samples} with prompts.validation_temperature = 0 gives each problem the "
            f"same response {samples} times. Set prompts.validation_temperature = {settings.rollout.temperature:g}, as "
            "in training, or prompts.validation_samples = 1."
        )
    yield from _without_validation(settings)


def _date(settings: Settings) -> Iterator[str]:
    if (date := settings.prompts.date) is not None:
        try:
            datetime.date.fromisoformat(date)
        except ValueError:
            yield f'prompts.date must be a day such as "2026-01-31"; found {date!r}.'


def _without_validation(settings: Settings) -> Iterator[str]:
    """Problems of settings that need a validation during training."""
    trainer = settings.trainer
    asked = {
        "trainer.target": trainer.target != type(trainer.target)(),
        "trainer.stop_when_no_better": trainer.stop_when_no_better is not None,
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        if settings.prompts.validation is None:
            yield f"{name} needs prompts.validation, whose results it judges. Set it, or leave {name} out."
    stops = trainer.target.stop or trainer.stop_when_no_better is not None
    if stops and settings.prompts.validation is not None and not trainer.validate_every:
        yield (
            "trainer.target.stop and trainer.stop_when_no_better need validations before the last step; found "
            "trainer.validate_every = 0."
        )


def _lengths(settings: Settings) -> Iterator[str]:
    """Problems of trajectories that exceed the model's positions or the engine's context."""
    policy, names = settings.policy, ("prompts.max_tokens", "rollout.max_response_tokens")
    parts = [name for name in names if name in setting_fields(type(settings))]
    longest = sum(attrgetter(name)(settings) for name in parts)
    limits = {"vllm.max_model_len": settings.vllm.max_model_len}
    with contextlib.suppress(RLError):  # other checks report a broken config.json
        limits["the model's positions"] = model_config(policy.path, policy.backend).max_position_embeddings
    for name, limit in limits.items():
        if limit is not None and longest > limit:
            added = " and ".join(with_value(settings, part) for part in parts)
            yield f"{added} add up to {longest} tokens, more than {name} = {limit}. Lower one of them."


def _arithmetic(settings: Settings) -> Iterator[str]:
    rollout, trainer = settings.rollout, settings.trainer
    if rollout.prompts_per_step % trainer.minibatches:
        yield (
            f"{with_value(settings, 'rollout.prompts_per_step')} must be a multiple of "
            f"{with_value(settings, 'trainer.minibatches')}, so that every mini-batch has the same number of groups."
        )


def _truncation(settings: Settings) -> Iterator[str]:
    """Problems of training on samples of a truncated distribution, whose tokens travel to the learner."""
    rollout = settings.rollout
    if rollout.top_p < 1 and rollout.top_k is None:
        yield (
            f"{with_value(settings, 'rollout.top_p')} needs rollout.top_k, because the learner scores each token among "
            "those that were kept, and top_k bounds their number. Set rollout.top_k, for example to 64."
        )
    if rollout.top_k is not None and rollout.top_k < 2:
        yield (
            f"{with_value(settings, 'rollout.top_k')} must be at least 2, or none: a response without alternatives has "
            "no gradient."
        )
    if rollout.nucleus_width is not None and settings.distillation.is_on:
        yield (
            "rollout.top_p < 1 and rollout.top_k do not work with [distillation], whose teachers score the whole "
            "distribution. Set them to 1 and none."
        )


def _names(settings: Settings) -> Iterator[str]:
    rollout, run = settings.rollout, settings.run
    if run.name in ("", ".", "..") or "/" in run.name:
        yield f"run.name must be the name of one folder below run.directory; found {run.name!r}."
    for name in SHOWN_NAMES:
        if not (text := attrgetter(name)(settings)).isprintable():
            yield f"{name} must be text without control characters; found {text!r}."
    yield from unknown_names(
        [
            *algorithm_names(settings),
            ("rollout.engine", rollout.engine, ["auto", *(name for name in known_engines() if name != SCRIPTED)]),
            ("rollout.loop", rollout.loop, LOOPS.names()),
        ]
    )


def _parallel(settings: Settings) -> Iterator[str]:
    """Problems of impossible layouts, and of ranks and engines without a place to run."""
    parallel, cluster = settings.parallel, settings.cluster
    yield from problems_of("parallel.", check_ranks, parallel)
    if parallel.ranks > 1 and cluster.placement == "inline":
        yield (
            f'parallel.ranks = {parallel.ranks} needs separate processes: set cluster.placement to "process" or '
            '"ray"; found "inline".'
        )
    placements = settings.placements
    if cluster.ray_address is not None and "ray" not in placements.values():
        on_ray = " or ".join(f'{name} = "ray"' for name in placements)
        yield f"cluster.ray_address needs {on_ray}; found {', '.join(map(repr, placements.values()))}."
    yield from _joined_gpus(settings)
    if cluster.placement == "inline" and (cluster.cpus_per_rank or cluster.gpus_per_rank):
        yield (
            "cluster.cpus_per_rank and cluster.gpus_per_rank reserve nothing for a rank in the trainer's process. Set "
            'them to 0, or cluster.placement to "process" or "ray".'
        )
    yield from _replicas(settings)


def _joined_gpus(settings: Settings) -> Iterator[str]:
    """Problems of GPUs that are not set in a run that joins a Ray cluster."""
    cluster, replicas = settings.cluster, settings.replicas
    parts = [
        ("cluster.gpus_per_rank", cluster.placement, cluster.gpus_per_rank, "rank, 0 to train"),
        ("replicas.gpus", settings.rollout.placement, replicas.gpus, "replica, 0 to generate"),
    ]
    for name, teacher in settings.distillation.teachers.items():
        setting = f"distillation.teachers.{name}.resources.gpus"
        parts.append((setting, teacher.placement, teacher.resources.gpus, "rank, 0 to score"))
    for setting, placement, gpus, use in parts if cluster.ray_address is not None else ():
        if placement == "ray" and gpus is None:
            yield (
                f"{setting} must be set when the run joins a Ray cluster, whose GPUs are not visible from here: 1 for "
                f"a GPU per {use} on CPUs; found none."
            )


def _replicas(settings: Settings) -> Iterator[str]:
    replicas, placement = settings.replicas, settings.rollout.placement
    if placement == "inline" and (replicas.count > 1 or replicas.cpus or replicas.gpus):
        yield (
            f"replicas.count = {replicas.count}, replicas.cpus and replicas.gpus need engines in separate "
            'processes: set rollout.placement to "process" or "ray"; found "inline".'
        )
    yield from _shared_gpu(settings)
    if settings.weights.transport not in ("file", "ipc") and placement == "inline":
        yield (
            f'weights.transport = "{settings.weights.transport}" needs engines in separate processes: set '
            f'rollout.placement to "process" or "ray", or the transport to "file"; found placement {placement!r}.'
        )
    yield from _direct(settings)


def _shared_gpu(settings: Settings) -> Iterator[str]:
    """Problems of settings for an engine and a learner that share a GPU."""
    rollout, cluster = settings.rollout, settings.cluster
    wanted = 'weights.transport = "ipc" needs one engine in its own process and a single-rank learner on the same GPU'
    other = 'or use weights.transport = "file"'
    is_ipc = settings.weights.transport == "ipc"
    if is_ipc and (rollout.placement != "process" or settings.replicas.count > 1):
        yield (
            f'{wanted}: set rollout.placement to "process" and replicas.count to 1, {other}; found '
            f"{rollout.placement!r} and {settings.replicas.count}."
        )
    if is_ipc and settings.vllm.tensor_parallel_size > 1:
        yield f"{wanted}: set vllm.tensor_parallel_size to 1, {other}; found {settings.vllm.tensor_parallel_size}."
    if is_ipc and (settings.parallel.ranks > 1 or cluster.placement != "inline"):
        yield (
            f'{wanted}: set cluster.placement to "inline" and parallel.ranks to 1, {other}; found '
            f"{cluster.placement!r} and {settings.parallel.ranks}."
        )
    if not rollout.offload_keeps_weights and settings.lora.rank and settings.lora.serving == "adapter":
        yield (
            "rollout.offload_keeps_weights = false drops the engine's weights, and an adapter update does not restore "
            'the base weights. Set it to true, or lora.serving to "merged".'
        )


def _direct(settings: Settings) -> Iterator[str]:
    """Problems of `weights.transport = "direct"`."""
    if settings.weights.transport != "direct":
        return
    if settings.cluster.placement == "inline":
        yield (
            'weights.transport = "direct" needs every rank in its own process, to send its own shards: set '
            'cluster.placement to "process" or "ray", or the transport to "tcp" or "nccl"; found '
            f"{settings.cluster.placement!r}."
        )
    if settings.trainer.offload_learner:
        yield (
            'weights.transport = "direct" sends weights from the device that trains them, and trainer.offload_learner '
            '= true frees them before the engine has received them. Set it to false, or the transport to "file".'
        )


def _health(settings: Settings) -> Iterator[str]:
    """Problems of `[health]`: unknown names, and pauses on rules that are off."""
    health = settings.health
    for name, number in health.thresholds.items():
        if math.isnan(number):
            yield f"health.thresholds: {name} must be a number; found {number}."
    yield from problems_of("health.thresholds: ", with_thresholds, GUIDE, health.thresholds)
    yield from problems_of("health.off: ", without, GUIDE, health.off)
    yield from problems_of("health.pause_on: ", require_rules, GUIDE, health.pause_on, also=LEVELS)
    for rule in health.pause_on:
        if rule in health.off:
            yield f"health.pause_on has {rule}, which health.off disables. Remove it from one of them."
    if health.pause_on and not health.enabled:
        yield "health.pause_on needs health.enabled = true."


def _files(settings: Settings) -> Iterator[str]:
    file, critic = settings.file, settings.critic.path
    for name in ("prompts.train", "prompts.validation", "prompts.test"):
        path = attrgetter(name)(settings)
        if path is not None and not path.exists():
            yield missing_path(path, setting=name, kind="dataset", file=file)
    yield from check_policy_folder(settings.policy.path, setting="policy.path", file=file)
    if critic is not None:
        yield from check_policy_folder(critic, setting="critic.path", needs_tokenizer=False, file=file)
    yield from teacher_files(settings)
    yield from image_problems(settings)
