"""Checks of the critic's objectives."""

from dataclasses import replace

import torch
from torch import Tensor

from rl_distill.learner import MetricSums, MicroBatch, ValueLoss
from rl_distill.testing.examples import ExampleBatch, example_batch, with_columns
from rl_distill.testing.rules import (
    Inputs,
    Subject,
    check_derivative,
    check_direction,
    check_masked_tokens,
    check_micro_batches,
    check_zero_gradient,
    evaluate,
)


def check_value_loss(value_loss: ValueLoss, *, seed: int = 0) -> None:
    """Check an objective of the critic.

    - It gives (loss, metric sums), and leaves what it was given as it was.
    - The gradient is the loss's derivative, by finite differences in float64.
    - A critic that predicts the returns gets no gradient.
    - A value above its return falls, one below it rises, while the critic is the old one.
    - Nothing outside loss_mask counts, be it NaN or infinite.
    - Loss, gradients and metric sums add up over any micro-batches, in any order of rows.

    Args:
        value_loss: Called with an example's values and micro-batches.
        seed: Of the example.

    Raises:
        ConformanceError: A rule is broken.
    """

    def call(inputs: Inputs, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
        return value_loss(inputs[0], micro)

    subject, example = Subject(inputs=("values",), call=call), example_batch(seed=seed)
    check_derivative(subject, example)
    perfect = replace(example, micro=with_columns(example.micro, {"returns": example.inputs["values"]}))
    check_zero_gradient(subject, perfect, rule="a critic that predicts the returns must get no gradient")
    _check_sign(subject, example)
    check_masked_tokens(subject, example)
    check_micro_batches(subject, example)


def _check_sign(subject: Subject, example: ExampleBatch) -> None:
    columns, values = example.micro.columns, example.inputs["values"]
    mask = columns["loss_mask"]
    fresh = replace(example, micro=with_columns(example.micro, {"values": torch.where(mask, values, 0.0)}))
    above = torch.where(mask, values - columns["returns"], 0.0)
    check_direction(evaluate(subject, fresh)[1][0], above, rule="a value must move to its return")
