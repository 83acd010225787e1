"""Generations that another trainer wrote without saying which session they are of."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import number_or_nan
from rl_metrics.run_files.rollout_log import RolloutRow

MAX_ROWS = 20_000
"""Of one file, so many are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumped:
    """One response.

    Attributes:
        prompt: As text.
        response: As text.
        reward: NaN where it has none.
        components: Parts of the reward by name.
        ground_truth: What was expected; None where nothing was.
        source: Data source of the prompt.
    """

    prompt: str
    response: str
    reward: float = math.nan
    components: Mapping[str, float] = field(default_factory=dict)
    ground_truth: str | None = None
    source: str = "default"

    @property
    def problem(self) -> str:
        """Names the prompt: the same at every step."""
        return hashlib.sha256(self.prompt.encode(errors="replace")).hexdigest()[:16]


def step_files(folder: Path | None, *globs: str, name: str, such_as: str) -> list[tuple[int, Path]]:
    """The files of a folder by rising step.

    Args:
        folder: None has no files.
        globs: Where they lie in it.
        name: What the name of one fits; its first group is the step.
        such_as: An example of a name.

    Raises:
        DataError: There is no such folder.
    """
    if folder is None:
        return []
    if not folder.is_dir():
        found = "a file" if folder.exists() else f"nothing there (looked in {Path.cwd()})"
        raise DataError(f"{folder} must be a folder with files such as {such_as}; found {found}.")
    files = [(re.fullmatch(name, file.name), file) for glob in globs for file in folder.glob(glob)]
    return sorted((int(found[1]), file) for found, file in files if found and file.is_file())


def as_rollouts(step: int, dumped: Sequence[Dumped]) -> list[RolloutRow]:
    """Trajectories of a step: those of one prompt are one group, and the policy had done the steps before."""
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
    """Samples of the validation after a step."""
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
        )
        for one in dumped
    ]


def numbers(row: Mapping[str, Any], *, without: frozenset[str]) -> dict[str, float]:
    """The finite numbers of a row, but those of these names; True is 1."""
    found = {name: number_or_nan(value) for name, value in row.items() if name not in without}
    return {name: number for name, number in found.items() if not math.isnan(number)}
