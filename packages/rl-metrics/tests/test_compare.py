import json
import math
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_metrics.cli import main
from rl_metrics.comparison.compare import compare
from rl_metrics.comparison.intervals import t_quantile
from rl_metrics.run_files.history import History

SCRIPT = "other/<script>alert(1)</script>\x1b[31m"


def history(values, *, start=1):
    columns = {name: np.asarray(column, dtype=np.float64) for name, column in values.items()}
    steps = np.arange(start, start + len(next(iter(columns.values()))))
    return History(steps=steps, times=np.zeros(len(steps)), values=columns)


def noise(seed, num_steps):
    return np.random.default_rng(seed).normal(size=num_steps)


def only(comparison):
    (one,) = comparison.differences
    return one


def test_what_both_runs_share_does_not_hide_a_difference():
    trend = np.linspace(0, 10, 40)
    a = history({"critic/rewards/mean": trend + 0.1 * noise(1, 40)})
    b = history({"critic/rewards/mean": trend + 0.1 * noise(2, 40) + 0.3})
    one = only(compare([a], [b]))
    assert (one.metric, one.chapter, one.unit, one.method, one.num_steps) == (
        "critic/rewards/mean",
        "Rewards and advantages",
        "1",
        "same steps",
        40,
    )
    assert one.difference == pytest.approx(0.3, abs=0.1)
    assert one.is_clear
    assert one.interval.low > 0.15
    assert one.interval.high < 0.45


def test_equal_runs_do_not_differ():
    run = history({"actor/entropy": noise(0, 30), "actor/lr": np.full(30, 1e-6)})
    comparison = compare([run], [run])
    assert [(one.difference, one.is_clear) for one in comparison.differences] == [(0.0, False)] * 2


def test_steps_that_only_one_run_has_do_not_count():
    a = history({"actor/entropy": np.arange(30.0)})
    b = history({"actor/entropy": np.arange(11.0, 61.0)}, start=11)
    one = only(compare([a], [b]))
    assert (one.method, one.num_steps, one.a, one.b) == ("same steps", 20, 19.5, 20.5)
    assert one.difference == 1.0
    assert (one.interval.low, one.interval.high) == (1.0, 1.0)
    assert one.is_clear


def test_runs_without_steps_in_common():
    a = history({"actor/entropy": noise(1, 30)})
    b = history({"actor/entropy": noise(2, 40) + 3}, start=100)
    one = only(compare([a], [b]))
    assert (one.method, one.num_steps) == ("own steps", 30)
    assert one.is_clear
    assert only(compare([history({"actor/entropy": [1.0]})], [b])).method == "none"


def test_the_last_steps():
    a = history({"actor/entropy": [9.0] * 20 + [1.0] * 10})
    b = history({"actor/entropy": [5.0] * 20 + [2.0] * 10})
    assert only(compare([a], [b])).difference == pytest.approx(-(4 * 20 - 10) / 30)
    assert only(compare([a], [b], last=10)).difference == 1.0
    assert only(compare([a], [b], last=999)).num_steps == 30
    with pytest.raises(DataError, match="at least 1"):
        compare([a], [b], last=0)


def test_missing_values_are_left_out():
    values = np.arange(40.0)
    holes = np.where(values % 4 == 0, np.nan, values)
    one = only(compare([history({"actor/entropy": values})], [history({"actor/entropy": holes})]))
    assert (one.num_steps, one.difference) == (30, 0.0)
    nothing = compare([history({"actor/entropy": np.full(40, np.nan)})], [history({"actor/entropy": values})])
    assert (nothing.differences, nothing.only_a, nothing.only_b) == ((), (), ("actor/entropy",))


def test_few_steps_have_a_difference_but_no_interval():
    one = only(compare([history({"actor/entropy": [1.0, 2.0]})], [history({"actor/entropy": [3.0, 6.0]})]))
    assert (one.a, one.b, one.difference, one.method, one.is_clear) == (1.5, 4.5, 3.0, "none", False)
    assert one.to_json()["low"] is None


