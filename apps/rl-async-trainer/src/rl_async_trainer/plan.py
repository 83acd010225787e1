"""The plan that `train --dry-run` prints, and the rules about settings that have no effect together with others."""

from collections.abc import Iterator, Sequence

from rl_async_trainer.settings import AsyncSettings
from rl_core.terminal_text import counted
from rl_trainer_parts.checks.unused import Unused
from rl_trainer_parts.commands.plan import describe_plan
from rl_trainer_parts.rollouts.inputs import Inputs

PLACES = {"ray": "Ray actors", "process": "processes on this machine", "inline": "this process"}
RESTARTS = tuple(f"roles.{name}_restarts" for name in ("rollouter", "learner", "controller", "teacher"))

ASYNC_UNUSED = (
    Unused(
        names=(*RESTARTS, "roles.heartbeat_deadline_s"),
        when=lambda settings: settings.roles.placement == "inline",
        because='with roles.placement = "inline"',
    ),
    Unused(
        names=("roles.teacher_restarts",),
        when=lambda settings: not settings.distillation.teachers,
        because="without distillation.teachers",
    ),
    Unused(
        names=("schedule.validate_on", "schedule.validation_batch"),
        when=lambda settings: settings.prompts.validation is None and settings.prompts.test is None,
        because="without prompts.validation and prompts.test",
    ),
)


def describe_async_plan(settings: AsyncSettings, inputs: Inputs, loop_lines: Sequence[str] = ()) -> str:
    """The plan as lines of text: the part shared by both trainers, and how generation and training overlap."""
    places = {"inline_engine": "in the rollouter's process", "inline_rank": "in the learner host's process"}
    plan = describe_plan(settings, inputs, loop_lines, **places)
    return "\n".join([plan, *_schedule(settings)])


def _schedule(settings: AsyncSettings) -> Iterator[str]:
    schedule, options = settings.schedule, settings.schedule_options
    ahead = (options.max_staleness + 1) * options.groups_per_version
    yield "Schedule"
    yield f"  roles      rollouter and learner in {PLACES[settings.roles.placement]}"
    yield f"  mode       {_mode(settings)}"
    every = "step" if schedule.sync_every == 1 else f"{schedule.sync_every} steps"
    old = counted(options.max_staleness, "version")
    yield f"  versions   new weights every {every}, after {counted(options.groups_per_version, 'group')}"
    yield f"  ahead      at most {counted(ahead, 'group')} generated but not yet trained, up to {old} old"
    if schedule.max_inflight_groups is not None:
        yield f"             at most {schedule.max_inflight_groups} of them generated at once"


def _mode(settings: AsyncSettings) -> str:
    schedule = settings.schedule
    if settings.schedule_options.is_on_policy:
        return "on policy: the same steps as the synchronous trainer"
    if schedule.max_staleness == 0:
        return "streaming within a version: a step trains while the same weights generate the next ones"
    kind = "continue under new weights" if schedule.partial_rollout else "have one version each"
    return f"stale by at most {counted(schedule.max_staleness, 'version')}; responses {kind}"
