"""What a validation says of its answers."""

import numpy as np
import pytest

from rl_core import Prompt
from rl_trainer.evaluation import prediction_in, summarize_answers


def prompt(uid, source="sums"):
    return Prompt(uid=uid, input_ids=np.asarray([1], dtype=np.int32), data_source=source)


@pytest.mark.parametrize(
    ("extras", "expected"),
    [({"pred": "42"}, "42"), ({"pred": 42}, "42"), ({"pred": None}, None), ({"pred": ["42"]}, None), ({}, None)],
)
def test_a_prediction_is_text_or_a_number(extras, expected):
    assert prediction_in(extras) == expected


def test_answers_of_several_samples_are_voted_on():
    asked = [prompt("a")] * 4 + [prompt("b")]
    metrics = summarize_answers(
        asked, [1.0, 1.0, 0.0, 0.0, None], [{}, {}, {}, {}, {}], predictions=["95", "95", "9", None, None]
    )
    assert metrics["val-core/sums/reward/mean@4"] == 0.5
    assert metrics["val-core/sums/reward/maj@4/mean"] > 0.5
    assert metrics["val-aux/sums/reward/num_missing"] == 1.0


def test_components_count_where_they_are():
    metrics = summarize_answers([prompt("a"), prompt("b")], [2.0, 0.0], [{"acc": 1.0}, {}])
    assert metrics["val-core/sums/acc/mean@1"] == 1.0
    assert metrics["val-aux/sums/reward/mean@1"] == 1.0
    assert not any("maj@" in name for name in metrics)
