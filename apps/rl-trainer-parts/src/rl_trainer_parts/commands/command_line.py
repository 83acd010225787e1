"""Arguments, error messages and logging of the commands of both trainers."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import structlog

from rl_core.errors import CheckpointError, DataError, MissingExtraError, NotReadyError, RLError, SettingsError
from rl_core.registry import nearest_name
from rl_core.terminal_text import (
    counted,
    describe_version,
    escaped_event,
    escaped_lines,
    json_text,
    print_uncaught,
    say,
    use_utf8,
)

if TYPE_CHECKING:
    from rl_trainer_parts.settings.schema import Settings, SettingsT

FAILED = 1
MISTAKE = 2
"""Exit status after a mistake in settings or files."""

Command = Callable[[list[str]], int]

USAGE = """usage: {program} COMMAND ...

  new DIR [--model FOLDER]
      Write commented settings, a reward and ten problems as the start of a new run.
  check-machine [SETTINGS.toml] [--json] [--section.name=value ...]
      Check whether this machine can run the trainer, or these settings, and how to fix what is missing.
  check-model DIR [--json]
      Say what trains and serves a model and how much memory it needs, from its config.json; weights may be missing.
{train}
  train --help [SECTION]
      Explain every setting, or those of one section.
  validate SETTINGS.toml [--policy FOLDER] [--policy OTHER] [--best] [--data [NAME=]FILE ...] [--json FILE] [...]
      Evaluate a Hugging Face folder or a run, or compare two, on the validation and test problems or on other files.
{others}  export CHECKPOINT FOLDER [--best] [--merge | --adapter] [--base FOLDER]
      Write the policy of a checkpoint as a Hugging Face folder; for a run folder, that of its newest checkpoint, or
      with --best of its best validated one. A LoRA adapter is merged into its base, or written alone in peft's format.
      --base names the base if it has moved."""
"""The commands of a trainer, with gaps for its own: `train`, and those that the other trainer does not have."""
HELP = ("--help", "-h")
EXPORT_HELP = """\
export CHECKPOINT FOLDER: write the policy of a checkpoint, or of a run's newest one, as a Hugging Face folder.
  --best         Use the run's best validated checkpoint instead of its newest.
  --merge        Merge a LoRA adapter into its base model (default).
  --adapter      Write only the LoRA adapter, in peft's format.
  --base FOLDER  Where the adapter's base model is now, if it has moved."""
CHECK_MACHINE_HELP = """\
{program} check-machine [SETTINGS.toml] [--json] [--section.name=value ...]: check whether this machine can train.
  It checks Python, packages, GPUs, memory, shared memory and disk, and suggests fixes. With settings, it compares
  them with what that run needs. Exit status: 0 no problem, 1 problems.
  --json  Print one JSON object."""
CHECK_MODEL_HELP = """\
{program} check-model DIR [--json]: say what trains and serves a model, from its config.json; weights may be missing.
  It shows the back end, the engine, tokens of images (which need the processor's files), parameters, memory of each
  rank, proofs, adapters and settings that are refused.
  Exit status: 0 it can be trained, 1 it is refused.
  --json  Print one JSON object."""
WITH_SETTINGS = ("train", "validate")
"""Commands whose --help explains settings."""


SettingsClass = Callable[[], "type[Settings]"]
"""Returns a trainer's settings class, whose import takes a second."""


