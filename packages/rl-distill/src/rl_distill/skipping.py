"""Updates that were skipped because something was not finite: counted, and when there are too many, the rows saved."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from rl_core.data import Batch, Ragged
from rl_core.errors import RLError
from rl_core.record_fields import converts_arguments
from rl_distill.learner import StepResult

_log = structlog.get_logger(__name__)

MAX_SAVED_ROWS = 256


class NonFiniteError(RLError, FloatingPointError):
    """Loss or gradients were NaN or infinite too often; the weights are as they were before these updates."""


class SkippedUpdates:
    """Counts updates in a row that were skipped."""

    @converts_arguments
    def __init__(self, *, most: int, directory: Path) -> None:
        """Nothing was skipped yet.

        Args:
            most: Skipped updates in a row that are put up with.
            directory: Where the rows are saved when there is one more.
        """
        self._most, self._directory = most, directory
        self.in_a_row = 0
        self.total = 0

    def check(self, result: StepResult, batch: Batch, *, what: str) -> None:
        """Count an update.

        Args:
            result: Of the update.
            batch: What it was made from.
            what: Was updated, such as "policy".

        Raises:
            NonFiniteError: More in a row were skipped than are put up with; the message names the file with the rows.
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
                f"{self.in_a_row} updates of the {what} in a row were skipped ({cause}); the weights are those of step "
                f"{result.step}. {found} had something that is not finite; the rows are in {file}. Look there for "
                "infinite logprobs, advantages or returns, or lower the learning rate."
            )


@converts_arguments
def save_rows(batch: Batch, rows: tuple[int, ...], file: Path) -> Path:
    """Write rows as lines of JSON, to be looked at: keys, and every column's values.

    Args:
        batch: Where they are.
        rows: Which; the first 256 are written.
        file: Is replaced.
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
                column = batch[name]
                value = column[row] if isinstance(column, Ragged) else np.asarray(column[row])
                line[name] = value.tolist()
            stream.write(json.dumps(line) + "\n")
    return file
