"""`new DIR`: write settings, a reward and ten problems as the start of a new run."""

import argparse
import inspect
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tomli_w

from rl_core.cluster import visible_gpus
from rl_core.errors import SettingsError
from rl_core.files import read_toml
from rl_core.terminal_text import say
from rl_trainer_parts.checks.model_folder import check_policy_folder
from rl_trainer_parts.learning.mixtures import model_config
from rl_trainer_parts.settings.fields import leaves, setting_fields
from rl_trainer_parts.settings.schema import RunSettings, Settings

HUB_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
"""A small model of a supported family, with short answers."""

MODEL = Path("models") / HUB_MODEL.partition("/")[2]
REWARD = Path(__file__).with_name("starter_reward.py")
STARTER = Path(__file__).with_name("starter")
"""Problems, and settings, of a new run."""

WIDTH = 110


def new(words: Sequence[str], kind: type[Settings], *, program: str) -> int:
    """Write the folder and print the next commands; return the exit status.

    Args:
        words: `DIR [--model FOLDER]`.
        kind: The trainer's settings class.
        program: The trainer's command.

    Raises:
        SettingsError: The folder is not empty or cannot be written, or the model cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog=f"{program} new", description="Write settings, a reward and ten problems as the start of a new run."
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="Hugging Face folder of the model to train")
    options = parser.parse_args(words)
    folder: Path = options.folder
    texts = {
        "settings.toml": settings_text(starter_values(folder, options.model), kind, program=program),
        "reward.py": REWARD.read_text(),
        **{name: (STARTER / name).read_text() for name in ("train.jsonl", "validation.jsonl")},
    }
    write_new(folder, texts)
    say(f"wrote {', '.join(str(folder / name) for name in texts)}")
    say("next:")
    for command in _next_commands(program, folder / "settings.toml", has_model=options.model is not None):
        say(f"  {command}")
    return 0


def starter_values(folder: Path, model: Path | None) -> dict[str, object]:
    """Settings that a user is likely to change, by name, with values that suit this machine and the model.

    Raises:
        SettingsError: The model cannot be used.
    """
    if model is not None and (problems := [*check_policy_folder(model, setting="--model")]):
        raise SettingsError("\n".join(problems))
    values = dict(leaves(read_toml(STARTER / "settings.toml")))
    if model is not None:
        positions = model_config(model).max_position_embeddings
        values["prompts.max_tokens"] = min(values["prompts.max_tokens"], positions // 4)
        left = positions - values["prompts.max_tokens"]
        values["rollout.max_response_tokens"] = min(values["rollout.max_response_tokens"], left)
    dtype = "bfloat16" if visible_gpus() else "float32"
    runs, name = RunSettings().directory.resolve(), folder.resolve().name
    return values | {
        "run.name": f"{name}-run" if folder.resolve().parent == runs else name,  # not this folder itself
        "policy.path": model or MODEL,
        "prompts.train": folder / "train.jsonl",
        "prompts.validation": folder / "validation.jsonl",
        "prompts.plain_prompts": "chat" if model is None or _has_chat_template(model) else "raw",
        "reward.function": f"{folder / 'reward.py'}:reward",
        "optimizer.dtype": dtype,
        "vllm.dtype": dtype,
    }


def _has_chat_template(model: Path) -> bool:
    files = (model / name for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"))
    return any(
        "chat_template" in file.name or '"chat_template"' in file.read_text() for file in files if file.is_file()
    )


def settings_text(values: Mapping[str, object], kind: type[Settings], *, program: str) -> str:
    """A settings file whose sections and settings have their docstrings as comments.

    Args:
        values: Values by name; unknown names are left out.
        kind: The trainer's settings class.
        program: The trainer's command.
    """
    fields = setting_fields(kind)
    head = (
        f"Settings of `{program} train`. Relative paths start at the folder in which the command runs. Settings that "
        f"are not listed keep their defaults: `{program} train --help` explains all settings, `{program} train "
        "--help rollout` those of one section, and docs/settings.md lists them."
    )
    lines = [*_comment(head)]
    section = ""
    for name in (name for name in fields if name in values):
        if (here := name.partition(".")[0]) != section:
            section = here
            meaning = inspect.getdoc(kind.model_fields[section].annotation) or ""
            lines += ["", *_comment(meaning.partition("\n")[0]), f"[{section}]"]
        value = values[name]
        line = tomli_w.dumps({name.partition(".")[2]: str(value) if isinstance(value, Path) else value}).rstrip("\n")
        lines += ["", *_comment(fields[name].meaning), line]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def write_new(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files into a new or empty folder.

    Raises:
        SettingsError: The folder is not empty, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = min((path.name for path in folder.iterdir()), default=None)
        if there is not None:
            raise SettingsError(f"{folder} must be a new or empty folder; found {there} in it. Choose another folder.")
        for name, text in texts.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise SettingsError(f"{folder} cannot be written ({error}). Choose another folder.") from None


def _next_commands(program: str, file: Path, *, has_model: bool) -> Iterator[str]:
    path = shlex.quote(str(file))
    if not has_model:
        yield f"hf download {HUB_MODEL} --local-dir {MODEL}"
        yield f"    (or set policy.path in {path} to the folder of another model)"
    yield f"{program} check-machine {path}"
    yield f"{program} train {path} --dry-run"
    yield f"{program} train {path}"
