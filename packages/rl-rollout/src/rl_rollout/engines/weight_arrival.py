"""Receives weights from the network for an engine of one process."""

from collections.abc import Iterator

import torch

from rl_core.errors import DeadlineError, TransferError, WeightsGoneError
from rl_core.weights import WeightUpdate
from rl_core.weights.broadcast import SourceGroups, WeightSources, receive_plan


class WeightArrival:
    """Connects to the senders of updates, as their only worker."""

    def __init__(self, device: torch.device) -> None:
        """Initialize without connecting.

        Args:
            device: Device of the received tensors.
        """
        self._device = device
        self._sources = WeightSources(num_workers=1)
        self._groups: SourceGroups | None = None

    def arriving(self, update: WeightUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor of an update when it is complete, in order.

        Raises:
            WeightsGoneError: A sender has ended or has another version. Nothing was sent.
            TransferError: A sender ended midway.
            DeadlineError: A sender stopped sending.
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
        """Disconnect from all senders. Safe to call twice."""
        self._sources.close()
        if self._groups is not None:
            self._groups.close()
