"""TensorBoard event files, written by tensorboard itself, without torch or TensorFlow."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_core.errors import MissingExtraError, NotReadyError
from rl_metrics.generations import GenerationSample
from rl_metrics.trackers.text import plain_text

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

MAX_CELL = 4_000
"""Characters of a text in a table; the page of a run would hold them all."""

HEAD = "| score | input | output | ground truth | failure | policy version | source | prompt |\n" + "|---" * 8 + "|\n"


class TensorBoardTracker:
    """Writes scalars, and generations as a table in the text plugin, at the trainer's steps.

    What a resumed run writes takes the place of what is there of its own first step and later ones.
    """

    def __init__(self, directory: Path) -> None:
        """Begin an event file; a resumed run's stands beside those that are there.

        Args:
            directory: Where event files lie, such as `run/tensorboard`; it is made where missing.

        Raises:
            MissingExtraError: tensorboard is not installed.
        """
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtraError(
                "event files need tensorboard. Run: pip install 'rl-metrics[tensorboard]'"
            ) from error
        self._events, self._summaries = event_pb2, summary_pb2
        self._text = text_pb
        self._directory = directory
        self._writer = EventFileWriter(str(directory))
        self._has_begun = False
        self._is_closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a scalar for each metric.

        Raises:
            NotReadyError: After `close`.
            OSError: The file cannot be written.
        """
        with np.errstate(over="ignore"):  # scalars are float32: beyond it they are infinite
            values = {name: float(np.float32(value)) for name, value in metrics.items()}
        # Simple values, as torch's writer has them: every reader of event files knows these.
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, [self._summaries.Summary(value=scalars)])

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """The same as `log`: every value has a step of its own."""
        self.log(step, metrics)

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Write a Markdown table in which everything is shown as it is, and nothing is taken for Markdown or HTML.

        Raises:
            NotReadyError: After `close`.
            OSError: The file cannot be written.
        """
        table = HEAD + "".join(map(_row, samples))
        self._write(step, [self._text(name, table)])

    def close(self) -> None:
        """Write what is pending and close the file. Can be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._writer.close()

    def _write(self, step: int, summaries: "Sequence[Summary]") -> None:
        if self._is_closed:
            raise NotReadyError(f"the event file in {self._directory} is closed; make a new TensorBoardTracker.")
        if not self._has_begun:
            self._has_begun = True
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(step, self._events.Event(session_log=start))
        for summary in summaries:
            self._add(step, self._events.Event(summary=summary))
        self._writer.flush()

    def _add(self, step: int, event: "Event") -> None:
        event.step = step
        event.wall_time = time.time()
        self._writer.add_event(event)


def _row(sample: GenerationSample) -> str:
    oldest, newest = sample.policy_version
    cells = (
        f"{sample.score:.4g}",
        sample.input,
        sample.output,
        sample.ground_truth or "",
        sample.failure or "",
        str(oldest) if oldest == newest else f"{oldest} to {newest}",
        sample.source,
        sample.prompt_uid,
    )
    return "| " + " | ".join(map(_cell, cells)) + " |\n"


def _cell(text: str) -> str:
    """Text in which no character means anything to Markdown, its tables, or HTML."""
    shown = plain_text(text, limit=MAX_CELL)
    return "".join(c if c.isalnum() or c == " " or not c.isascii() else f"&#{ord(c)};" for c in shown)
