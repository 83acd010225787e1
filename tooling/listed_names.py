"""List every setting of an installed verl or TRL, for rl_trainer_parts/settings/other_libraries/.

    python -m tooling.listed_names verl SITE_PACKAGES > verl-0.9.1.txt
    python -m tooling.listed_names trl SITE_PACKAGES > trl-1.16.0.txt

The libraries are read, not imported. After an update, `names.toml` needs a row for each new name; a test lists them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

COMPOSED = "verl/trainer/config/_generated_ppo*_trainer.yaml"
"""verl's trainers with all defaults composed, one file for each backend."""

OVER_THEM = "verl/experimental/*/config/*_trainer.yaml"
"""Trainers on top of those: fully asynchronous, and one step off policy."""

OF_HYDRA = ("defaults", "hydra", "_target_")
CLASSES = (
    ("trl/trainer/grpo_config.py", "GRPOConfig"),
    ("trl/trainer/base_config.py", "_BaseConfig"),
    ("transformers/training_args.py", "TrainingArguments"),
)


def main(arguments: list[str]) -> int:
    """Print the names of a library."""
    library, site = arguments
    names = {"verl": names_of_verl, "trl": names_of_trl}[library](Path(site))
    sys.stdout.write("".join(f"{name}\n" for name in dict.fromkeys(names)))
    return 0


def names_of_verl(site: Path) -> Iterator[str]:
    """Yield the full name of every value in verl's configurations."""
    for file in (*sorted(site.glob(COMPOSED)), *sorted(site.glob(OVER_THEM))):
        yield from _leaves(yaml.safe_load(file.read_text()))


def names_of_trl(site: Path) -> Iterator[str]:
    """Yield the arguments of GRPOTrainer, then the fields of GRPOConfig and of what it inherits from."""
    trainer = _class_of(site / "trl/trainer/grpo_trainer.py", "GRPOTrainer")
    start = next(one for one in trainer.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
    yield from (one.arg for one in start.args.args if one.arg not in ("self", "args"))
    for file, name in CLASSES:
        fields = (one.target for one in _class_of(site / file, name).body if isinstance(one, ast.AnnAssign))
        yield from (one.id for one in fields if isinstance(one, ast.Name))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if key in OF_HYDRA:
            continue
        if isinstance(value, Mapping) and set(value) - {"_target_"}:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _class_of(file: Path, name: str) -> ast.ClassDef:
    return next(
        one for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.ClassDef) and one.name == name
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
