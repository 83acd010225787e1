"""Weights that an engine of one process takes from the network."""

from collections.abc import Iterator

import torch

from rl_core.errors import DeadlineError, TransferError, WeightsGoneError
from rl_core.weights import WeightUpdate
from rl_core.weights.broadcast import SourceGroups, WeightSources, receive_plan


class WeightArrival:
    """Asks the senders of updates, and is the one worker that takes them."""

    def __init__(self, device: torch.device) -> None:
        """Connect to nobody yet.

        Args:
            device: Where tensors are put together.
        """
        self._device = device
        self._sources = WeightSources(num_workers=1)
        self._groups: SourceGroups | None = None

    def arriving(self, update: WeightUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor of an update as it is complete, in order.

        Raises:
            WeightsGoneError: A sender is gone or has another version; nothing was sent.
            TransferError: A sender is gone midway.
            DeadlineError: A sender gives nothing any more.
        """
        try:
            joined = self._sources.announce(update)
        except (TransferError, DeadlineError) as error:
            raise WeightsGoneError(str(error)) from error
        if self._groups is None or self._groups.sources != joined:
            if self._groups is not None:
                self._groups.close()
            self._groups = SourceGroups(joined, rank=1, size=2, device=self._device)
        return self._groups.receive(receive_plan(update))

    def close(self) -> None:
        """Leave every sender. Can be called twice."""
        self._sources.close()
        if self._groups is not None:
            self._groups.close()
