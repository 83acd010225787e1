"""The command line: train, validate, export."""

import asyncio
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from rl_core.errors import CheckpointError, DataError, MissingExtraError, RLError, SettingsError

MISTAKE = 2
FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status.

    OpenMP's threads sleep while they wait: spinning, they starve each other as soon as anything else runs on the
    machine (measured on two busy cores: steps 20 to 100 times slower).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[[list[str]], int]] = {"train": train, "validate": validate, "export": export}
    if not words or "--help" in words or "-h" in words:
        from rl_sync_trainer.help_text import help_text

        say(help_text())
        return 0 if words else MISTAKE
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    configure_logs()
    command = commands.get(words[0])
    if command is None:
        return complain(f"unknown command {words[0]!r}; known: {', '.join(commands)}.")
    try:
        return command(words[1:])
    except (SettingsError, DataError, MissingExtraError) as error:
        return complain(str(error))
    except CheckpointError as error:
        return complain(str(error), status=FAILED)
    except RLError as error:
        return complain(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), status=FAILED)
    except KeyboardInterrupt:
        return 130


def train(words: list[str]) -> int:
    """`train SETTINGS.toml [--resume] [--dry-run] [--section.name=value ...]`."""
    resume, dry_run = take_flag(words, "--resume"), take_flag(words, "--dry-run")
    file = take_file(words, "train")
    from rl_sync_trainer.sources import load_settings

    settings = load_settings(file, words, os.environ)
    say(f"rl-sync-trainer: run {settings.run_folder}, {settings.trainer.steps} steps; checking settings and files")
    from rl_sync_trainer.checks import check_settings, check_trainable
    from rl_sync_trainer.distillation_checks import check_teachers
    from rl_sync_trainer.inputs import read_inputs
    from rl_sync_trainer.plan import describe_plan
    from rl_sync_trainer.run_folder import RunFolder, open_run, require_resumable

    check_settings(settings)
    check_trainable(settings)
    inputs = read_inputs(settings)
    check_teachers(settings, inputs.tokenizer, inputs.train)
    if dry_run:
        if resume:
            require_resumable(RunFolder(settings.run_folder), settings)
        say(describe_plan(settings, inputs.counts))
        return 0
    with open_run(settings, resume=resume, say=say) as folder:
        from rl_sync_trainer.console import make_console
        from rl_sync_trainer.session import Session

        session = Session(settings, inputs, folder, make_console(settings))
        return asyncio.run(session.run()).exit_status


def validate(words: list[str]) -> int:
    """`validate SETTINGS.toml [--policy FOLDER] [--section.name=value ...]`."""
    policy = take_option(words, "--policy")
    file = take_file(words, "validate")
    from rl_sync_trainer.policies import find_policy
    from rl_sync_trainer.sources import load_settings

    if policy is not None:
        words.append(f"--policy.path={find_policy(Path(policy))}")
    settings = load_settings(file, words, os.environ)
    say(f"rl-sync-trainer: evaluating {settings.policy.path}")
    from rl_sync_trainer.checks import check_settings
    from rl_sync_trainer.inputs import read_inputs
    from rl_sync_trainer.validating import validate_policy

    check_settings(settings)
    for name, value in asyncio.run(validate_policy(settings, read_inputs(settings))).items():
        say(f"{name} {value:.4f}")
    return 0


def export(words: list[str]) -> int:
    """`export CHECKPOINT FOLDER`."""
    if len(words) != 2:
        raise SettingsError("export takes a checkpoint (or a run folder) and the folder to write.")
    from rl_sync_trainer.policies import export_policy

    target = Path(words[1])
    source = export_policy(Path(words[0]), target)
    say(f"exported {source} to {target}")
    return 0


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
    """Remove the settings file, which comes first."""
    if words and not words[0].startswith("-"):
        return Path(words.pop(0))
    if not words:
        raise SettingsError(f"{command} needs a settings file: rl-sync-trainer {command} SETTINGS.toml")
    return None


def complain(*lines: str, status: int = MISTAKE) -> int:
    """Write what is wrong to the standard error."""
    sys.stderr.write("".join(f"error: {line}\n" if index == 0 else f"{line}\n" for index, line in enumerate(lines)))
    return status


def say(line: str) -> None:
    """Write a line at once, also into a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
