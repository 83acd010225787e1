"""Losses of the API as objectives of the learner, and the rows that they need."""

from collections.abc import Mapping, Sequence
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
        inputs: The loss's inputs by name, with one value for each token.
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
    "cross_entropy": {"weights": "loss_weights"},
    "gspo": {**POLICY_INPUTS, "sequence_ratio_mask": "token_selection"},
}
"""The learner's column for each input of a loss, besides `target_tokens`; those of other losses are POLICY_INPUTS."""
OPTIONAL = ("weights", "sequence_ratio_mask")
"""Inputs that are 1 at each token if the client sends none."""


def batch_of(request: ForwardBackward, *, vocab_size: int, max_tokens: int) -> Batch:
    """Return the rows of a request: the input tokens of each, and its last target.

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
        ids = row["input_ids"]
        if len(ids) > max_tokens or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise RefusedError(
                f"data[{index}] must have at most {max_tokens} tokens with ids from 0 to {vocab_size - 1}, with its "
                f"last target; found {len(ids)} tokens with ids from {int(ids.min())} to {int(ids.max())}."
            )
    offsets = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
    columns = {name: Ragged(np.concatenate([row[name] for row in rows]), offsets) for name in rows[0]}
    return Batch([RowKey(f"datum-{index}", 0, 0) for index in range(len(rows))], columns)


def _row(datum: Datum, loss: str, where: str) -> dict[str, NDArray[Any]]:
    """Return a row's columns, with 0 at the first token.

    Targets are the tokens after their inputs. Programs fill those of a policy loss with others where the advantage is
    0; these positions are masked.
    """
    columns, tokens = INPUTS.get(loss, POLICY_INPUTS), datum.tokens
    known, targets = {"target_tokens", *columns}, datum.inputs.get("target_tokens")
    for name in datum.inputs:
        if name not in known:
            raise RefusedError(f"{where}: {unknown_name('input', name[:80], known)}", param=name[:80])
    if not len(tokens):
        raise RefusedError(f"{where}.model_input must have at least one token.", param="model_input")
    row: dict[str, NDArray[Any]] = {}
    for name, column in columns.items():
        values = datum.inputs.get(name, np.ones(tokens.shape) if name in OPTIONAL else None)
        if values is None or values.shape != tokens.shape or not np.isfinite(values).all():
            found = None if values is None else list(values.shape)
            raise refused_field(f"{where}.{name}", f"shape {found}", f"{len(tokens)} finite numbers")
        row[column] = np.concatenate([[0.0], values]).astype(np.float32)
    is_known = np.ones(len(tokens) + 1, dtype=np.bool_)
    if targets is not None and targets.shape == tokens.shape:
        is_known[1:-1] = targets[:-1] == tokens[1:]
    is_free = row.get("advantages", np.ones(1)) == 0
    if targets is None or targets.shape != tokens.shape or not (is_known | is_free).all():
        found = None if targets is None else list(targets.shape)
        raise RefusedError(
            f"{where}.target_tokens must be the token after each of the {len(tokens)} input tokens; found "
            f"{'other tokens' if found == list(tokens.shape) else f'shape {found}'}.",
            param="target_tokens",
        )
    is_known[0] = False
    row = {name: np.where(is_known, values, np.float32(0)) for name, values in row.items()}
    row["input_ids"], row["loss_mask"] = np.concatenate([tokens.astype(np.int64), targets[-1:]]), is_known
    return {"loss_weights": is_known.astype(np.float32), **row}


def target_logprobs(logprobs: Ragged) -> list[FloatArray]:
    """Return the logprobs of each row's targets."""
    return [np.asarray(one[1:], dtype=np.float32) for one in logprobs]


def loss_of(objective: Objective, batch: Batch, logprobs: Ragged) -> float:
    """Return the loss of rows whose logprobs are known."""
    ids = batch.ragged("input_ids")
    columns = {name: torch.from_numpy(np.array(batch.ragged(name).values)) for name in batch.names - {"input_ids"}}
    rows = MicroBatch(
        input_ids=torch.from_numpy(ids.values.astype(np.int64)),
        position_ids=torch.cat([torch.arange(length) for length in ids.lengths.tolist()]),
        offsets=torch.from_numpy(np.array(ids.offsets)),
        columns=columns,
    )
    with torch.no_grad():
        return float(objective(torch.from_numpy(np.array(logprobs.values)), None, rows)[0])
