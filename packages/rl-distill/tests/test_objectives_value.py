import math
import pickle
from dataclasses import replace

import pytest
import torch

from rl_core.errors import DataError, SettingsError, ShapeError
from rl_distill.learner import MicroBatch
from rl_distill.objectives import ValueObjective
from rl_distill.objectives.value import value_losses


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_value_losses_equal_literals():
    # Old value 0, return 1, clip 0.2. 0.1 is within the clip. 0.5 is clipped to 0.2, which errs more and has no
    # gradient. -0.5 errs more unclipped.
    values = tensor(0.1, 0.5, -0.5).requires_grad_()
    losses, was_clipped = value_losses(values, tensor(0, 0, 0), tensor(1, 1, 1), clip=0.2)
    assert losses.tolist() == pytest.approx([0.405, 0.32, 1.125])
    assert was_clipped.tolist() == [0.0, 1.0, 0.0]
    losses.sum().backward()
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, -1.5])


def test_infinite_clip_is_the_squared_error():
    losses, was_clipped = value_losses(tensor(5.0), tensor(0.0), tensor(1.0), clip=math.inf)
    assert (losses.tolist(), was_clipped.tolist()) == ([8.0], [0.0])


def micro_of(**columns):
    ids = torch.zeros(3, dtype=torch.int64)
    found = {
        "loss_mask": torch.tensor([False, True, True]),
        "loss_weights": tensor(0.0, 0.5, 0.25),
        "values": tensor(math.nan, 0.0, 0.0),
        "returns": tensor(math.nan, 1.0, 1.0),
    }
    return MicroBatch(input_ids=ids, position_ids=ids, offsets=torch.tensor([0, 3]), columns={**found, **columns})


def test_value_objective_equals_a_literal():
    values = tensor(math.nan, 0.1, 0.5).requires_grad_()
    loss, sums = ValueObjective(clip=0.2)(values, micro_of())
    assert loss.item() == pytest.approx(0.5 * 0.405 + 0.25 * 0.32)
    loss.backward()
    assert values.grad.tolist() == pytest.approx([0.0, -0.45, 0.0])
    assert {name: (float(total), float(weight)) for name, (total, weight) in sums.items()} == {
        "critic/vf_loss": (pytest.approx(0.2825), 0.75),
        "critic/vf_clipfrac": (1.0, 2.0),
        "critic/vpred_mean": (pytest.approx(0.6), 2.0),
    }


@pytest.mark.parametrize("missing", ["loss_mask", "loss_weights", "values", "returns"])
def test_missing_column_is_named(missing):
    whole = micro_of()
    micro = replace(whole, columns={name: column for name, column in whole.columns.items() if name != missing})
    with pytest.raises(DataError, match=f"needs the column '{missing}'"):
        ValueObjective()(tensor(0, 0, 0), micro)


def test_wrong_shapes_are_refused():
    with pytest.raises(ShapeError, match="the critic's values must have shape"):
        ValueObjective()(tensor(0.0), micro_of())
    with pytest.raises(ShapeError, match=r"^returns must have shape"):
        ValueObjective()(tensor(0.0, 0.0, 0.0), micro_of(returns=tensor(1.0)))
    with pytest.raises(ShapeError, match="returns must have shape"):
        value_losses(tensor(0.0), tensor(0.0), tensor(0.0, 1.0))


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_impossible_clip_is_refused_at_once(clip):
    with pytest.raises(SettingsError, match=r"clip of ValueObjective must be a number above 0"):
        ValueObjective(clip=clip)


def test_objective_travels_to_another_process():
    objective = ValueObjective(clip=0.5)
    assert pickle.loads(pickle.dumps(objective)) == objective