def run_program(
    arguments: Sequence[str] | None, *, name: str, usage: str, commands: Mapping[str, Command], settings: SettingsClass
) -> int:
    """Print help or the version, or run the command that the first word names; return the exit status.

    Args:
        arguments: The words after the program's name; None takes those of the shell.
        name: Name of the program and of its distribution.
        usage: All commands with their arguments and a description.
        commands: `train` and further commands by name; each may modify the argument list.
        settings: The trainer's settings class.
    """
    if arguments is None:
        use_utf8()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in HELP:
        say(usage)
        return 0 if words else MISTAKE
    if words[0] == "--version":
        say(describe_version(name))
        return 0
    asked = [index for index, word in enumerate(words) if word in HELP]
    if asked and words[0] in WITH_SETTINGS:
        explained = ("help", *words[asked[0] + 1 :])
        return run_command(explained, {"help": partial(explain, usage=usage, settings=settings)})
    first: dict[str, Command] = {
        "new": partial(_new, program=name, settings=settings),
        "check-machine": partial(_check_machine, program=name, settings=settings),
        "check-model": partial(_check_model, program=name),
        "train": commands["train"],
        "validate": partial(_validate, program=name, settings=settings),
    }
    return run_command(words, {**first, **commands, "export": export})


def _new(words: list[str], *, program: str, settings: SettingsClass) -> int:
    """`new DIR [--model FOLDER]`."""
    from rl_trainer_parts.commands.new import new

    return new(words, settings(), program=program)


def _check_machine(words: list[str], *, program: str, settings: SettingsClass) -> int:
    """`check-machine [SETTINGS.toml] [--json] [--section.name=value ...]`: every check with its advice."""
    if set(HELP) & set(words):
        say(CHECK_MACHINE_HELP.format(program=program))
        return 0
    as_json = take_flag(words, "--json")
    refuse_unknown_flags(words, ("--json",))
    from rl_trainer_parts.machine.judging import ANY_RUN, judge_machine
    from rl_trainer_parts.machine.needs import needs_of
    from rl_trainer_parts.machine.readings import read_machine

    needs = needs_of(read_settings(words, settings(), command=f"{program} check-machine")) if words else ANY_RUN
    checks = judge_machine(read_machine(needs.run_folder), needs)
    count = {state: sum(check.state == state for check in checks) for state in ("problem", "warning")}
    if as_json:
        listed = [{**check._asdict(), "advice": check.advice} for check in checks]
        say(json_text({"ok": not count["problem"], "checks": listed}).rstrip("\n"))
    else:
        for check in checks:
            say(f"{check.state:<8} {check.name:<14} {check.found}")
            if check.advice:
                say(f"{'':<23} try: {check.advice}")
        say(", ".join(counted(number, state) for state, number in count.items()))
    return FAILED if count["problem"] else 0


