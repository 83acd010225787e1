"""Settings of the asynchronous trainer that have no effect together with others; see `unused_settings`."""

from rl_trainer_parts.checks.unused import Unused

RESTARTS = tuple(f"roles.{name}_restarts" for name in ("rollouter", "learner", "controller", "teacher"))

ASYNC_UNUSED = (
    Unused(
        names=(*RESTARTS, "roles.heartbeat_deadline_s"),
        when=lambda s: s.roles.placement == "inline",
        because='with roles.placement = "inline"',
    ),
    Unused(
        names=("roles.teacher_restarts",),
        when=lambda s: not s.distillation.teachers,
        because="without distillation.teachers",
    ),
    Unused(
        names=("schedule.validate_on", "schedule.validation_batch"),
        when=lambda s: s.prompts.validation is None and s.prompts.test is None,
        because="without prompts.validation and prompts.test",
    ),
)
