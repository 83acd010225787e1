"""Conformance kit: what every objective must fulfil, for tests of a user's own loss.

from rl_distill.testing import check_policy_loss

def test_my_loss():
check_policy_loss(my_loss)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_core.errors import RLError
from rl_distill.learner import MetricSums, MicroBatch, Objective
from rl_distill.objectives.aggregation import AGGREGATIONS, token_weights
from rl_distill.objectives.kl import k3
from rl_distill.objectives.policy_loss import PolicyLoss
from rl_distill.objectives.policy_objective import PolicyObjective, PolicyObjectiveOptions

TOLERANCE = 1e-10
"""Largest difference, relative to the largest value, that float64 rounding explains."""

NO_GRADIENT = "the loss has no gradient; it must depend on policy_logprobs without detaching them."

POISONS = (float("nan"), float("inf"), float("-inf"), 1e30)


class ConformanceError(RLError, AssertionError):
    """An objective broke a rule that training relies on; the message names the rule and the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleBatch:
    """A global batch for checks, in float64.

    Attributes:
        policy_logprobs: [T].
        entropy: [T].
        micro: All rows packed, with the columns that a policy objective can read.
    """

    policy_logprobs: Tensor
    entropy: Tensor
    micro: MicroBatch


def example_batch(*, lengths: Sequence[int] = (5, 3, 8, 1, 6), seed: int = 0) -> ExampleBatch:
    """A random global batch: prompts and gaps are masked, advantages are of either sign.

    Args:
        lengths: Tokens of each trajectory; the first of each is masked, as a prompt is.
        seed: Of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(int(sum(lengths)), generator=generator, dtype=torch.float64)

    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    loss_mask = torch.rand(int(sum(lengths)), generator=generator) > 0.25
    loss_mask[offsets[:-1]] = False
    policy = -1.0 - normal(0.5).abs()
    columns = {
        "loss_mask": loss_mask,
        "loss_weights": token_weights(loss_mask, offsets, row_weights=AGGREGATIONS["token-mean"]).double(),
        "advantages": normal(1.0),
        "old_logprobs": policy + normal(0.3),
        "reference_logprobs": policy + normal(0.3),
        "rollout_logprobs": policy + normal(0.3),
    }
    micro = MicroBatch(
        input_ids=torch.zeros(len(policy), dtype=torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        offsets=offsets,
        columns={
            name: values if name == "loss_mask" else torch.where(loss_mask, values, 0.0)
            for name, values in columns.items()
        },
    )
    return ExampleBatch(policy_logprobs=policy, entropy=normal(0.5).abs(), micro=micro)


def check_policy_loss(policy_loss: PolicyLoss, *, has_stop_gradient: bool = False, seed: int = 0) -> None:
    """Check a policy loss as `policy_objective` uses it; `check_objective` says what is checked.

    Args:
        policy_loss: Its options bound.
        has_stop_gradient: True for losses that detach a part on purpose (CISPO): the gradient then is no derivative of
            the loss, and is not compared with finite differences.
        seed: Of the example.

    Raises:
        ConformanceError: A rule is broken.
    """
    objective = PolicyObjective(options=PolicyObjectiveOptions(), policy_loss=policy_loss, kl=k3)
    check_objective(objective, has_stop_gradient=has_stop_gradient, seed=seed)


def check_objective(
    objective: Objective, *, has_stop_gradient: bool = False, is_regularized: bool = False, seed: int = 0
) -> None:
    """Run all checks of this module on an objective.

    Args:
        objective: Called with an example's logprobs, entropy and micro-batches.
        has_stop_gradient: Leaves `check_gradient` out.
        is_regularized: Leaves `check_zero_advantage` out, for objectives with a KL or entropy term.
        seed: Of the example.

    Raises:
        ConformanceError: A rule is broken.
    """
    example = example_batch(seed=seed)
    if not has_stop_gradient:
        check_gradient(objective, example)
    if not is_regularized:
        check_zero_advantage(objective, example)
    check_mask_invariance(objective, example)
    check_micro_batch_invariance(objective, example)


def check_gradient(objective: Objective, example: ExampleBatch) -> None:
    """The gradient is that of the loss, by finite differences in float64."""
    policy, entropy = _leaves(example)

    if not objective(policy, entropy, example.micro)[0].requires_grad:
        raise ConformanceError(NO_GRADIENT)

    def loss_of(policy_logprobs: Tensor, entropies: Tensor) -> Tensor:
        return objective(policy_logprobs, entropies, example.micro)[0]

    try:
        torch.autograd.gradcheck(loss_of, (policy, entropy))
    except RuntimeError as error:
        raise ConformanceError(
            f"the gradient is not the derivative of the loss: {error} If a part is detached on purpose, "
            "pass has_stop_gradient=True."
        ) from error


def check_zero_advantage(objective: Objective, example: ExampleBatch) -> None:
    """Where every advantage is 0, so is every gradient."""
    zeros = {"advantages": torch.zeros_like(example.policy_logprobs)}
    _, gradients, _ = _evaluate(objective, replace(example, micro=_with_columns(example.micro, zeros)))
    largest = float(gradients.abs().max())
    if largest != 0.0:
        raise ConformanceError(
            f"zero advantages must give zero gradients; the largest is {largest:.3g}. "
            "For an objective with a KL or entropy term pass is_regularized=True."
        )


def check_mask_invariance(objective: Objective, example: ExampleBatch) -> None:
    """Nothing outside loss_mask, NaN and infinity included, reaches loss, gradients or metrics."""
    mask = example.micro.columns["loss_mask"]
    expected = _evaluate(objective, example)
    for poison in POISONS:
        columns = {
            name: torch.where(mask, values, poison)
            for name, values in example.micro.columns.items()
            if name != "loss_mask"
        }
        poisoned = ExampleBatch(
            policy_logprobs=torch.where(mask, example.policy_logprobs, poison),
            entropy=torch.where(mask, example.entropy, poison),
            micro=_with_columns(example.micro, columns),
        )
        _compare(expected, _evaluate(objective, poisoned), f"masked tokens must not count; with {poison} in them")
    outside = expected[1][:, ~mask].abs()
    if not bool((outside == 0).all()):
        raise ConformanceError(f"masked tokens must get no gradient; the largest is {float(outside.max()):.3g}.")


def check_micro_batch_invariance(objective: Objective, example: ExampleBatch) -> None:
    """Loss, gradients and metric sums add up to the same, however the rows are cut and ordered."""
    num_rows = len(example.micro.offsets) - 1
    expected = _evaluate(objective, example)
    rows = list(range(num_rows))
    for cut in ([[row] for row in rows], [rows[:2], rows[2:]], [rows[::-1]], [rows[::2], rows[1::2]]):
        loss, gradients, sums = torch.zeros(()), torch.zeros_like(expected[1]), dict[str, tuple[Tensor, Tensor]]()
        for part in cut:
            tokens = torch.cat([torch.arange(*example.micro.offsets[row : row + 2].tolist()) for row in part])
            part_loss, part_gradients, part_sums = _evaluate(objective, _select(example, part, tokens))
            loss = loss + part_loss
            gradients[:, tokens] += part_gradients
            for name, (total, weight) in part_sums.items():
                before = sums.get(name, (torch.zeros(()), torch.zeros(())))
                sums[name] = (before[0] + total, before[1] + weight)
        _compare(expected, (loss, gradients, sums), f"micro-batches must add up; cut into rows {cut}")


Evaluation = tuple[Tensor, Tensor, MetricSums]
"""Loss, [2, T] gradients by policy_logprobs and entropy, metric sums."""


def _leaves(example: ExampleBatch) -> tuple[Tensor, Tensor]:
    return (
        example.policy_logprobs.detach().clone().requires_grad_(),
        example.entropy.detach().clone().requires_grad_(),
    )


def _evaluate(objective: Objective, example: ExampleBatch) -> Evaluation:
    leaves = _leaves(example)
    loss, metrics = objective(*leaves, example.micro)
    if loss.ndim != 0:
        raise ConformanceError(f"the loss must be a scalar; found shape {list(loss.shape)}.")
    if not loss.requires_grad:
        raise ConformanceError(NO_GRADIENT)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    attached = [name for name, pair in metrics.items() if any(value.requires_grad for value in pair)]
    if attached:
        raise ConformanceError(f"metric sums must be detached; {attached[0]} keeps the graph alive.")
    return loss.detach(), torch.stack(gradients), metrics


def _compare(expected: Evaluation, found: Evaluation, rule: str) -> None:
    """Refuse evaluations that differ by more than rounding."""
    if expected[2].keys() != found[2].keys():
        raise ConformanceError(f"{rule}: metrics {sorted(expected[2].keys() ^ found[2].keys())} come and go.")
    pairs = {"loss": (expected[0], found[0]), "gradient": (expected[1], found[1])}
    for name, sums in expected[2].items():
        pairs[f"sum of {name}"] = (sums[0], found[2][name][0])
        pairs[f"weight of {name}"] = (sums[1], found[2][name][1])
    for name, (left, right) in pairs.items():
        scale = max(1.0, float(left.abs().max()))
        difference = float((left - right).abs().max())
        if not difference <= TOLERANCE * scale:
            raise ConformanceError(f"{rule}: {name} differs by {difference:.3g}.")


def _with_columns(micro: MicroBatch, columns: Mapping[str, Tensor]) -> MicroBatch:
    return replace(micro, columns={**micro.columns, **columns})


def _select(example: ExampleBatch, rows: Sequence[int], tokens: Tensor) -> ExampleBatch:
    micro = example.micro
    lengths = micro.offsets.diff()[list(rows)]
    return ExampleBatch(
        policy_logprobs=example.policy_logprobs[tokens],
        entropy=example.entropy[tokens],
        micro=MicroBatch(
            input_ids=micro.input_ids[tokens],
            position_ids=micro.position_ids[tokens],
            offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            columns={name: values[tokens] for name, values in micro.columns.items()},
        ),
    )
