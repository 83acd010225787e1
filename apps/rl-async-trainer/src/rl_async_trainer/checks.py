"""What can be refused before anything heavy starts."""

from rl_async_trainer.settings import AsyncSettings, schedule_problems
from rl_core.errors import SettingsError
from rl_trainer.checks import check_settings


def check_async_settings(settings: AsyncSettings) -> None:
    """Refuse settings that cannot work.

    Raises:
        SettingsError: Each line names a setting, what it must be, and what it is.
    """
    problems = list(schedule_problems(settings))
    if problems:
        raise SettingsError("\n".join(problems))
    check_settings(settings)
