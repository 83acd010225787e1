"""Rows of the API become rows of the learner, or are refused by name."""

import numpy as np
import pytest

from rl_core import Ragged
from rl_distill.objectives import supervised_objective, tinker_objective
from rl_rollout.gateway import RefusedError
from rl_service.losses import Datum, ForwardBackward, batch_of, loss_of, target_logprobs


def request(*data, loss="cross_entropy", **options):
    return ForwardBackward(model_id="m", seq_id=1, loss=loss, options=options, data=data, forward_only=True)


def datum(tokens, targets=None, **inputs):
    targets = [*tokens[1:], 9] if targets is None else targets
    arrays = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    return Datum(tokens=np.asarray(tokens, np.int32), inputs={"target_tokens": np.asarray(targets), **arrays})


def made(*data):
    return batch_of(request(*data), vocab_size=10, max_tokens=6)


def test_a_row_has_its_last_target_and_weights_at_its_targets():
    batch = made(datum([1, 2, 3], weights=[0, 0.5, 2]), datum([4]))
    assert [row.tolist() for row in batch.ragged("input_ids")] == [[1, 2, 3, 9], [4, 9]]
    assert [row.tolist() for row in batch.ragged("loss_mask")] == [[False, True, True, True], [False, True]]
    assert [row.tolist() for row in batch.ragged("loss_weights")] == [[0, 0, 0.5, 2], [0, 1]]


def test_the_loss_is_a_sum_over_weighted_targets():
    batch = made(datum([1, 2, 3], weights=[0, 0.5, 2]), datum([4]))
    logprobs = Ragged(np.asarray([0, -1, -2, -3, 0, -4], np.float32), batch.ragged("input_ids").offsets)
    assert loss_of(supervised_objective, batch, logprobs) == pytest.approx(0.5 * 2 + 2 * 3 + 4)
    given = request(datum([1, 2, 3]), datum([4]))
    assert [row.tolist() for row in target_logprobs(given, logprobs)] == [[-1, -2, -3], [-4]]


def test_other_targets_become_a_column_of_all_rows():
    data = datum([1, 2, 3], weights=[0, 0.5, 2]), datum([4, 5], [[6, 7], [8, 0]], weights=[[1, 0.25], [-1, 0]])
    batch = made(*data)
    assert [row.tolist() for row in batch.ragged("input_ids")] == [[1, 2, 3, 9], [4, 5, 0]]
    assert [row.tolist() for row in batch.ragged("loss_weights")] == [[0, 1, 1, 1], [0, 1, 1]]
    none = [-1, -1]
    targets = [[none, [2, -1], [3, -1], [9, -1]], [none, [6, 7], [8, 0]]]
    assert [row.tolist() for row in batch.ragged("target_ids")] == targets
    weights = [[[0, 0], [0, 0], [0.5, 0], [2, 0]], [[0, 0], [1, 0.25], [-1, 0]]]
    assert [row.tolist() for row in batch.ragged("target_weights")] == weights
    scored = np.asarray([[0, 9], [-1, 9], [-2, 9], [-3, 9], [0, 0], [-4, -5], [-6, -7]], np.float32)
    logprobs = Ragged(scored, batch.ragged("input_ids").offsets)
    found = [row.tolist() for row in target_logprobs(request(*data), logprobs)]
    assert found == [[-1, -2, -3], [[-4, -5], [-6, -7]]]
    assert loss_of(tinker_objective("cross_entropy"), batch, logprobs) == 0.5 * 2 + 2 * 3 + 4 + 0.25 * 5 - 6
    other = made(datum([1, 2, 3], [2, 7, 4], logprobs=[0, 0, -1], advantages=[0, 0, 1]))  # both have no effect
    assert other.names == {"input_ids", "loss_mask", "loss_weights", "target_ids", "target_weights"}
    assert [row.tolist() for row in other.ragged("target_ids")] == [[[-1], [2], [7], [4]]]


