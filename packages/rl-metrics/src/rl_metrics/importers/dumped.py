"""Generations of another trainer, which do not identify their sessions."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from rl_core.data import Json
from rl_core.errors import DataError
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import number_or_nan
from rl_metrics.run_files.rollout_log import RolloutRow

log = structlog.get_logger(__name__)

MAX_ROWS = 20_000
"""Maximum number of rows read from one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumped:
    """One response of another trainer.

    Attributes:
        prompt: Prompt as text.
        response: Response as text.
        reward: Reward; NaN without one.
        components: Parts of the reward by name.
        ground_truth: Expected answer; None without one.
        source: Data source of the prompt.
    """

    prompt: str
    response: str
    reward: float = math.nan
    components: Mapping[str, float] = field(default_factory=dict)
    ground_truth: Json = None
    source: str = "default"

    @property
    def problem(self) -> str:
        """Identifier of the prompt, the same at every step."""
        return hashlib.sha256(self.prompt.encode(errors="replace")).hexdigest()[:16]


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
    return sorted((int(found[1]), file) for found, file in files if found and file.is_file())


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


def as_rollouts(step: int, dumped: Sequence[Dumped]) -> list[RolloutRow]:
    """Return the trajectories of a step, with one group per prompt and the policy version of the previous step."""
    num_sessions: dict[str, int] = {}
    rows = []
    for one in dumped:
        session = num_sessions.get(one.problem, 0)
        num_sessions[one.problem] = session + 1
        rows.append(
            RolloutRow(
                step=step,
                time=math.nan,
                prompt_uid=f"{step}-{one.problem}",
                problem=one.problem,
                session=session,
                source=one.source,
                prompt=one.prompt,
                response=one.response,
                ground_truth=one.ground_truth,
                reward=one.reward,
                components=one.components,
                finish="unknown",
                policy_version=max(step - 1, 0),
            )
        )
    return rows


def as_samples(step: int, dumped: Sequence[Dumped], *, trainer: str) -> list[GenerationSample]:
    """Return the samples of the validation after a step."""
    return [
        GenerationSample(
            prompt_uid=one.problem,
            input=one.prompt,
            output=one.response,
            score=one.reward,
            ground_truth=one.ground_truth,
            policy_version=(step, step),
            source=trainer,
            components=one.components,
            data_source=one.source,
            finish="unknown",
        )
        for one in dumped
    ]


def numbers(row: Mapping[str, Any], *, without: frozenset[str]) -> dict[str, float]:
    """Return the finite numbers of a row, except those of these names; True counts as 1."""
    found = {name: number_or_nan(value) for name, value in row.items() if name not in without}
    return {name: number for name, number in found.items() if not math.isnan(number)}
