"""Rules for policy and critic objectives: gradient, zero, sign, mask and micro-batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_distill.learner import MetricSums, MicroBatch
from rl_distill.metric_sums import metric_totals
from rl_distill.testing.examples import ExampleBatch, select_rows, tokens_of, with_columns
from rl_distill.testing.results import ConformanceError, check_objective_result, check_untouched, copies_of

TOLERANCE = 1e-10
"""Maximum difference, relative to the largest value, that float64 rounding explains."""

POISONS = (float("nan"), float("inf"), float("-inf"), 1e30)

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An objective under test.

    Attributes:
        inputs: Names in `ExampleBatch.inputs` of the tensors to differentiate by; the first must receive a gradient.
        call: (inputs [T] each, micro-batch) -> (loss, metric sums).
    """

    inputs: tuple[str, ...]
    call: Callable[[Inputs, MicroBatch], tuple[Tensor, MetricSums]]

    def leaves(self, example: ExampleBatch) -> Inputs:
        """Return fresh inputs that require gradients."""
        return tuple(example.inputs[name].detach().clone().requires_grad_() for name in self.inputs)


Evaluation = tuple[Tensor, Tensor, MetricSums]
"""(loss, gradients [number of inputs, T], metric sums)."""


def evaluate(subject: Subject, example: ExampleBatch) -> Evaluation:
    """Evaluate the objective on a batch.

    Raises:
        ConformanceError: The objective changes its inputs, does not return (loss, metric sums), returns a loss without
            gradient, or returns metrics that keep the graph alive.
    """
    leaves = subject.leaves(example)
    # As in training, the inputs are not leaves. torch allows in-place changes to them, which would go unnoticed.
    inputs, micro = tuple(leaf.clone() for leaf in leaves), example.micro
    copies = copies_of(_tensors_of(subject, inputs, micro))
    found = subject.call(inputs, micro)
    check_untouched(copies, _tensors_of(subject, inputs, micro), who="the objective")
    check_objective_result(found)
    loss, metrics = found
    if not loss.requires_grad:
        raise ConformanceError(f"the loss has no gradient; it must depend on {subject.inputs[0]}. Do not detach them.")
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    attached = [name for name, pair in metrics.items() if any(value.requires_grad for value in pair)]
    if attached:
        raise ConformanceError(f"metric sums must be detached; {attached[0]} keeps the graph alive.")
    return loss.detach(), torch.stack(gradients), metrics


def check_derivative(subject: Subject, example: ExampleBatch) -> None:
    """Check the gradient against finite differences of the loss in float64."""
    evaluate(subject, example)
    try:
        torch.autograd.gradcheck(lambda *inputs: subject.call(inputs, example.micro)[0], subject.leaves(example))
    except RuntimeError as error:
        raise ConformanceError(
            f"the gradient is not the derivative of the loss: {error} If a part is detached on purpose, "
            "pass has_stop_gradient=True."
        ) from error


def check_zero_gradient(subject: Subject, example: ExampleBatch, *, rule: str) -> None:
    """Check that every gradient is 0 on this batch."""
    _, gradients, _ = evaluate(subject, example)
    largest = float(gradients.abs().max())
    if largest != 0.0:
        raise ConformanceError(f"{rule}; the largest is {largest:.3g}.")


def check_direction(gradient: Tensor, wanted: Tensor, *, rule: str) -> None:
    """Check that a gradient has the expected sign or is 0, and is not 0 at all tokens of either sign.

    Args:
        gradient: [T] gradient of the loss by the first input.
        wanted: [T] tensor with the expected sign; 0 where any sign is allowed.
        rule: Rule for the message.
    """
    rounding = TOLERANCE * max(1.0, float(gradient.abs().max()))
    against = torch.where(wanted == 0, 0.0, -gradient * wanted.sign())
    if float(against.max()) > rounding:
        token = int(against.argmax())
        raise ConformanceError(f"{rule}; at token {token} the gradient is {float(gradient[token]):.3g}.")
    for sign, name in ((-1.0, "negative"), (1.0, "positive")):
        here = wanted.sign() == sign
        if bool(here.any()) and float(gradient[here].abs().max()) <= rounding:
            raise ConformanceError(f"{rule}; where the gradient must be {name}, it is 0 at every token.")