REFUSED = [
    ([], "data must have at least one datum"),
    ([datum([])], r"data\[0\].model_input must have at least one token"),
    ([datum([1, 2], [3])], r"data\[0\].target_tokens must be integers of shape \[2\] or \[2, K\]; found 'shape \[1\]'"),
    ([datum([1, 2], [[[3]], [[4]]])], r"target_tokens must be integers of .* found 'shape \[2, 1, 1\]'"),
    ([datum([1, 2], [0.5, 3.0])], "target_tokens must be integers"),
    ([datum([1, 2], weights=[1])], r"data\[0\].weights must be finite numbers of shape \[2\]; found 'shape \[1\]'"),
    ([datum([1], [[2, 3]], weights=[1])], r"data\[0\].weights must be finite numbers of shape \[1, 2\]"),
    ([datum([1], weights=[np.nan])], r"data\[0\].weights must be finite .* found 'NaN or infinity'"),
    ([datum([1], [[2, 10]])], r"data\[0\] must be tokens with ids from 0 to 9; found '1 to 10'"),
    ([datum([1], advantage=[1])], r"data\[0\]: unknown input 'advantage'"),
    ([datum([11])], r"data\[0\] must be tokens with ids from 0 to 9; found '9 to 11'"),
    (
        [datum([1] * 6, [1] * 5 + [2])],
        r"data\[0\] must be at most 6 tokens long; found '7 tokens with its last target'",
    ),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_rows_that_cannot_train_are_refused_by_name(data, message):
    with pytest.raises(RefusedError, match=message):
        made(*data)


def test_policy_losses_need_logprobs_and_advantages():
    data = datum([1, 2], logprobs=[0, -1], advantages=[0, 2])
    batch = batch_of(request(data, loss="gspo"), vocab_size=10, max_tokens=6)
    names = ("rollout_logprobs", "advantages", "loss_weights", "token_selection")
    assert [batch.ragged(name).values.tolist() for name in names] == [[0, 0, -1], [0, 0, 2], [0, 1, 1], [0, 1, 1]]
    objective = tinker_objective("importance_sampling")
    logprobs = Ragged(np.asarray([0, -3, -1], np.float32), batch.ragged("input_ids").offsets)
    batch = batch_of(request(data, loss="importance_sampling"), vocab_size=10, max_tokens=6)
    assert loss_of(objective, batch, logprobs) == pytest.approx(-2.0)
    with pytest.raises(RefusedError, match=r"data\[0\].advantages must be finite numbers of .* found 'none'"):
        batch_of(request(datum([1, 2], logprobs=[0, -1]), loss="ppo"), vocab_size=10, max_tokens=6)
    half = datum([1, 2], logprobs=[0, -1], advantages=[0, 2], sequence_ratio_mask=[0.5, 1])
    with pytest.raises(RefusedError, match=r"data\[0\].sequence_ratio_mask must be 0 or 1 at each token; found 0.5"):
        batch_of(request(half, loss="gspo"), vocab_size=10, max_tokens=6)


def test_other_targets_of_a_policy_loss_become_a_column():
    data = (
        datum([1, 2, 3], [0, 0, 4], logprobs=[5, 0, -1], advantages=[0, 1, 2]),
        datum([5], logprobs=[1], advantages=[0]),
    )
    batch = batch_of(request(*data, loss="dro"), vocab_size=10, max_tokens=6)
    assert batch.ragged("input_ids").values.tolist() == [1, 2, 3, 4, 5, 9]
    assert batch.ragged("loss_mask").values.tolist() == [False, True, True, True, False, True]
    wanted = {"target_ids": [-1, 0, 0, 4, -1, 9], "rollout_logprobs": [0, 5, 0, -1, 0, 1]}
    for name, values in wanted.items():
        assert batch.ragged(name).values.tolist() == values
    with pytest.raises(RefusedError, match=r"target_tokens must be integers of shape \[1\]; found 'shape \[1, 1\]'"):
        batch_of(request(datum([1], [[2]]), loss="ppo"), vocab_size=10, max_tokens=6)
