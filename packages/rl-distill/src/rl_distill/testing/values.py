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

    - It returns (loss, metric sums) and does not change its inputs.
    - The gradient is the derivative of the loss, by finite differences in float64.
    - A critic that predicts the returns receives no gradient.
    - While the critic equals the old critic, values above their return fall and values below it rise.
    - Tokens outside loss_mask do not affect the result, even if they are NaN or infinite.
    - Loss, gradients and metric sums add up over any split into micro-batches, in any order of rows.

    Args:
        value_loss: Critic objective, called with values and micro-batches of an example.
        seed: Seed of the example batch.

    Raises:
        ConformanceError: The objective breaks a rule.
    """

    def call(inputs: Inputs, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
        return value_loss(inputs[0], micro)

    subject, example = Subject(inputs=("values",), call=call), example_batch(seed=seed)
    check_derivative(subject, example)
    perfect = replace(example, micro=with_columns(example.micro, {"returns": example.inputs["values"]}))
    check_zero_gradient(subject, perfect, rule="a critic that predicts the returns must receive no gradient")
    _check_sign(subject, example)
    check_masked_tokens(subject, example)
    check_micro_batches(subject, example)


def _check_sign(subject: Subject, example: ExampleBatch) -> None:
    columns, values = example.micro.columns, example.inputs["values"]
    mask = columns["loss_mask"]
    fresh = replace(example, micro=with_columns(example.micro, {"values": torch.where(mask, values, 0.0)}))
    above = torch.where(mask, values - columns["returns"], 0.0)
    check_direction(evaluate(subject, fresh)[1][0], above, rule="a value must move toward its return")