def check_masked_tokens(subject: Subject, example: ExampleBatch) -> None:
    """Check that tokens outside loss_mask, even NaN or infinite, do not affect loss, gradients or metrics."""
    mask = example.micro.columns["loss_mask"]
    expected = evaluate(subject, example)
    for poison in POISONS:
        columns = {
            name: values | ~mask if values.dtype == torch.bool else torch.where(mask, values, poison)
            for name, values in example.micro.columns.items()
            if name != "loss_mask"
        }
        inputs = {name: torch.where(mask, values, poison) for name, values in example.inputs.items()}
        poisoned = ExampleBatch(inputs=inputs, micro=with_columns(example.micro, columns))
        compare(
            expected,
            evaluate(subject, poisoned),
            f"masked tokens must not affect the result; with {poison} there",
        )
    outside = expected[1][:, ~mask].abs()
    if not bool((outside == 0).all()):
        raise ConformanceError(f"masked tokens must not receive a gradient; the largest is {float(outside.max()):.3g}.")


def check_micro_batches(subject: Subject, example: ExampleBatch) -> None:
    """Check that loss, gradients and metric sums add up to the same, however rows are split and ordered."""
    expected = evaluate(subject, example)
    rows = list(range(len(example.micro.offsets) - 1))
    for cut in ([[row] for row in rows], [rows[:2], rows[2:]], [rows[::-1]], [rows[::2], rows[1::2]]):
        loss, gradients, sums = torch.zeros(()), torch.zeros_like(expected[1]), list[MetricSums]()
        for part in cut:
            part_loss, part_gradients, part_sums = evaluate(subject, select_rows(example, part))
            loss = loss + part_loss
            gradients[:, tokens_of(example, part)] += part_gradients
            sums.append(part_sums)
        compare(expected, (loss, gradients, _added(sums)), f"micro-batches must add up; with rows {cut}")


def _added(sums: Sequence[MetricSums]) -> MetricSums:
    """Add the metric sums of micro-batches as learners do, including extremes."""
    totals = metric_totals(sums)
    float64 = {name: torch.tensor(pair, dtype=torch.float64) for name, pair in totals.items()}
    return {name: (pair[0], pair[1]) for name, pair in float64.items()}


def compare(expected: Evaluation, found: Evaluation, rule: str) -> None:
    """Check that evaluations differ by no more than rounding."""
    if expected[2].keys() != found[2].keys():
        raise ConformanceError(f"{rule}: metrics {sorted(expected[2].keys() ^ found[2].keys())} differ between calls.")
    pairs = {"loss": (expected[0], found[0]), "gradient": (expected[1], found[1])}
    found_sums = _added([found[2]])  # an extreme over no values may be anything
    for name, sums in _added([expected[2]]).items():
        pairs[f"sum of {name}"] = (sums[0], found_sums[name][0])
        pairs[f"weight of {name}"] = (sums[1], found_sums[name][1])
    compare_tensors(pairs, rule)


def compare_tensors(pairs: Mapping[str, tuple[Tensor, Tensor]], rule: str) -> None:
    """Check that (expected, found) tensors differ by no more than rounding."""
    for name, (left, right) in pairs.items():
        if left.numel() == 0:
            continue
        scale = max(1.0, float(left.abs().max()))
        difference = float((left - right).abs().max())
        if not difference <= TOLERANCE * scale:
            raise ConformanceError(f"{rule}: {name} differs by {difference:.3g}.")


def with_zeros(example: ExampleBatch, column: str) -> ExampleBatch:
    """Return the batch with a column set to zeros."""
    zeros = {column: torch.zeros(len(example.micro.input_ids), dtype=torch.float64)}
    return replace(example, micro=with_columns(example.micro, zeros))


def _tensors_of(subject: Subject, inputs: Inputs, micro: MicroBatch) -> dict[str, Tensor]:
    """Return all inputs of an objective by name."""
    return {
        **dict(zip(subject.inputs, inputs, strict=True)),
        **{name: getattr(micro, name) for name in ("input_ids", "position_ids", "offsets")},
        **{f"column {name}": values for name, values in micro.columns.items()},
    }
