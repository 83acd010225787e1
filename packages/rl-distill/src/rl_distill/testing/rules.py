"""A random global batch, and rules for objectives: results, inputs, gradient, zero, sign, mask and micro-batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rl_core.errors import RLError
from rl_distill.learner import MetricSums, MicroBatch, metric_totals
from rl_distill.objectives.aggregation import AGGREGATIONS, token_weights
from rl_distill.objectives.micro_batches import with_columns


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


TOLERANCE = 1e-10
"""Maximum difference, relative to the largest value, that float64 rounding explains."""

POISONS = (float("nan"), float("inf"), float("-inf"), 1e30)

OBJECTIVE_RESULT = (
    "an objective must return (loss, metric sums): a scalar float tensor, and a mapping from a metric's name to "
    "(weighted sum, weight), both scalar tensors"
)


class ConformanceError(RLError, AssertionError):
    """An objective breaks a rule that training relies on; the message states the rule and the difference."""


def described(value: object) -> str:
    """Describe a value for a message: a tensor by shape and dtype, a tuple by its parts, others by type and value."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of ({', '.join(described(part) for part in value)})"
    return "None" if value is None else f"{type(value).__name__} {value!r}"[:200]


@contextmanager
def unchanged(record: Any, *, who: str, **others: Tensor) -> Iterator[None]:
    """Check that the tensors of a record and others, which other code reads too, are the same after a call.

    Args:
        record: Input of the call; its fields are tensors or mappings of tensors.
        who: The callee, for the message.
        **others: Further inputs by name.

    Raises:
        ConformanceError: An input was changed, added or removed; the message names the first one.
    """
    values = {field.name: getattr(record, field.name) for field in fields(record)} | others
    before = {name: tensor.detach().clone() for name, tensor in _named_tensors(values).items()}
    yield
    after = _named_tensors(values)
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            what = "added" if name in after else "removed"
            raise ConformanceError(f"{who} must not change its inputs; it {what} {name}.")
        if not _is_same(before[name], after[name].detach()):
            raise ConformanceError(
                f"{who} must not change its inputs; it changed {name} in place. Use a copy, "
                f"`{name.split()[-1]}.clone()`, or operations without a trailing underscore in their name."
            )


def _named_tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all tensors by name; those of a mapping such as `columns` are named "column NAME"."""
    named: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            kind = name.replace("_", " ").removesuffix("s")
            named |= {f"{kind} {column}": tensor for column, tensor in value.items()}
        elif isinstance(value, Tensor):
            named[name] = value
    return named


def _is_same(before: Tensor, after: Tensor) -> bool:
    is_alike = before.shape == after.shape and before.dtype == after.dtype
    return is_alike and torch.allclose(before, after, rtol=0.0, atol=0.0, equal_nan=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An objective under test.

    Attributes:
        inputs: Names in `ExampleBatch.inputs` of the tensors to differentiate by; the first must receive a gradient.
        call: (inputs [T] each, micro-batch) -> (loss, metric sums).
    """

    inputs: tuple[str, ...]
    call: Callable[..., tuple[Tensor, MetricSums]]

    def leaves(self, example: ExampleBatch) -> tuple[Tensor, ...]:
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
    inputs = dict(zip(subject.inputs, (leaf.clone() for leaf in leaves), strict=True))
    with unchanged(example.micro, who="the objective", **inputs):
        result = subject.call(*inputs.values(), example.micro)
    _check_result(result)
    loss, metrics = result
    if not loss.requires_grad:
        raise ConformanceError(f"the loss has no gradient; it must depend on {subject.inputs[0]}. Do not detach them.")
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    attached = [name for name, pair in metrics.items() if any(value.requires_grad for value in pair)]
    if attached:
        raise ConformanceError(f"metric sums must be detached; {attached[0]} keeps the graph alive.")
    return loss.detach(), torch.stack(gradients), metrics


