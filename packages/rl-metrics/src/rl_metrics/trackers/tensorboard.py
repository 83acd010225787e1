"""TensorBoard event files, written by the tensorboard package, without torch or TensorFlow."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_core.errors import MissingExtraError, NotReadyError
from rl_core.record_fields import converts_arguments
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import json_text
from rl_metrics.trackers.console import plain_text

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

MAX_CELL = 4_000
"""Maximum length of a text in a table, because the page of a run contains all texts."""

BUCKETS = 60
"""Maximum number of buckets of a histogram; the pages draw 30."""

HEAD = "| score | input | output | ground truth | failure | policy version | source | prompt |\n" + "|---" * 8 + "|\n"


class TensorBoardTracker:
    """Writes scalars, histograms, and generations as a table in the text plugin, at the trainer's steps.

    A resumed run replaces earlier data of the first step that it logs, and of later steps.
    """

    @converts_arguments
    def __init__(self, directory: Path) -> None:
        """Create an event file, in a resumed run next to the existing ones.

        Args:
            directory: Folder of event files, such as `run/tensorboard`; created if missing.

        Raises:
            MissingExtraError: tensorboard is not installed.
        """
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtraError(
                "event files need tensorboard. Install rl-metrics[tensorboard] as the README says."
            ) from error
        self._events, self._summaries = event_pb2, summary_pb2
        self._text = text_pb
        self._directory = directory
        is_resumed = _sort_before(directory, now=int(time.time()))
        self._writer = EventFileWriter(str(directory))
        self._early: list[Event] | None = []
        self._is_closed = False
        if not is_resumed:
            self._start(0)  # readers do not treat the very first start as a resume

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a scalar for each metric; a resumed run's first call also drops old data of its step and later ones.

        Raises:
            NotReadyError: After `close`.
            OSError: The file cannot be written.
        """
        self._check_open()
        self._start(step)
        self.log_late(step, metrics)

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a scalar for each metric without dropping data, because every value has its own step.

        Raises:
            NotReadyError: After `close`.
            OSError: The file cannot be written.
        """
        with np.errstate(over="ignore"):  # scalars are float32, so larger values become infinite
            values = {name: float(np.float32(value)) for name, value in metrics.items()}
        # Simple values, as in torch's writer, which every reader of event files supports.
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, self._summaries.Summary(value=scalars))

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Write a Markdown table whose texts are shown literally, not as Markdown or HTML.

        Raises:
            NotReadyError: After `close`.
            OSError: The file cannot be written.
        """
        table = HEAD + "".join(map(_row, samples))
        self._write(step, self._text(name, table))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write each distribution for the histogram and distribution pages.

        Raises:
            NotReadyError: After `close`.
            OSError: The file cannot be written.
        """
        # As in torch's writer; the pages convert these to tensors.
        values = [
            self._summaries.Summary.Value(tag=name, histo=self._histogram(histogram))
            for name, histogram in histograms.items()
            if histogram.count
        ]
        self._write(step, self._summaries.Summary(value=values))

    def close(self) -> None:
        """Write pending data and close the file. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._writer.close()

    def _histogram(self, histogram: Histogram) -> "HistogramProto":
        edges, counts = histogram.bins(BUCKETS)
        is_filled = counts > 0
        middles = (edges[:-1] / 2 + edges[1:] / 2)[is_filled]
        with np.errstate(over="ignore"):
            sum_squares = float((counts[is_filled] * middles**2).sum())  # not shown on any page
        return self._summaries.HistogramProto(
            min=histogram.min,
            max=histogram.max,
            num=histogram.count,
            sum=histogram.sum,
            sum_squares=sum_squares,
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotReadyError(f"the event file in {self._directory} is closed; create a new TensorBoardTracker.")

    def _start(self, step: int) -> None:
        """Make readers drop, once, earlier data of this step and later ones, except what this tracker wrote."""
        early, self._early = self._early, None
        if early is None:
            return
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(step=step, wall_time=time.time(), session_log=start))
        for event in early:
            if event.step >= step:  # a step's generations may come before its metrics
                self._writer.add_event(event)

    def _write(self, step: int, summary: "Summary") -> None:
        self._check_open()
        event = self._events.Event(step=step, wall_time=time.time(), summary=summary)
        if self._early is not None:
            self._early.append(event)
        self._writer.add_event(event)
        self._writer.flush()


def _sort_before(directory: Path, *, now: int) -> bool:
    """Rename event files whose names a new file's would not follow; return True if there are event files.

    Readers take files in the order of their names, which begin with the time at which they were made. A clock that went
    back, or two files in a second, would hide the later steps.
    """
    files = sorted(directory.glob("events.out.tfevents.*"))
    stamps = [file.name.split(".")[3] for file in files]
    if stamps and stamps[-1] >= f"{now:010d}":
        for index, (file, stamp) in enumerate(zip(files, stamps, strict=True)):
            rest = file.name.removeprefix(f"events.out.tfevents.{stamp}")
            file.rename(file.with_name(f"events.out.tfevents.{now - len(files) + index:010d}{rest}"))
    return bool(files)


def _row(sample: GenerationSample) -> str:
    oldest, newest = sample.policy_version
    cells = (
        f"{sample.score:.4g}",
        sample.input,
        sample.output,
        json_text(sample.ground_truth) or "",
        sample.failure or "",
        str(oldest) if oldest == newest else f"{oldest} to {newest}",
        sample.source,
        sample.prompt_uid,
    )
    return "| " + " | ".join(map(_cell, cells)) + " |\n"


def _cell(text: str) -> str:
    """Escape all characters with a meaning in Markdown, its tables, or HTML."""
    shown = plain_text(text, limit=MAX_CELL)
    return "".join(c if c.isalnum() or c == " " or not c.isascii() else f"&#{ord(c)};" for c in shown)
