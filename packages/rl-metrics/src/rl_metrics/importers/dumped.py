"""Responses of another trainer, as trajectories and samples; they do not identify their sessions."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from rl_core.errors import DataError
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import number_or_nan
from rl_metrics.run_files.rollout_log import RolloutRow

log = structlog.get_logger(__name__)

MAX_ROWS = 20_000
"""Maximum number of rows read from one file."""


class StepResponses(NamedTuple):
    """Responses of a step, each a dict of fields of `RolloutRow`: prompt, response, reward, components, ground_truth.

    Attributes:
        step: The trainer's own step number.
        trained: Responses of training.
        validated: Responses of the validation after the step.
        written: When the former were written, in seconds since the epoch; NaN if unknown.
    """

    step: int
    trained: Sequence[Mapping[str, Any]] = ()
    validated: Sequence[Mapping[str, Any]] = ()
    written: float = math.nan


def step_files(folder: Path | None, *globs: str, name: str, such_as: str) -> list[tuple[int, Path]]:
    """Return the files of a folder, ordered by step.

    Args:
        folder: Folder of the files; None returns none.
        globs: Globs of the files in the folder.
        name: Regular expression of file names; its first group is the step.
        such_as: Example of a file name, for the error.

    Raises:
        DataError: The folder does not exist.
    """
    if folder is None:
        return []
    if not folder.is_dir():
        found = "a file" if folder.exists() else f"nothing there (looked in {Path.cwd()})"
        raise DataError(f"{folder} must be a folder with files such as {such_as}; found {found}.")
    files = [(re.fullmatch(name, file.name), file) for glob in globs for file in folder.glob(glob)]
    return sorted((int(match[1]), file) for match, file in files if match and file.is_file())


def whole_rows(
    rows: Iterable[dict[str, Any]], file: Path, *, needs: Sequence[str], of: type = object
) -> list[dict[str, Any]]:
    """Return the rows that have all of these fields, at most `MAX_ROWS`, and warn about the others.

    Args:
        rows: Rows of a file.
        file: The file, for the warning.
        needs: Names of the fields.
        of: Type of their values.
    """
    whole: list[dict[str, Any]] = []
    left_out = {"incomplete": 0, "more_than_fit_a_step": 0}
    for row in rows:
        if any(row.get(name) is None or not isinstance(row[name], of) for name in needs):
            left_out["incomplete"] += 1
        elif len(whole) < MAX_ROWS:
            whole.append(row)
        else:
            left_out["more_than_fit_a_step"] += 1
    if any(left_out.values()):
        log.warning("rows_passed_over", path=str(file), needs=list(needs), **left_out)
    return whole


def as_rollouts(step: int, responses: Iterable[Mapping[str, Any]]) -> list[RolloutRow]:
    """Return the trajectories of a step, with one group per prompt and the policy version of the previous step."""
    num_sessions = Counter[str]()
    rows = []
    for response in responses:
        problem = _problem_of(response["prompt"])
        num_sessions[problem] += 1
        rows.append(
            RolloutRow(
                step=step,
                time=math.nan,
                prompt_uid=f"{step}-{problem}",
                problem=problem,
                session=num_sessions[problem] - 1,
                finish="unknown",
                policy_version=max(step - 1, 0),
                **response,
            )
        )
    return rows


def as_samples(step: int, responses: Iterable[Mapping[str, Any]], *, trainer: str) -> list[GenerationSample]:
    """Return the samples of the validation after a step."""
    return [
        GenerationSample(
            prompt_uid=_problem_of(response["prompt"]),
            input=response["prompt"],
            output=response["response"],
            score=response.get("reward", math.nan),
            ground_truth=response.get("ground_truth"),
            policy_version=(step, step),
            source=trainer,
            components=response.get("components", {}),
            data_source=response.get("source", "default"),
            finish="unknown",
        )
        for response in responses
    ]


def _problem_of(prompt: str) -> str:
    """Return an identifier of a prompt, the same at every step."""
    return hashlib.sha256(prompt.encode(errors="replace")).hexdigest()[:16]


def numbers(row: Mapping[str, Any], *, without: frozenset[str]) -> dict[str, float]:
    """Return the finite numbers of a row, except those of these names; True counts as 1."""
    values = {name: number_or_nan(value) for name, value in row.items() if name not in without}
    return {name: value for name, value in values.items() if not math.isnan(value)}
