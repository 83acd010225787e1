"""Protocol of all trackers."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample

Ending = Literal["finished", "stopped", "failed"]
"""How a run ended, for trackers that show it."""


class Tracker(Protocol):
    """Receives the metrics of a run, step by step, and samples of the policy's responses."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive all metrics of one step, including its validation.

        Args:
            step: Number of finished optimizer steps; 0 is before the first.
            metrics: Values by name.
        """
        ...

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive metrics of a step after those of later steps, such as from a validation concurrent with training."""
        ...

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Receive a table of samples, once per validation.

        Args:
            step: Number of optimizer steps of the validated weights.
            name: Name of the table, such as "val/generations".
            samples: Samples in the order of display.
        """
        ...

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Receive the distributions of one step.

        Args:
            step: Number of finished optimizer steps.
            histograms: Histograms by name; the caller must not change them afterwards.
        """
        ...

    def close(self) -> None:
        """Write pending data and release resources. Idempotent."""
        ...