def validated(mean, low, high):
    stem = "val-core/gsm8k/acc/mean@4"
    holes = [np.nan] * 9
    return history({stem: [*holes, mean], f"{stem}/ci_low": [*holes, low], f"{stem}/ci_high": [*holes, high]})


def test_validations_are_compared_by_their_own_intervals():
    one = only(compare([validated(0.5, 0.4, 0.7)], [validated(0.8, 0.7, 0.85)]))
    assert (one.metric, one.method, one.a, one.b) == ("val-core/gsm8k/acc/mean@4", "validation", 0.5, 0.8)
    assert one.interval.low == pytest.approx(0.3 - math.hypot(0.1, 0.2))
    assert one.interval.high == pytest.approx(0.3 + math.hypot(0.05, 0.1))
    assert one.is_clear
    assert not only(compare([validated(0.5, 0.3, 0.7)], [validated(0.6, 0.5, 0.7)])).is_clear
    lacking = history({"val-core/gsm8k/acc/mean@4": [0.5] * 10})
    assert only(compare([lacking], [validated(0.6, 0.5, 0.7)])).method == "none"


def test_several_seeds_are_samples():
    a = [history({"actor/entropy": np.full(5, value)}) for value in (1.0, 2.0, 3.0)]
    b = [history({"actor/entropy": np.full(5, value)}) for value in (5.0, 7.0, 9.0)]
    one = only(compare(a, b))
    half = t_quantile(2.9411765) * math.sqrt(5 / 3)
    assert (one.a, one.b, one.method, one.num_runs) == (2.0, 7.0, "runs", (3, 3))
    assert (one.interval.low, one.interval.high) == pytest.approx((5 - half, 5 + half), rel=1e-6)
    assert only(compare(a[:1], b)).num_runs == (1, 3)
    lacking = only(compare([*a, history({"other/x": [1.0]})], b))
    assert lacking.num_runs == (3, 3)


def test_of_several_seeds_the_newest_validation_counts():
    stem = "val-core/gsm8k/acc/mean@4"

    def seed(last):
        return history({stem: [0.0, last], f"{stem}/ci_low": [0.0, last - 0.1], f"{stem}/ci_high": [0.0, last + 0.1]})

    one = only(compare([seed(0.5), seed(0.7)], [seed(0.9), seed(0.9)]))
    assert (one.a, one.b, one.method) == (pytest.approx(0.6), pytest.approx(0.9), "runs")


def test_clear_ones_come_first_in_each_chapter():
    names = ("actor/entropy", "actor/grad_norm", "actor/lr", "timing_s/step", "made/up", "critic/rewards/mean")
    shift = dict(zip(names, (0.0, 1.0, 100.0, 0.0, 1.0, 0.0), strict=True))
    a = history({name: noise(number, 40) for number, name in enumerate(names)})
    b = history({name: noise(number + 10, 40) + shift[name] for number, name in enumerate(names)})
    comparison = compare([a], [b])
    assert [one.metric for one in comparison.differences] == [
        "actor/lr",
        "actor/grad_norm",
        "actor/entropy",
        "critic/rewards/mean",
        "timing_s/step",
        "made/up",
    ]
    assert [one.is_clear for one in comparison.differences] == [True, True, False, False, False, True]


def test_chosen_metrics_and_those_of_one_side():
    a = history({"actor/entropy": [1.0] * 12, "actor/lr": [1.0] * 12, "other/a": [1.0] * 12})
    b = history({"actor/entropy": [1.0] * 12, "actor/lr": [1.0] * 12, "other/b": [1.0] * 12})
    assert [one.metric for one in compare([a], [b], patterns=["*lr"]).differences] == ["actor/lr"]
    comparison = compare([a], [b], patterns=["actor/e*", "other/*"])
    assert [one.metric for one in comparison.differences] == ["actor/entropy"]
    assert (comparison.only_a, comparison.only_b) == (("other/a",), ("other/b",))
    with pytest.raises(DataError, match="at least one run on each side"):
        compare([], [b])


