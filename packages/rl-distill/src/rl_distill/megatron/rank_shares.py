"""A data-parallel rank's share of a batch, and the share's results of an optimizer step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_core.data import Batch
from rl_distill.learner import MetricSums, metric_totals
from rl_distill.packing import Pack, pack_rows, unpack_trained

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """A data-parallel rank's share of a batch.

    Attributes:
        batch: The share's rows, in micro-batch order.
        sizes: Number of rows of each micro-batch.
        min_shared: Minimum length of a common prefix, in tokens, that rows of a prompt compute once; 0 disables
            sharing.
    """

    batch: Batch
    sizes: tuple[int, ...]
    min_shared: int = 0

    def packs(self) -> list[Pack]:
        """Return the micro-batches in host memory."""
        stops = np.cumsum(self.sizes, dtype=np.int64)
        rows = [np.arange(stop - size, stop) for stop, size in zip(stops, self.sizes, strict=True)]
        return [pack_rows(self.batch, of_pack, device=_HOST, min_shared=self.min_shared) for of_pack in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """Results of an optimizer step on one data-parallel rank. Loss and norm are those of the global batch.

    Attributes:
        loss: Loss of the global batch.
        grad_norm: Global norm before clipping; NaN if the loss is not finite.
        learning_rate: Learning rate of this step.
        metrics: (weighted sum, weight) of each metric over the share's rows.
        broken_rows: Rows of the share with a value that is not finite, if the step was skipped.
        is_applied: False if the loss or gradient norm is not finite; the weights are then unchanged.
        tokens: `StepResult.tokens` of the share's rows, in their order; empty unless requested.
        computed_tokens: Number of tokens computed for the share.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    metrics: Mapping[str, tuple[float, float]]
    broken_rows: tuple[int, ...] = ()
    is_applied: bool = True
    tokens: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    computed_tokens: int = 0


@dataclass(slots=True)
class Gathered:
    """Results of a step's micro-batches. Tensors stay on the device until the step ends."""

    losses: list[Tensor] = field(default_factory=list)
    metrics: list[MetricSums] = field(default_factory=list)
    values: list[tuple[Pack, Tensor]] = field(default_factory=list)
    scored: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, pack: Pack, values: Tensor, loss: Tensor, sums: MetricSums, *, scored: Mapping[str, Tensor]) -> None:
        """Add the results of one micro-batch.

        Args:
            pack: The micro-batch.
            values: [T] values of its tokens; one that is not finite marks its row as broken.
            loss: Loss summed over the micro-batch.
            sums: Metric sums of the objective.
            scored: Requested [T] values of its tokens by name.
        """
        self.losses.append(loss.detach())
        self.metrics.append(sums)
        self.values.append((pack, values.detach()))
        self.scored.append({name: of.detach() for name, of in scored.items()})

    def totals(self) -> tuple[float, dict[str, tuple[float, float]]]:
        """Return the loss, and (weighted sum, weight) of each metric, with one GPU synchronization."""
        pairs = [pair for of_pack in self.metrics for pair in of_pack.values()]
        numbers = iter(_numbers([*self.losses, *(number for pair in pairs for number in pair)]))
        loss = sum(next(numbers) for _ in self.losses)
        totals = [{name: (next(numbers), next(numbers)) for name in of_pack} for of_pack in self.metrics]
        return loss, metric_totals(totals)

    def tokens(self, batch: Batch) -> dict[str, NDArray[np.float32]]:
        """Return the scored values by name, in the order of the share's rows."""
        found = unpack_trained([pack for pack, _ in self.values], self.scored, batch)
        return {name: of.values for name, of in found.items()}

    def broken_rows(self) -> tuple[int, ...]:
        """Return the rows with a value that is not finite."""
        return tuple(int(row) for pack, values in self.values for row in pack.rows[_broken(pack, values)])


@torch.no_grad()
def _numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Return scalar tensors, on the first one's device or elsewhere, as floats in a single transfer."""
    if not scalars:
        return []
    device = scalars[0].device
    together = torch.stack([torch.as_tensor(one, dtype=torch.float64, device=device) for one in scalars])
    return [float(number) for number in together.tolist()]


def _broken(pack: Pack, values: Tensor) -> NDArray[np.bool_]:
    """Return [S] bools, True for a trajectory with a value that is not finite."""
    micro_batch = pack.micro_batch
    is_broken = ~values.detach().isfinite()
    for column in micro_batch.columns.values():
        if column.is_floating_point():
            is_broken |= ~column.isfinite().flatten(1).all(1) if column.ndim > 1 else ~column.isfinite()
    if "loss_mask" in micro_batch.columns and bool((is_broken & micro_batch.columns["loss_mask"]).any()):
        is_broken &= micro_batch.columns["loss_mask"]  # otherwise an untrained token caused it
    counts = np.add.reduceat(is_broken.cpu().numpy().astype(np.int64), pack.offsets[:-1])
    return np.asarray(counts > 0)
