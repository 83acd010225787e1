"""Counts updates skipped because of non-finite values, and raises an error after too many in a row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from rl_core.data import Batch
from rl_core.errors import RLError
from rl_core.record_fields import converts_arguments
from rl_distill.learner import StepResult

_log = structlog.get_logger(__name__)

MAX_SAVED_ROWS = 256


class NonFiniteError(RLError, FloatingPointError):
    """Too many consecutive updates had a non-finite loss or gradient norm; the weights are those before them."""


class SkippedUpdates:
    """Counts consecutive skipped updates."""

    @converts_arguments
    def __init__(self, *, most: int, directory: Path) -> None:
        """Start counting from 0.

        Args:
            most: Maximum number of consecutive skipped updates.
            directory: Folder in which the rows of the update that exceeds the maximum are saved.
        """
        self._most, self._directory = most, directory
        self.in_a_row = 0
        self.total = 0

    def check(self, result: StepResult, batch: Batch, *, what: str) -> None:
        """Count an update; called after each one.

        Args:
            result: Result of the update.
            batch: Batch of the update.
            what: The updated model, e.g. "policy"; used in the file name and messages.

        Raises:
            NonFiniteError: More consecutive updates were skipped than allowed; the message names the file with the
                rows.
        """
        if result.is_applied:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.total += 1
        cause = f"loss {result.loss:g}, gradient norm {result.grad_norm:g}"
        _log.warning("update_skipped", what=what, step=result.step + 1, cause=cause, in_a_row=self.in_a_row)
        if self.in_a_row > self._most:
            rows = result.broken_rows or tuple(range(len(batch)))
            file = save_rows(batch, rows, self._directory / f"{what}_step_{result.step + 1}.jsonl")
            found = f"{len(result.broken_rows)} of {len(batch)} rows" if result.broken_rows else "no single row"
            raise NonFiniteError(
                f"skipped {self.in_a_row} updates of the {what} in a row ({cause}); the weights are those of step "
                f"{result.step}. {found} had a value that is not finite; the rows are in {file}. Check them for "
                "infinite logprobs, advantages or returns, or lower the learning rate."
            )


@converts_arguments
def save_rows(batch: Batch, rows: tuple[int, ...], file: Path) -> Path:
    """Write the keys and columns of rows as JSON lines, for inspection.

    Args:
        batch: Batch of the rows.
        rows: Indices of the rows; at most the first 256 are written.
        file: File to write; an existing one is replaced.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as stream:
        for row in rows[:MAX_SAVED_ROWS]:
            key = batch.keys[row]
            line: dict[str, Any] = {
                "prompt_uid": key.prompt_uid,
                "session_index": key.session_index,
                "output_index": key.output_index,
            }
            for name in sorted(batch.names):
                line[name] = np.asarray(batch[name][row]).tolist()
            stream.write(json.dumps(line) + "\n")
    return file
