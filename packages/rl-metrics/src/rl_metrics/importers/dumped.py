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


def as_rollouts(step: int, dumped: Sequence[Dumped]) -> list[RolloutRow]:
    """Return the trajectories of a step, with one group per prompt and the policy version of the previous step."""
    num_sessions: dict[str, int] = {}
    rows = []
    for response in dumped:
        session = num_sessions.get(response.problem, 0)
        num_sessions[response.problem] = session + 1
        rows.append(
            RolloutRow(
                step=step,
                time=math.nan,
                prompt_uid=f"{step}-{response.problem}",
                problem=response.problem,
                session=session,
                source=response.source,
                prompt=response.prompt,
                response=response.response,
                ground_truth=response.ground_truth,
                reward=response.reward,
                components=response.components,
                finish="unknown",
                policy_version=max(step - 1, 0),
            )
        )
    return rows


def as_samples(step: int, dumped: Sequence[Dumped], *, trainer: str) -> list[GenerationSample]:
    """Return the samples of the validation after a step."""
    return [
        GenerationSample(
            prompt_uid=response.problem,
            input=response.prompt,
            output=response.response,
            score=response.reward,
            ground_truth=response.ground_truth,
            policy_version=(step, step),
            source=trainer,
            components=response.components,
            data_source=response.source,
            finish="unknown",
        )
        for response in dumped
    ]


def numbers(row: Mapping[str, Any], *, without: frozenset[str]) -> dict[str, float]:
    """Return the finite numbers of a row, except those of these names; True counts as 1."""
    values = {name: number_or_nan(value) for name, value in row.items() if name not in without}
    return {name: value for name, value in values.items() if not math.isnan(value)}
