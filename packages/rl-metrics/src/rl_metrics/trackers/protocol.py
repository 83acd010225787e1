"""What every tracker does."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample

Ending = Literal["finished", "stopped", "failed"]
"""How a run ended, for trackers that show it."""


class Tracker(Protocol):
    """Takes the metrics of a run, step after step, and what the policy generates."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take all metrics of one step, validation included where there was one.

        Args:
            step: Optimizer steps done; 0 is before the first.
            metrics: Values by name.
        """
        ...

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take metrics of a step that come after those of later steps, such as of a validation beside the training."""
        ...

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Take a table of samples, once for each validation.

        Args:
            step: Optimizer steps done by the weights that are validated.
            name: What the table is called, such as "val/generations".
            samples: In the order in which they are shown.
        """
        ...

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Take the distributions of one step.

        Args:
            step: Optimizer steps done.
            histograms: By name; from now on nobody adds to them.
        """
        ...

    def close(self) -> None:
        """Write what is pending and free everything. Can be called twice."""
        ...
