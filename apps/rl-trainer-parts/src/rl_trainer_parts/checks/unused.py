"""Settings that were set, but have no effect together with others.

A file often keeps such settings while one run turns a feature off, so they cause a note instead of an error.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from rl_rollout.engines import TransformersOptions, VLLMOptions
from rl_trainer_parts.learning.distillation import has_policy_gradient, learns_from_rewards
from rl_trainer_parts.learning.mixtures import replays
from rl_trainer_parts.learning.start_learners import needs_critic
from rl_trainer_parts.settings.fields import setting_fields
from rl_trainer_parts.settings.schema import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """Settings without an effect in some runs.

    Attributes:
        names: The settings; "critic." stands for all of a section.
        when: Returns True if they have none.
        because: The reason, by setting.
    """

    names: tuple[str, ...]
    when: Callable[[Any], bool]
    because: str


_SHARED = {one.name for one in fields(TransformersOptions)}
_VLLM_ALONE = tuple(f"vllm.{one.name}" for one in fields(VLLMOptions) if one.name not in _SHARED)

RULES = (
    Unused(names=("critic.",), when=lambda s: not needs_critic(s), because='without algorithm.advantage = "gae"'),
    Unused(
        names=("correction.cap", "correction.floor"),
        when=lambda s: s.correction.weights == "none",
        because='with correction.weights = "none"',
    ),
    Unused(
        names=("dynamic_sampling.max_rounds",),
        when=lambda s: not s.dynamic_sampling.filter,
        because="without dynamic_sampling.filter",
    ),
    Unused(
        names=("rollout_cache.",),
        when=lambda s: not s.rollout_cache.enabled,
        because="with rollout_cache.enabled = false",
    ),
    Unused(
        names=("replicas.restarts",),
        when=lambda s: s.rollout.placement == "inline",
        because='with rollout.placement = "inline"',
    ),
    Unused(
        names=("weights.host", "weights.deadline_s"),
        when=lambda s: s.weights.transport in ("file", "ipc"),
        because='with weights.transport = "file" or "ipc"',
    ),
    Unused(
        names=("weights.bucket_mib",),
        when=lambda s: s.weights.transport == "file",
        because='with weights.transport = "file"',
    ),
    Unused(
        names=("cluster.start_deadline_s", "cluster.call_deadline_s"),
        when=lambda s: s.cluster.placement == "inline",
        because='with cluster.placement = "inline"',
    ),
    Unused(
        names=("algorithm.kl_estimator",),
        when=lambda s: not s.algorithm.kl_coefficient,
        because="with algorithm.kl_coefficient = 0",
    ),
    Unused(
        names=("algorithm.kl_horizon",),
        when=lambda s: s.algorithm.kl_target is None,
        because="without algorithm.kl_target",
    ),
    Unused(
        names=("algorithm.advantage", "algorithm.advantage_options", "algorithm.session_rule"),
        when=lambda s: not learns_from_rewards(s),
        because="with distillation.use_task_rewards = false",
    ),
    Unused(
        names=tuple(f"algorithm.{name}" for name in ("policy_loss", "policy_loss_options", "clip_low", "clip_high")),
        when=lambda s: not has_policy_gradient(s),
        because='without a policy gradient: distillation.use_task_rewards = false and used_as = "loss"',
    ),
    Unused(
        names=("reward.backoff_s", "reward.retry_on"),
        when=lambda s: not s.reward.failures.max_retries,
        because="without retries: reward.on_failure and reward.retries",
    ),
    Unused(
        names=("rollout.offload_keeps_weights",),
        when=lambda s: not s.rollout.offload_engine,
        because="with rollout.offload_engine = false",
    ),
    Unused(
        names=("optimizer.decay", "optimizer.min_learning_rate"),
        when=lambda s: s.optimizer.decay_steps is None,
        because="without optimizer.decay_steps",
    ),
    Unused(
        names=(
            *(
                "optimizer.shared_prefix_tokens",
                "optimizer.recompute",
                "optimizer.recompute_modules",
                "optimizer.kernels",
            ),
            *("optimizer.overlap_grad_reduce", "optimizer.overlap_param_gather", "optimizer.offload_optimizer"),
            *("trainer.background_checkpoints", "parallel."),
        ),
        when=lambda s: s.policy.backend == "torch",
        because='with policy.backend = "torch"',
    ),
    Unused(
        names=_VLLM_ALONE,
        when=lambda s: s.rollout.engine == "transformers",
        because='with rollout.engine = "transformers"',
    ),
    Unused(
        names=(
            *("prompts.validation_limit", "prompts.validation_samples", "prompts.validation_temperature"),
            *("trainer.validate_first", "metrics.log_val_generations"),
        ),
        when=lambda s: s.prompts.validation is None and s.prompts.test is None,
        because="without prompts.validation and prompts.test",
    ),
    Unused(
        names=("trainer.validate_every", "metrics.probes"),
        when=lambda s: s.prompts.validation is None,
        because="without prompts.validation",
    ),
    Unused(
        names=("metrics.log_rollout_tokens",),
        when=lambda s: not s.metrics.log_rollouts,
        because="with metrics.log_rollouts = 0",
    ),
    Unused(
        names=("metrics.trace_memory",),
        when=lambda s: not s.metrics.details_every,
        because="with metrics.details_every = 0",
    ),
    Unused(
        names=("metrics.report_every",),
        when=lambda s: not s.metrics.report,
        because="with metrics.report = false",
    ),
    Unused(
        names=("metrics.replay_rows",),
        when=lambda s: not s.metrics.details_every or not replays(s),
        because="unless the learner replays a mixture's routing, in steps that metrics.details_every selects",
    ),
    Unused(
        names=("metrics.wandb_project",),
        when=lambda s: "wandb" not in s.metrics.trackers,
        because='without "wandb" in metrics.trackers',
    ),
    Unused(
        names=("metrics.mlflow_uri", "metrics.mlflow_experiment"),
        when=lambda s: "mlflow" not in s.metrics.trackers,
        because='without "mlflow" in metrics.trackers',
    ),
    Unused(
        names=("health.every", "health.thresholds", "health.off"),
        when=lambda s: not s.health.enabled,
        because="with health.enabled = false",
    ),
    Unused(
        names=("distillation.beta",),
        when=lambda s: s.distillation.is_on and s.distillation.loss != "js",
        because='unless distillation.loss = "js"',
    ),
    Unused(
        names=("distillation.tail", "distillation.top_k"),
        when=lambda s: s.distillation.is_on and not s.distillation.num_top,
        because="unless the loss compares the top_k tokens",
    ),
)
"""Settings of both trainers."""

OF_TEACHERS = {
    "vllm": (),
    "megatron": ("kv_cache_gib", "gpu_memory_utilization"),
}
"""Settings of a teacher that its engine does not use."""


def unused_settings(settings: Settings, also: Iterable[Unused] = ()) -> Iterator[str]:
    """Lines about settings that were changed, but have no effect.

    Args:
        settings: The run's settings.
        also: Rules of settings that only one trainer has.
    """
    changed = [
        name
        for name, field in setting_fields(type(settings)).items()
        if attrgetter(name)(settings) != field.default and field.entry_kind is None
    ]
    for rule in (*RULES, *also):
        found = [name for name in changed if _is_among(name, rule.names)]
        if found and rule.when(settings):
            yield _line(found, rule.because)
    yield from _of_teachers(settings)


def _of_teachers(settings: Settings) -> Iterator[str]:
    chosen = settings.distillation
    for name, teacher in chosen.teachers.items():
        defaults = {one.name: one.default for one in fields(teacher)}
        unused = [key for key in OF_TEACHERS[teacher.engine] if getattr(teacher, key) != defaults[key]]
        if unused:
            table = f"distillation.teachers.{name}"
            yield _line([f"{table}.{key}" for key in unused], f'with {table}.engine = "{teacher.engine}"')


def _is_among(name: str, patterns: Iterable[str]) -> bool:
    return any(name == one or (one.endswith(".") and name.startswith(one)) for one in patterns)


def _line(names: list[str], because: str) -> str:
    *first, last = names
    every = f"{', '.join(first)} and {last} have" if first else f"{last} has"
    return f"{every} no effect {because}"
