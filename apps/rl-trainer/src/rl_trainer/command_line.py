"""What the commands of both trainers share: words, complaints, logs."""

import logging
import sys
import warnings
from pathlib import Path

import structlog

from rl_core.errors import SettingsError

MISTAKE = 2


def configure_logs() -> None:
    """Warnings and errors of the packages go to the standard error, so that they never cut a progress bar in two."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # the one of now, which a caller may redirect
    )
    warnings.filterwarnings("ignore", module=r"megatron\..*")  # it warns of every optional package that is not there


def take_flag(words: list[str], flag: str) -> bool:
    """Remove a flag, and say whether it was there."""
    was_there = flag in words
    words[:] = [word for word in words if word != flag]
    return was_there


def take_option(words: list[str], option: str) -> str | None:
    """Remove `--option VALUE` or `--option=VALUE`, and give its value."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option:
            if equals:
                del words[index]
                return value
            if index + 1 >= len(words):
                raise SettingsError(f"{option} needs a value.")
            value = words[index + 1]
            del words[index : index + 2]
            return value
    return None


def take_file(words: list[str], command: str) -> Path | None:
    """Remove the settings file, which comes first; the command is named as users write it."""
    if words and not words[0].startswith("-"):
        return Path(words.pop(0))
    if not words:
        raise SettingsError(f"{command.split()[-1]} needs a settings file: {command} SETTINGS.toml")
    return None


def complain(*lines: str, status: int = MISTAKE) -> int:
    """Write what is wrong to the standard error."""
    sys.stderr.write("".join(f"error: {line}\n" if index == 0 else f"{line}\n" for index, line in enumerate(lines)))
    return status


def say(line: str) -> None:
    """Write a line at once, also into a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
