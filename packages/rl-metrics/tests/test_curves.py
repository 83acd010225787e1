import math

import numpy as np

from rl_metrics.report import run_parts
from rl_metrics.report.run_parts import pack_curves, thin
from rl_metrics.run_files.history import History


def history(**values):
    count = len(next(iter(values.values())))
    columns = {name: np.array(of, dtype=float) for name, of in values.items()}
    return History(steps=np.arange(1, count + 1), times=np.zeros(count), values=columns)


def test_what_is_known_of_a_metric():
    described, columns = pack_curves(history(**{"actor/grad_norm": [0.5, math.nan, 2.0], "mine": [1, 2, 3]}))
    assert described[0] == {
        "name": "actor/grad_norm",
        "chapter": "Policy",
        "is_thinned": False,
        "unit": "",
        "meaning": "Global gradient norm before clipping.",
        "band": {"low": None, "high": 1.0, "text": "at most 1 (evaluation guide)"},
    }
    assert described[1]["chapter"] == "Other"
    assert columns["x0"][1].tolist() == [1, 3]
    assert columns["y0"][1].tolist() == [0.5, 2.0]


def test_curves_are_by_chapter_as_the_table_has_them():
    described, columns = pack_curves(
        history(**{"mine": [1], "timing_s/gen": [2], "actor/entropy": [3], "actor/lr": [4]})
    )
    names = [metric["name"] for metric in described]
    assert names == ["actor/entropy", "actor/lr", "timing_s/gen", "mine"]
    assert [columns[f"y{number}"][1].item() for number in range(4)] == [3, 4, 2, 1]


def test_a_metric_without_a_value_has_no_columns():
    described, columns = pack_curves(history(a=[math.nan], b=[math.inf], c=[1.0]))
    assert [metric["name"] for metric in described] == ["c", "a", "b"]
    assert sorted(columns) == ["x0", "y0"]


def test_thinning_loses_no_peak():
    values = np.zeros(1_000_003)
    values[[123_457, 800_001]] = 7.0, -9.0
    steps, kept, is_thinned = thin(np.arange(len(values)), values)
    assert is_thinned
    assert run_parts.MAX_POINTS / 2 < len(steps) <= run_parts.MAX_POINTS
    assert dict(zip(steps.tolist(), kept.tolist(), strict=True))[123_457] == 7.0
    assert kept.min() == -9.0
    assert (np.diff(steps) > 0).all()


def test_what_fits_is_not_thinned():
    steps, values, is_thinned = thin(np.arange(run_parts.MAX_POINTS), np.ones(run_parts.MAX_POINTS))
    assert not is_thinned
    assert len(steps) == len(values) == run_parts.MAX_POINTS
