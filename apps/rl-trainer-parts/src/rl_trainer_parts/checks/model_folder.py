"""Checks of a model folder before the model loads."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rl_core.files import read_json_object
from rl_trainer_parts.settings.fields import problems_of

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""A Hugging Face hub id: owner and name."""


FILES = (".jsonl", ".json", ".parquet")
"""File endings, which no hub id has."""


def missing_path(path: Path, *, setting: str, kind: Literal["model", "dataset"], file: Path | None = None) -> str:
    """Describe a missing path, and where it exists or how to download it.

    Args:
        path: The missing path.
        setting: Name of the setting.
        kind: Kind of the hub's repository that the path may name.
        file: The settings file. A relative path may exist in its folder, or in that folder's parent.
    """
    problem = f"{setting}: {path} does not exist (looked in {Path.cwd()})."
    if path.parts[:1] == ("~",):
        return f"{problem} ~ is not expanded here. Use $HOME, which the shell expands."
    if file is not None and not path.is_absolute():
        here = file.resolve().parent
        folder_with_it = next((one for one in (here.parent, here) if (one / path).exists()), None)
        if folder_with_it is not None:
            return f"{problem} It exists in {folder_with_it}: run the command in that folder."
    if path.suffix in FILES:
        return problem
    words = "" if kind == "model" else " --repo-type dataset"
    what = "folder" if kind == "model" else "file of that folder"
    if len(path.parts) > 1 and path.parts[0] == f"{kind}s":  # the folder of a suggested download
        return (
            f"{problem} Download it with `hf download OWNER/{Path(*path.parts[1:2])}{words} --local-dir "
            f"{Path(*path.parts[:2])}`, or use another {what}."
        )
    if not HUB_ID.fullmatch(str(path)) or path.parent.is_dir():
        return problem
    folder = f"{kind}s/{path.name}"
    return (
        f"{problem} It looks like a {kind} on the Hugging Face Hub. Download it with `hf download {path}{words} "
        f"--local-dir {folder}`, and use the {what}."
    )


def check_policy_folder(
    path: Path, *, setting: str, needs_tokenizer: bool = True, file: Path | None = None
) -> Iterator[str]:
    """Problems of a Hugging Face folder; for `file` see `missing_path`."""
    if not path.exists():
        yield missing_path(path, setting=setting, kind="model", file=file)
        return
    if not path.is_dir():
        yield f"{setting}: {path} is not a folder. Use the folder with the model's config.json."
        return
    config = path / "config.json"
    if not config.is_file():
        yield f"{setting}: {path} has no config.json, so it is not a Hugging Face model folder."
    else:
        yield from problems_of(f"{setting}: ", read_json_object, config)
    has_tokenizer = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if needs_tokenizer and not has_tokenizer:
        yield (
            f"{setting}: {path} has no tokenizer (tokenizer.json). Copy the tokenizer files of the original model "
            "into it."
        )
    if not any(path.glob("*.safetensors")):
        yield f"{setting}: {path} has no *.safetensors weights. Other formats can run code and are not read."
