"""Distillation in a run: the options of the objective, and the teachers' metrics."""

from dataclasses import fields
from typing import Any

from rl_distill.objectives import DistillationObjectiveOptions
from rl_distill.teacher import ServiceReport
from rl_metrics.reductions import Recorder
from rl_trainer_parts.settings.schema import Settings


def has_teachers(settings: Settings) -> bool:
    """True when the queue has a task for teachers."""
    return bool(settings.distillation.teachers)


def learns_from_rewards(settings: Settings) -> bool:
    """True when the policy learns from task rewards, with or without teachers."""
    return not settings.distillation.is_on or settings.distillation.use_task_rewards


def method_title(settings: Settings) -> str:
    """Name of the method, such as "GRPO"."""
    if learns_from_rewards(settings):
        return settings.algorithm.advantage.upper()
    return "Distillation" if has_teachers(settings) else "Imitation of texts"


def has_policy_gradient(settings: Settings) -> bool:
    """True when tokens have advantages, from tasks or from teachers used as a reward."""
    return learns_from_rewards(settings) or settings.distillation.used_as == "reward"


def objective_options(settings: Settings) -> DistillationObjectiveOptions:
    """The distillation objective.

    Raises:
        SettingsError: An option is impossible.
    """
    chosen = settings.distillation
    names = (option.name for option in fields(DistillationObjectiveOptions) if option.name != "teachers")
    options: Any = {name: getattr(chosen, name) for name in names}
    return DistillationObjectiveOptions(**options, teachers=tuple(chosen.teachers))


def record_teachers(recorder: Recorder, report: ServiceReport) -> None:
    """Record the teachers' work in a step and how long the step waited for it."""
    recorder.record("timing_s/teacher", report.waited_s)
    recorder.record_all(teacher_metrics(report))


def teacher_metrics(report: ServiceReport) -> dict[str, float]:
    """Each teacher's work, by metric name."""
    metrics: dict[str, float] = {}
    for name, of_teacher in report.teachers.items():
        values = {
            "score_s": of_teacher.score_s,
            "idle_share": of_teacher.idle_share,
            "trajectories": of_teacher.num_trajectories,
            "tokens_per_s": of_teacher.tokens_per_s,
            "restarts": of_teacher.num_restarts,
            "cache_hits": of_teacher.num_stored,
        }
        metrics |= {f"teacher/{name}/{metric}": value for metric, value in values.items()}
    return metrics