@settings(deadline=None)
@given(st.lists(st.floats(allow_infinity=False), min_size=1, max_size=40), st.integers(0, 50), st.integers(1, 3))
@example([0.0] * 9 + [6.787468971165357e153], 1, 1)  # its square is no float
def test_any_values_give_json(values, start, num_runs):
    a, b = history({"actor/entropy": values}), history({"actor/entropy": values[::-1]}, start=start)
    for one in compare([a] * num_runs, [b]).differences:
        assert json.loads(json.dumps(one.to_json(), allow_nan=False)) == one.to_json()


def write(folder, values):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step + 1, **{name: column[step] for name, column in values.items()}}) + "\n"
            for step in range(len(next(iter(values.values()))))
        )
    )
    return str(folder)


def test_the_command_shows_what_differs(tmp_path, capsys):
    shared = {"actor/entropy": list(noise(0, 30)), SCRIPT: [1.0] * 30}
    a = write(tmp_path / "a", {**shared, "actor/lr": [1.0] * 30})
    b = write(tmp_path / "b,1", {**shared, "actor/lr": [2.0] * 30, "actor/loss": [0.0] * 30})
    assert main(["compare", a, b, "--all"]) == 0
    said = capsys.readouterr().out
    assert "1 of 3 metrics differ clearly" in said
    assert "only in B: actor/loss" in said
    assert "<script>" in said
    assert "\x1b" not in said
    assert main(["compare", a, b, "--json", "--metric", "actor/*", "--last", "20"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(row["metric"], row["is_clear"], row["difference"], row["num_steps"]) for row in document["results"]] == [
        ("actor/lr", True, 1.0, 20),
        ("actor/entropy", False, 0.0, 20),
    ]
    assert (document["a"], document["only_b"]) == ([a], ["actor/loss"])


def test_the_verdict_comes_first_and_the_rest_behind_an_option(tmp_path, capsys):
    def metrics(side):
        made = {f"actor/made_{number}": list(noise(100 * side + number, 30)) for number in range(30)}
        return made | {"critic/score/mean": list(noise(1, 30) * 0.01 + side), "actor/lr": [1.0 + side] * 30}

    a, b = (write(tmp_path / name, metrics(side)) for side, name in enumerate("ab"))
    assert main(["compare", a, b]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "A: a"
    assert lines[2].endswith("about one in twenty does.")
    assert re.fullmatch(r"critic/score/mean: A \S+, B \S+: B is clearly higher", lines[3])
    assert len(lines) < 25
    assert max(len(line) for line in lines[4:]) <= 80
    assert any(line.startswith("actor/lr ") for line in lines)
    assert "more metrics: --all shows them by chapter" in lines[-1]
    assert main(["compare", a, b, "--all"]) == 0
    shown = capsys.readouterr().out
    assert all(f"actor/made_{number} " in shown for number in range(30))


def test_the_command_with_several_seeds(tmp_path, capsys):
    runs = [write(tmp_path / name, {"actor/lr": [value] * 3}) for name, value in (("a", 1), ("b", 2), ("c", 9))]
    assert main(["compare", ",".join(runs[:2]), ",".join([runs[2]] * 2), "--all"]) == 0
    said = capsys.readouterr().out
    assert "A: a, b\nB: c (1), c (2)\n" in said
    assert "2 and 2 runs" in said


def test_runs_of_one_name_are_told_apart(tmp_path, capsys):
    for parent in ("1", "2"):
        (tmp_path / parent).mkdir()
    assert main(["compare", *(write(tmp_path / parent / "run", {"actor/lr": [1.0] * 3}) for parent in ("1", "2"))]) == 0
    assert "A: run (1)\nB: run (2)\n" in capsys.readouterr().out


def test_the_command_refuses_what_cannot_be_compared(tmp_path, capsys):
    a = write(tmp_path / "a", {"actor/lr": [1.0]})
    for arguments, reason in (
        ([a, str(tmp_path / "missing")], "no such folder"),
        ([a, ","], "at least one run on each side"),
        ([a, a, "--metric", "none"], "no such metric in common"),
        ([a, a, "--last", "0"], "at least 1"),
    ):
        assert main(["compare", *arguments]) == 2
        assert reason in capsys.readouterr().err
