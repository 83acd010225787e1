"""A random global batch in float64, and selections of its rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_distill.learner import MicroBatch
from rl_distill.objectives.aggregation import AGGREGATIONS, token_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleBatch:
    """A global batch for conformance checks, in float64.

    Attributes:
        inputs: [T] tensors by name: `policy_logprobs` and `entropy` of the current policy, and `values` of the critic.
        micro: All rows packed, with the columns that policy and critic objectives can read.
    """

    inputs: Mapping[str, Tensor]
    micro: MicroBatch


def example_batch(*, lengths: Sequence[int] = (5, 3, 8, 1, 6), seed: int = 0) -> ExampleBatch:
    """Return a random global batch with masked prompts and gaps, and advantages of either sign.

    Args:
        lengths: Number of tokens of each trajectory; the first token is masked as a prompt.
        seed: Seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)

    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    loss_mask = torch.rand(sum(lengths), generator=generator) > 0.25
    loss_mask[offsets[:-1]] = False
    policy = -1.0 - normal(0.5).abs()
    columns = {
        "loss_mask": loss_mask,
        "loss_weights": token_weights(loss_mask, offsets, row_weights=AGGREGATIONS.get("token-mean")).double(),
        "advantages": normal(1.0),
        "old_logprobs": policy + normal(0.3),
        "reference_logprobs": policy + normal(0.3),
        "rollout_logprobs": policy + normal(0.3),
        "values": normal(1.0),
        "returns": normal(1.0),
    }
    columns["token_selection"] = loss_mask & (torch.rand(len(loss_mask), generator=generator) > 0.5)
    micro = MicroBatch(
        input_ids=torch.zeros(len(policy), dtype=torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        offsets=offsets,
        columns={
            name: values if values.dtype == torch.bool else torch.where(loss_mask, values, 0.0)
            for name, values in columns.items()
        },
    )
    inputs = {"policy_logprobs": policy, "entropy": normal(0.5).abs(), "values": columns["values"] + normal(0.3)}
    return ExampleBatch(inputs=inputs, micro=micro)


def select_rows(example: ExampleBatch, rows: Sequence[int]) -> ExampleBatch:
    """Return the batch of these rows, in this order; `tokens_of` returns their tokens."""
    micro = example.micro
    tokens, lengths = tokens_of(micro.offsets, rows), micro.offsets.diff()[list(rows)]
    return ExampleBatch(
        inputs={name: values[tokens] for name, values in example.inputs.items()},
        micro=MicroBatch(
            input_ids=micro.input_ids[tokens],
            position_ids=micro.position_ids[tokens],
            offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            columns={name: values[tokens] for name, values in micro.columns.items()},
        ),
    )


def tokens_of(offsets: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the token indices of these rows, in their order."""
    return torch.cat([torch.arange(*offsets[row : row + 2].tolist()) for row in rows])