def _check_result(result: object) -> None:
    """Check that a result is (loss, metric sums)."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConformanceError(f"{OBJECTIVE_RESULT}; found {described(result)}.")
    loss, metrics = result
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        raise ConformanceError(f"{OBJECTIVE_RESULT}; the loss is {described(loss)}.")
    if loss.ndim != 0:
        raise ConformanceError(f"the loss must be a scalar; found shape {list(loss.shape)}. Sum it over the tokens.")
    if not isinstance(metrics, Mapping):
        raise ConformanceError(f"{OBJECTIVE_RESULT}; the metric sums are {described(metrics)}.")
    for name, pair in metrics.items():
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(isinstance(value, Tensor) and value.ndim == 0 for value in pair):
            raise ConformanceError(f"{OBJECTIVE_RESULT}; metric {name!r} is {described(pair)}.")


def check_rules(
    subject: Subject, example: ExampleBatch, *, at_zero: ExampleBatch | None, rule: str, has_derivative: bool = True
) -> None:
    """Check the rules that policy and critic objectives have in common.

    Args:
        subject: The objective.
        example: Batch to check on.
        at_zero: Batch on which every gradient must be 0; None skips this check.
        rule: Rule of `at_zero`, for the message.
        has_derivative: Compare the gradient with finite differences of the loss in float64.
    """
    if has_derivative:
        _check_derivative(subject, example)
    if at_zero is not None:
        largest = float(evaluate(subject, at_zero)[1].abs().max())
        if largest != 0.0:
            raise ConformanceError(f"{rule}; the largest is {largest:.3g}.")
    _check_masked_tokens(subject, example)
    _check_micro_batches(subject, example)


def _check_derivative(subject: Subject, example: ExampleBatch) -> None:
    evaluate(subject, example)
    try:
        torch.autograd.gradcheck(lambda *inputs: subject.call(*inputs, example.micro)[0], subject.leaves(example))
    except RuntimeError as error:
        raise ConformanceError(
            f"the gradient is not the derivative of the loss: {error} If a part is detached on purpose, "
            "pass has_stop_gradient=True."
        ) from error


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
        of_sign = gradient[wanted.sign() == sign]
        if len(of_sign) and float(of_sign.abs().max()) <= rounding:
            raise ConformanceError(f"{rule}; where the gradient must be {name}, it is 0 at every token.")


def _check_masked_tokens(subject: Subject, example: ExampleBatch) -> None:
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
        rule = f"masked tokens must not affect the result; with {poison} there"
        _compare(expected, evaluate(subject, poisoned), rule)
    largest = float(expected[1][:, ~mask].abs().max())
    if largest != 0.0:
        raise ConformanceError(f"masked tokens must not receive a gradient; the largest is {largest:.3g}.")


def _check_micro_batches(subject: Subject, example: ExampleBatch) -> None:
    """Check that loss, gradients and metric sums add up to the same, however rows are split and ordered."""
    expected = evaluate(subject, example)
    rows = list(range(len(example.micro.offsets) - 1))
    for cut in ([[row] for row in rows], [rows[:2], rows[2:]], [rows[::-1]], [rows[::2], rows[1::2]]):
        loss, gradients, sums = torch.zeros(()), torch.zeros_like(expected[1]), list[MetricSums]()
        for part in cut:
            part_loss, part_gradients, part_sums = evaluate(subject, select_rows(example, part))
            loss = loss + part_loss
            gradients[:, tokens_of(example.micro.offsets, part)] += part_gradients
            sums.append(part_sums)
        _compare(expected, (loss, gradients, _added(sums)), f"micro-batches must add up; with rows {cut}")


def _added(sums: Sequence[MetricSums]) -> MetricSums:
    """Add the metric sums of micro-batches as learners do, including extremes."""
    float64 = {name: torch.tensor(pair, dtype=torch.float64) for name, pair in metric_totals(sums).items()}
    return {name: (pair[0], pair[1]) for name, pair in float64.items()}


def _compare(expected: Evaluation, found: Evaluation, rule: str) -> None:
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


def with_changes(example: ExampleBatch, **columns: Tensor) -> ExampleBatch:
    """Return the batch with other columns."""
    return replace(example, micro=with_columns(example.micro, columns))