def _check_model(words: list[str], *, program: str) -> int:
    """`check-model DIR [--json]`: what trains, serves and proves a model."""
    if set(HELP) & set(words):
        say(CHECK_MODEL_HELP.format(program=program))
        return 0
    as_json = take_flag(words, "--json")
    refuse_unknown_flags(words, ("--json",))
    if len(words) != 1:
        raise SettingsError(f"check-model needs one model folder: {program} check-model DIR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from rl_trainer_parts.commands.check_model import check_model

    with suppress(BrokenPipeError):  # the reader, such as `head`, has closed the pipe
        return 0 if check_model(Path(words[0]), as_json=as_json) else FAILED
    return 0


def _validate(words: list[str], *, program: str, settings: SettingsClass) -> int:
    """`validate SETTINGS.toml [--policy FOLDER]... [--data [NAME=]FILE]... [--json FILE] [--best] [...]`."""
    named, data = ([*iter(partial(take_option, words, option), None)] for option in ("--policy", "--data"))
    json_file, best = take_option(words, "--json"), take_flag(words, "--best")
    if len({*named}) < len(named) or len(named) > 2:
        raise SettingsError(f"validate accepts --policy once, or twice to compare two; found {', '.join(named)}.")
    read = partial(read_settings, kind=settings(), command=f"{program} validate")
    from rl_trainer_parts.commands.evaluate import data_files, evaluate
    from rl_trainer_parts.commands.policies import opened_policy, with_run_policy
    from rl_trainer_parts.run.goal import best_checkpoint

    if best and not named:  # the best checkpoint of the run in `policy.path`, or of the settings' own run
        own = read(words)
        named = [str(own.policy.path if (own.policy.path / "checkpoints").is_dir() else own.run_folder)]
    policies: dict[str, Settings] = {}
    with ExitStack() as opened:
        for name in named:
            folder = opened.enter_context(opened_policy(best_checkpoint(Path(name), say) if best else Path(name)))
            own = read([*words, f"--policy.path={folder}"])
            # A full model, or one with its own adapter.
            policies[name] = own.model_copy(update={"lora": replace(own.lora, path=None)})
        if not named:
            own = with_run_policy(read(words), say)
            policies[str(own.policy.path)] = own
        evaluate(policies, data_files(data), None if json_file is None else Path(json_file), say)
    return 0


def read_settings(words: Sequence[str], kind: "type[SettingsT]", *, command: str) -> "SettingsT":
    """Return the settings of `SETTINGS.toml [--section.name=value ...]` and the environment.

    Args:
        words: The file, which may be left out if there are settings, and the settings.
        kind: The settings class.
        command: Program and command, for the error.

    Raises:
        SettingsError: There are no words, the file is in a run of another format, or a setting is wrong.
    """
    if not words:
        raise SettingsError(f"{command.split()[-1]} needs a settings file: {command} SETTINGS.toml")
    from rl_trainer_parts.run.folder import require_format
    from rl_trainer_parts.settings.sources import load_settings

    file = None if words[0].startswith("-") else Path(words[0])
    if file is not None:
        require_format(file.parent)
    return cast("SettingsT", load_settings(file, words if file is None else words[1:], os.environ, kind=kind))


def explain(words: list[str], *, usage: str, settings: SettingsClass) -> int:
    """Explain all settings, one section, or one setting."""
    from rl_trainer_parts.settings.algorithm_choice import option_fields
    from rl_trainer_parts.settings.fields import help_text, setting_fields

    topic, kind = words[0].lstrip("-").partition("=")[0] if words else "", settings()
    is_common = topic != "algorithm" and {topic} & {"", *kind.model_fields, *setting_fields(kind)}
    options = {} if is_common or "algorithm." in kind.left_out else option_fields()  # imports torch
    with suppress(BrokenPipeError):  # the reader, such as `head`, has closed the pipe
        say(help_text(usage, kind, topic=topic, options=options))
    return 0


def run_command(words: Sequence[str], commands: Mapping[str, Command]) -> int:
    """Run the command that the first word names and return its exit status.

    OpenMP threads sleep while they wait. If they spin, they starve each other whenever another program uses the CPUs
    (measured on two busy cores: steps take 20 to 100 times as long).

    Args:
        words: The command and its arguments.
        commands: Commands by name; each may modify the argument list.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    configure_logs()
    command = commands.get(words[0])
    if command is None:
        hint = f" Did you mean `train {words[0]}`?" if words[0].endswith(".toml") else nearest_name(words[0], commands)
        if words[0] == "sft":
            hint = " It has no rollouts to overlap: use `rl-sync-trainer sft`, then `train --policy.path=RUN`."
        if words[0] == "status":
            hint = " To check on a run, use `rl-metrics doctor RUN`."
        return complain(f"unknown command {words[0]!r}; known: {', '.join(commands)}.{hint}")
    try:
        status = command(list(words[1:]))
        _drop_what_nobody_reads()
        return status
    except (SettingsError, DataError, MissingExtraError) as error:
        return complain(str(error))
    except (CheckpointError, NotReadyError) as error:
        return complain(str(error), status=FAILED)
    except RLError as error:
        return complain(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), status=FAILED)
    except KeyboardInterrupt:
        return 130


def complain(*lines: str, status: int = MISTAKE) -> int:
    """Print an error to stderr."""
    text = "".join(f"error: {line}\n" if index == 0 else f"{line}\n" for index, line in enumerate(lines))
    sys.stderr.write(escaped_lines(text))
    return status


def _drop_what_nobody_reads() -> None:
    """Drop buffered output if the terminal is gone; Python would otherwise exit with its own status, 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def export(words: list[str]) -> int:
    """`export CHECKPOINT FOLDER [--best] [--merge | --adapter] [--base FOLDER]`."""
    if set(HELP) & set(words):
        say(EXPORT_HELP)
        return 0
    best, merge, adapter_alone = (take_flag(words, flag) for flag in ("--best", "--merge", "--adapter"))
    base = take_option(words, "--base")
    if len(words) != 2:
        raise SettingsError("export needs a checkpoint (or a run folder) and the folder to write.")
    if adapter_alone and (merge or base is not None):
        other = "--merge" if merge else "--base"
        raise SettingsError(f"export accepts either --adapter, to write the adapter alone, or {other}, to merge it.")
    from rl_trainer_parts.commands.policies import export_policy

    path, target = map(Path, words)
    if best:
        from rl_trainer_parts.run.goal import best_checkpoint

        path = best_checkpoint(path, say)
    base_folder = None if base is None else Path(base)
    source = export_policy(path, target, merges=merge, base=base_folder, adapter_alone=adapter_alone)
    say(f"exported {source} to {target}")
    return 0


def configure_logs() -> None:
    """Send warnings and errors of the packages to stderr, so that they never split a progress bar.

    Warnings and uncaught errors are escaped, so that they cannot garble the terminal.
    """
    sys.excepthook = print_uncaught
    own = (escaped_event, _print_event)
    *before, renderer = (one for one in structlog.get_config()["processors"] if one not in own)
    structlog.configure(
        processors=[*before, escaped_event, renderer, _print_event],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    warnings.filterwarnings("ignore", module=r"megatron\..*")  # it warns about every missing optional package


def _print_event(_logger: Any, _method: str, text: Any) -> NoReturn:
    """Print a rendered event to the current stderr, which a caller may redirect; a lost terminal stops no run."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    raise structlog.DropEvent


def take_flag(words: list[str], flag: str) -> bool:
    """Remove a flag and return whether it was present."""
    was_there = flag in words
    words[:] = [word for word in words if word != flag]
    return was_there


def refuse_unknown_flags(words: Sequence[str], known: Sequence[str]) -> None:
    """Refuse options that are neither known nor settings, which have a section.

    Raises:
        SettingsError: Names the option and the nearest known one.
    """
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("-") and "." not in name:
            raise SettingsError(f"unknown option {name}; known: {', '.join(known)}.{nearest_name(name, known)}")


def take_option(words: list[str], option: str) -> str | None:
    """Remove `--option VALUE` or `--option=VALUE` and return the value."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option:
            del words[index]
            if not equals and index == len(words):
                raise SettingsError(f"{option} needs a value.")
            return value if equals else words.pop(index)
    return None


def train_command(
    words: list[str], *, program: str, kind: "type[Settings]", trainer: Callable[[Any], dict[str, Any]]
) -> int:
    """`train SETTINGS.toml [--resume] [--dry-run] [--best] [--section.name=value ...]`, or `sft` with the same words.

    Args:
        words: Arguments after the command.
        program: Name of the program.
        kind: The settings class.
        trainer: Loads the trainer's libraries, and returns its own arguments of `train_checked`.
    """
    resume, dry_run, best = (take_flag(words, flag) for flag in ("--resume", "--dry-run", "--best"))
    settings = read_settings(words, kind, command=f"{program} {kind.command}")
    from rl_trainer_parts.reporting.trackers import make_console

    with closing(make_console(settings)) as console:
        console.say(f"{program}: run {settings.run_folder}; checking settings and files")
        with console.phase("loading libraries", is_brief=True):
            from rl_trainer_parts.commands.policies import with_run_policy
            from rl_trainer_parts.commands.train import train_checked

            own = trainer(settings)
        settings = with_run_policy(settings, console.say, best=best, resume=resume)
        return train_checked(settings, console=console, resume=resume, dry_run=dry_run, **own)
