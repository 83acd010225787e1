"""Settings that were set, but have no effect together with others.

A file often keeps such settings while one run turns a feature off, so they cause a note instead of an error.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from rl_rollout.engines import TransformersOptions, VLLMOptions
from rl_trainer_parts.learning.engine_choice import engine_name
from rl_trainer_parts.learning.mixtures import replays
from rl_trainer_parts.learning.objective import has_policy_gradient, learns_from_rewards
from rl_trainer_parts.learning.start_learners import needs_critic
from rl_trainer_parts.settings.algorithm_choice import options_of
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


def unused_with(setting: str, values: list[object], *names: str) -> Unused:
    """Settings without an effect while another setting has one of these values; None and "" mean it is not set."""
    words = " or ".join(map(json.dumps, values))
    because = f"without {setting}" if values[0] in (None, "") else f"with {setting} = {words}"
    return Unused(names=names, when=lambda s: attrgetter(setting)(s) in values, because=because)


_SHARED = {one.name for one in fields(TransformersOptions)}
_VLLM_ALONE = [f"vllm.{one.name}" for one in fields(VLLMOptions) if one.name not in _SHARED]

_SELF = "distillation.self_teacher."
_OF_TEACHERS = ("distillation.route_by", "distillation.deadline_s", "distillation.start_deadline_s")

RULES = (
    Unused(names=("critic.",), when=lambda s: not needs_critic(s), because='without algorithm.advantage = "gae"'),
    unused_with("correction.weights", ["none"], "correction.cap", "correction.floor"),
    unused_with("dynamic_sampling.filter", [""], "dynamic_sampling.max_rounds"),
    unused_with("rollout_cache.enabled", [False], "rollout_cache."),
    unused_with("rollout.placement", ["inline"], "replicas.restarts"),
    unused_with("weights.transport", ["file", "ipc"], "weights.host", "weights.deadline_s"),
    unused_with("weights.transport", ["file"], "weights.bucket_mib"),
    unused_with("cluster.placement", ["inline"], "cluster.start_deadline_s", "cluster.call_deadline_s"),
    unused_with("algorithm.kl_coefficient", [0], "algorithm.kl_estimator"),
    unused_with("algorithm.kl_target", [None], "algorithm.kl_horizon"),
    Unused(
        names=("algorithm.advantage", "algorithm.session_rule"),
        when=lambda s: not learns_from_rewards(s),
        because="with distillation.use_task_rewards = false",
    ),
    Unused(
        names=tuple(f"algorithm.{name}" for name in ("policy_loss", "clip_low", "clip_high")),
        when=lambda s: not has_policy_gradient(s),
        because='without a policy gradient: distillation.use_task_rewards = false and used_as = "loss"',
    ),
    Unused(
        names=("reward.backoff_s", "reward.retry_on"),
        when=lambda s: not s.reward.failures.max_retries,
        because="without retries: reward.on_failure and reward.retries",
    ),
    Unused(
        names=("rollout.mask_truncated",),
        when=lambda s: s.distillation.texts is not None,
        because="with distillation.texts, which no limit cuts",
    ),
    Unused(
        names=("rollout.rescored_share",),
        when=lambda s: (s.rollout.temperature, s.rollout.top_p, s.rollout.top_k) != (1, 1, None),
        because="with a rollout.temperature, top_p or top_k that changes the distribution",
    ),
    unused_with("rollout.offload_engine", [False], "rollout.offload_keeps_weights"),
    unused_with("optimizer.decay_steps", [None], "optimizer.decay", "optimizer.min_learning_rate"),
    Unused(
        names=tuple(_VLLM_ALONE),
        when=lambda s: engine_name(s) == "transformers",
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
    unused_with("prompts.validation", [None], "trainer.validate_every", "metrics.probes"),
    unused_with("metrics.log_rollouts", [0], "metrics.log_rollout_tokens"),
    unused_with("metrics.details_every", [0], "metrics.trace_memory"),
    unused_with("metrics.report", [False], "metrics.report_every"),
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
    unused_with("health.enabled", [False], "health.every", "health.thresholds", "health.off"),
    Unused(
        names=("distillation.beta",),
        when=lambda s: s.distillation.is_on and s.distillation.loss != "js",
        because='unless distillation.loss = "js"',
    ),
    unused_with(f"{_SELF}model", [None], f"{_SELF}prompts", f"{_SELF}min_reward", f"{_SELF}average_decay"),
    unused_with(f"{_SELF}model", ["policy", "reference"], f"{_SELF}average_decay"),
    unused_with(f"{_SELF}model", ["policy", "reference", "average"], *_OF_TEACHERS),
    Unused(
        names=("distillation.tail", "distillation.top_k"),
        when=lambda s: s.distillation.is_on and not s.distillation.num_top,
        because="unless the loss compares the top_k tokens",
    ),
)
"""Settings of both trainers."""

OF_VLLM_TEACHERS = ("kv_cache_gib", "gpu_memory_utilization")
"""Settings of a teacher that only vLLM uses."""


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
    for rule in (*RULES, *_of_options(settings), *also):
        unused = [name for name in changed if _is_among(name, rule.names)]
        if unused and rule.when(settings):
            yield _line(unused, rule.because)
    for teacher_name, teacher in settings.distillation.teachers.items():
        table, defaults = f"distillation.teachers.{teacher_name}", {one.name: one.default for one in fields(teacher)}
        unused = [f"{table}.{key}" for key in OF_VLLM_TEACHERS if getattr(teacher, key) != defaults[key]]
        if unused and teacher.engine != "vllm":
            yield _line(unused, f'with {table}.engine = "{teacher.engine}"')


def _of_options(settings: Settings) -> Iterator[Unused]:
    """Rules about the options of the advantage and of the policy loss, which have no effect without these."""
    for rule in RULES:
        for part in ("advantage", "policy_loss"):
            if f"algorithm.{part}" in rule.names:
                options = options_of(settings.algorithm, part)
                yield replace(rule, names=tuple(f"algorithm.{name}" for name in options))


def _is_among(name: str, patterns: Iterable[str]) -> bool:
    return any(name == one or (one.endswith(".") and name.startswith(one)) for one in patterns)


def _line(names: list[str], because: str) -> str:
    *first, last = names
    every = f"{', '.join(first)} and {last} have" if first else f"{last} has"
    return f"{every} no effect {because}"
