"""What every tracker does."""

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """Takes the metrics of a run, step after step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take all metrics of one step, validation included where there was one.

        Args:
            step: Optimizer steps done; 0 is before the first.
            metrics: Values by name.
        """
        ...

    def close(self) -> None:
        """Write what is pending and free everything. Can be called twice."""
        ...
