"""Losses of the API as objectives of the learner, and the rows that they need."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl_core import Batch, Ragged, RowKey
from rl_core.data import FloatArray, IntArray
from rl_core.registry import unknown_name
from rl_distill.learner import MicroBatch, Objective
from rl_rollout.gateway import RefusedError, refused_field


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """A row of training data.

    Attributes:
        tokens: [N] int32 input tokens.
        inputs: The loss's inputs by name, with one value for each token; K for soft targets of a cross entropy.
    """

    tokens: IntArray
    inputs: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """A request to compute a loss, and its gradients.

    Attributes:
        model_id: The training client.
        seq_id: Position in its order.
        loss: Name of the loss.
        options: Options of the loss.
        data: The rows.
        forward_only: Compute no gradients.
        problem: Why the request cannot run; it still takes its place in the client's order.
    """

    model_id: str
    seq_id: int
    loss: str
    options: Mapping[str, float | str]
    data: Sequence[Datum]
    forward_only: bool
    problem: RefusedError | None = None

    @property
    def num_tokens(self) -> int:
        """Number of input tokens."""
        return sum(len(datum.tokens) for datum in self.data)


POLICY_INPUTS = {"logprobs": "rollout_logprobs", "advantages": "advantages"}
INPUTS: Mapping[str, Mapping[str, str]] = {
    "cross_entropy": {"weights": "target_weights"},
    "gspo": {**POLICY_INPUTS, "sequence_ratio_mask": "token_selection"},
}
"""The learner's column for each input of a loss, besides `target_tokens`; those of other losses are POLICY_INPUTS."""
UNUSED: Mapping[str, Collection[str]] = {"cross_entropy": POLICY_INPUTS}
"""Inputs that a loss accepts without effect, because programs send sampled tokens to any loss."""
OPTIONAL = ("weights", "sequence_ratio_mask")
"""Inputs that are 1 at each token if the client sends none."""


def batch_of(request: ForwardBackward, *, vocab_size: int, max_tokens: int) -> Batch:
    """Return the rows of a request: the input tokens of each, and its last target.

    If a datum has other targets than the tokens after its inputs, all rows have `target_ids`.

    Args:
        request: The request.
        vocab_size: All token ids are smaller.
        max_tokens: Maximum length of a row.

    Raises:
        RefusedError: A row cannot train; the message names it.
    """
    if not request.data:
        raise RefusedError("data must have at least one datum.", param="data")
    rows = [_row(datum, request.loss, f"data[{index}]") for index, datum in enumerate(request.data)]
    for index, row in enumerate(rows):
        ids, length = np.append(row["input_ids"], row["target_ids"][1:]), len(row["input_ids"])
        if length > max_tokens:
            found = f"{length} tokens with its last target"
            raise refused_field(f"data[{index}]", found, f"at most {max_tokens} tokens long")
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            wanted = f"tokens with ids from 0 to {vocab_size - 1}"
            raise refused_field(f"data[{index}]", f"{int(ids.min())} to {int(ids.max())}", wanted)
    has_usual = all(np.array_equal(row["target_ids"][1:].ravel(), row["input_ids"][1:]) for row in rows)
    if request.loss == "cross_entropy":
        rows = _with_loss_weights(rows) if has_usual else _of_equal_width(rows)
    names = rows[0].keys() - ({"target_ids"} if has_usual else set())
    offsets = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
    columns = {name: Ragged(np.concatenate([row[name] for row in rows]), offsets) for name in sorted(names)}
    return Batch([RowKey(f"datum-{index}", 0, 0) for index in range(len(rows))], columns)


