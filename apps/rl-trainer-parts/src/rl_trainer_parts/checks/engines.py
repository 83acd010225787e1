"""Check that the installed engines support the models, and the agent loop its options, before models load."""

import asyncio

from rl_core.errors import EngineError, SettingsError
from rl_rollout.engines import engine_class
from rl_rollout.loops import resolve_loop
from rl_rollout.prompts import PromptTokenizer
from rl_trainer_parts.learning.teachers import teacher_engine_options
from rl_trainer_parts.rollouts.engines import engine_options
from rl_trainer_parts.settings.schema import Settings


def check_engines(settings: Settings) -> None:
    """Check that each engine supports its model and options.

    Skipped when the run joins a Ray cluster, whose machines may have other engines installed.

    Raises:
        SettingsError: Names the setting, what is supported and what was found.
        MissingExtraError: An engine's library is not installed.
    """
    if settings.cluster.ray_address is not None:
        return
    found, served = [], [("rollout.engine", settings.rollout.engine, settings.policy.path, engine_options(settings))]
    for name, teacher in settings.distillation.teachers.items():
        if teacher.engine == "vllm":
            setting, options = f"distillation.teachers.{name}.engine", teacher_engine_options(settings, name)
            served.append((setting, "vllm", teacher.model, options))
    for setting, engine, folder, options in served:
        check = getattr(engine_class(engine), "check", None)
        try:
            if check is not None:
                check(folder, options)
        except EngineError as error:
            found.append(f'{setting} = "{engine}": {error} Change that, or use another model or engine.')
    if found:
        raise SettingsError("\n".join(found))


def check_loop(settings: Settings, tokenizer: PromptTokenizer) -> list[str]:
    """Check that the agent loop works: start its tool servers once, and stop them.

    When the run joins a Ray cluster, the loop may run on another machine; then only its options are checked.

    Returns:
        Lines for the plan, such as the tools of each server.

    Raises:
        SettingsError: An option is wrong, or a server does not start.
        MissingExtraError: The loop needs a library that is not installed.
    """
    rollout = settings.rollout
    is_elsewhere = settings.cluster.ray_address is not None and settings.placements.get("roles.placement") == "ray"
    try:
        loop = resolve_loop(rollout.loop, rollout.loop_options)
        try:
            check = None if is_elsewhere else getattr(loop, "check", None)
            return [] if check is None else asyncio.run(check(tokenizer))
        finally:
            if hasattr(loop, "close"):
                loop.close()
    except SettingsError as error:
        raise SettingsError(f"rollout.loop = {rollout.loop!r} with rollout.loop_options: {error}") from error
