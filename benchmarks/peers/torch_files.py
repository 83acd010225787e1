"""torch.save and torch.load as systems of benchmarks/skip_cache.py: a list of rows, or one padded batch."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _skip_protocol import System, serve
from _skip_samples import COLUMNS, LONGEST, Rows
from numpy.typing import NDArray


class TorchRows:
    """Stores a list with a dict of tensors per sample."""

    def __init__(self, samples: Rows) -> None:
        """Give each row tensors of its own; a view would be saved with all that it is a view of."""
        ends = np.cumsum(samples.lengths)[:-1]
        parts = {name: np.split(samples.columns[name], ends) for name in COLUMNS}
        self._rows = [
            {name: torch.from_numpy(parts[name][row].copy()) for name in COLUMNS} for row in range(len(samples.lengths))
        ]

    def write(self, place: Path) -> None:
        """See `System.write`."""
        torch.save(self._rows, place)

    def read(self, place: Path) -> list[dict[str, torch.Tensor]]:
        """See `System.read`."""
        found: list[dict[str, torch.Tensor]] = torch.load(place, weights_only=True)
        return found

    def columns(self, found: list[dict[str, torch.Tensor]]) -> Mapping[str, NDArray[Any]]:
        """See `System.columns`."""
        return {name: torch.cat([row[name] for row in found]).numpy() for name in COLUMNS}


class TorchPadded:
    """Stores a dict of [N, 4096] tensors."""

    def __init__(self, samples: Rows) -> None:
        """Pad the samples."""
        self._batch = padded(samples)

    def write(self, place: Path) -> None:
        """See `System.write`."""
        torch.save(self._batch, place)

    def read(self, place: Path) -> dict[str, torch.Tensor]:
        """See `System.read`."""
        found: dict[str, torch.Tensor] = torch.load(place, weights_only=True)
        return found

    def columns(self, found: dict[str, torch.Tensor]) -> Mapping[str, NDArray[Any]]:
        """See `System.columns`."""
        is_token = found["attention_mask"].bool()
        return {name: found[name][is_token].numpy() for name in COLUMNS}


def padded(samples: Rows) -> dict[str, torch.Tensor]:
    """Return each column as [N, 4096], padded with zeros on the right, and attention_mask, int8."""
    lengths = torch.from_numpy(samples.lengths)
    is_token = torch.arange(LONGEST) < lengths[:, None]
    batch = {"attention_mask": is_token.to(torch.int8)}
    for name in COLUMNS:
        values = torch.from_numpy(samples.columns[name])
        batch[name] = torch.zeros(is_token.shape, dtype=values.dtype).masked_scatter_(is_token, values)
    return batch


def opened(samples: Rows) -> System:
    """Run the form that the command line names."""
    return TorchPadded(samples) if IS_PADDED else TorchRows(samples)


if __name__ == "__main__":
    IS_PADDED = "--padded" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--padded"]
    sys.exit(serve(opened))