def _row(datum: Datum, loss: str, where: str) -> dict[str, NDArray[Any]]:
    """Return a row's columns, with 0 at the first token."""
    columns, tokens = INPUTS.get(loss, POLICY_INPUTS), datum.tokens
    known, is_soft = {"target_tokens", *columns}, loss == "cross_entropy"
    for name in datum.inputs:
        if name not in known and name not in UNUSED.get(loss, ()):
            raise RefusedError(f"{where}: {unknown_name('input', name[:80], known)}", param=name[:80])
    if not len(tokens):
        raise RefusedError(f"{where}.model_input must have at least one token.", param="model_input")
    targets = datum.inputs.get("target_tokens", np.zeros(0))
    if targets.shape[:1] != tokens.shape or targets.ndim > 1 + is_soft or targets.dtype.kind != "i" or not targets.size:
        wanted = f"[{len(tokens)}]{f' or [{len(tokens)}, K]' if is_soft else ''}"
        raise refused_field(f"{where}.target_tokens", f"shape {list(targets.shape)}", f"integers of shape {wanted}")
    row: dict[str, NDArray[Any]] = {}
    for name, column in columns.items():
        values = datum.inputs.get(name, np.ones(targets.shape) if name in OPTIONAL else None)
        if values is None or values.shape != targets.shape or not np.isfinite(values).all():
            wanted = f"finite numbers of shape {list(targets.shape)}"
            raise refused_field(f"{where}.{name}", _wrong(values, targets.shape), wanted)
        if column == "token_selection" and len(other := values[(values != 0) & (values != 1)]):
            raise refused_field(f"{where}.{name}", float(other[0]), "0 or 1 at each token")
        row[column] = _after_first(values, 0).astype(np.float32)
    row["target_ids"] = _after_first(targets, -1)
    if is_soft:
        row = {name: values.reshape(len(tokens) + 1, -1) for name, values in row.items()}
    row["input_ids"] = np.append(tokens.astype(np.int64), targets.flat[-1])
    row["loss_mask"] = np.arange(len(tokens) + 1) > 0
    return {"loss_weights": row["loss_mask"].astype(np.float32), **row}


def _wrong(values: NDArray[Any] | None, shape: tuple[int, ...]) -> str:
    """Say what is wrong with an input that must be finite numbers of a shape."""
    if values is None:
        return "none"
    return f"shape {list(values.shape)}" if values.shape != shape else "NaN or infinity"


def _after_first(values: NDArray[Any], first: int) -> NDArray[Any]:
    """Return values of the targets with one in front, for the first token of the row."""
    return np.concatenate([np.full((1, *values.shape[1:]), first), values])


def _with_loss_weights(rows: Sequence[dict[str, NDArray[Any]]]) -> list[dict[str, NDArray[Any]]]:
    """Return rows whose targets are the tokens after their inputs, with the weights of these tokens."""
    names = ("input_ids", "loss_mask")
    return [{name: row[name] for name in names} | {"loss_weights": row["target_weights"][:, 0]} for row in rows]


def _of_equal_width(rows: Sequence[dict[str, NDArray[Any]]]) -> list[dict[str, NDArray[Any]]]:
    """Return rows with equally many `target_ids` at each token."""
    width = max(row["target_ids"].shape[1] for row in rows)
    wide = []
    for row in rows:
        missing = ((0, 0), (0, width - row["target_ids"].shape[1]))
        ids, weights = np.pad(row["target_ids"], missing, constant_values=-1), np.pad(row["target_weights"], missing)
        wide.append({**row, "target_ids": ids, "target_weights": weights})
    return wide


def target_logprobs(request: ForwardBackward, logprobs: Ragged) -> list[FloatArray]:
    """Return the logprobs of each row's targets, in the shape of its `target_tokens`."""
    found = []
    for datum, row in zip(request.data, logprobs, strict=True):
        shape = datum.inputs["target_tokens"].shape
        of_targets = row[1:] if row.ndim == 1 else row[1:, : int(np.prod(shape[1:]))]
        found.append(np.asarray(of_targets, dtype=np.float32).reshape(shape))
    return found


def loss_of(objective: Objective, batch: Batch, logprobs: Ragged) -> float:
    """Return the loss of rows whose logprobs are known."""
    ids = batch.ragged("input_ids")
    rows = MicroBatch(
        input_ids=batch.tensor("input_ids").long(),
        position_ids=torch.cat([torch.arange(length) for length in ids.lengths.tolist()]),
        offsets=torch.tensor(ids.offsets),
        columns={name: batch.tensor(name) for name in batch.names - {"input_ids"}},
    )
    with torch.no_grad():
        return float(objective(torch.from_numpy(np.array(logprobs.values)), None, rows)[0])
