import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError, ShapeError
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.validation.responses import ValidationResponses, response_table
from rl_metrics.validation.summary import headline, headline_name, summarize_validation

GOLDEN = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parents[3] / "tests" / "golden"))
NAN = float("nan")


def summarize(uids, sources, **variables):
    return summarize_validation(ValidationResponses(uids=uids, sources=sources, variables=variables))


FILES = sorted(GOLDEN.glob("*.npz"))
DRAWS = 1000
"""Bootstrap draws of the golden file for each prompt; every prompt uses the same random numbers."""


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_metrics_equal_golden_values(path):
    golden = np.load(path, allow_pickle=False)
    metrics = summarize_validation(
        ValidationResponses(
            uids=golden["validation_uid"].tolist(),
            sources=golden["validation_source"].tolist(),
            variables={"reward": golden["validation_reward"]},
            predictions=golden["validation_pred"].tolist(),
        )
    )
    ours = {name.split("/", 1)[1]: value for name, value in metrics.items()}
    expected = {name.split("/", 1)[1]: float(golden[name]) for name in golden.files if name.startswith("validation/")}
    assert len(expected) >= 20
    for name, value in expected.items():
        if "/mean@" in name or "/std@" in name:
            assert ours[name] == pytest.approx(value, rel=1e-10)
        else:
            # The golden draws of prompts are dependent: the mean's error is at most the mean of the prompts' errors.
            # That of a standard deviation is at most sqrt(kurtosis - 1) / 2 of it, with a margin for the kurtosis.
            spread = ours[name.rsplit("/", 1)[0] + "/std"]
            room = 5.0 if name.endswith("/mean") else 10.0
            assert ours[name] == pytest.approx(value, abs=room * spread / DRAWS**0.5 + 1e-12), name


@pytest.mark.skipif(
    "GOLDEN_DIR" not in os.environ and not GOLDEN.is_dir(), reason="tests/golden is in the checkout only"
)
def test_there_are_golden_values():
    assert FILES, f"no .npz in {GOLDEN}; set GOLDEN_DIR"


def test_metrics_equal_hand_computed_ones():
    metrics = summarize(
        ["p", "q", "p", "q", "r"],
        ["gsm8k", "gsm8k", "gsm8k", "gsm8k", "math"],
        acc=[1.0, 0.0, 0.0, 0.0, 1.0],
        reward=[2.0, 0.0, 4.0, 2.0, 3.0],
    )
    assert metrics == {
        "val-aux/gsm8k/num_prompts": 2.0,
        "val-aux/gsm8k/num_responses": 4.0,
        "val-core/gsm8k/acc/mean@2": 0.25,
        "val-core/gsm8k/acc/mean@2/ci_low": 0.0,
        "val-core/gsm8k/acc/mean@2/ci_high": 0.5,
        "val-aux/gsm8k/acc/std@2": 0.25,
        "val-aux/gsm8k/acc/pass@1": 0.25,
        "val-core/gsm8k/acc/pass@2": 0.5,
        "val-core/gsm8k/acc/pass@2/ci_low": 0.0,
        "val-core/gsm8k/acc/pass@2/ci_high": 1.0,
        "val-core/gsm8k/acc/best@2/mean": 0.375,
        "val-core/gsm8k/acc/best@2/std": pytest.approx(3**0.5 / 8),
        "val-core/gsm8k/acc/best@2/ci_low": 0.0,
        "val-core/gsm8k/acc/best@2/ci_high": 0.75,
        "val-aux/gsm8k/acc/worst@2/mean": 0.125,
        "val-aux/gsm8k/acc/worst@2/std": pytest.approx(3**0.5 / 8),
        "val-aux/gsm8k/reward/mean@2": 2.0,
        "val-aux/gsm8k/reward/std@2": 1.0,
        "val-aux/gsm8k/reward/best@2/mean": 2.5,
        "val-aux/gsm8k/reward/best@2/std": pytest.approx(3**0.5 / 2),
        "val-aux/gsm8k/reward/worst@2/mean": 1.5,
        "val-aux/gsm8k/reward/worst@2/std": pytest.approx(3**0.5 / 2),
        "val-aux/math/num_prompts": 1.0,
        "val-aux/math/num_responses": 1.0,
        "val-core/math/acc/mean@1": 1.0,
        "val-aux/math/reward/mean@1": 3.0,
    }
    for name in metrics:
        DEFINITIONS.lookup(name)


def test_the_main_variable_is_chosen_for_each_source():
    metrics = summarize(["p", "q"], ["a", "b"], acc=[1.0, NAN], reward=[0.5, 0.25])
    assert metrics["val-core/a/acc/mean@1"] == 1.0
    assert metrics["val-aux/a/reward/mean@1"] == 0.5
    assert metrics["val-core/b/reward/mean@1"] == 0.25
    assert not any(name.startswith("val-aux/b/acc") for name in metrics)


def test_without_acc_and_reward_nothing_is_core():
    metrics = summarize(["p"], ["a"], length=[7.0])
    assert metrics["val-aux/a/length/mean@1"] == 7.0
    assert headline(metrics) is None


def test_prompts_with_different_numbers_of_responses_count_once_each():
    metrics = summarize(["p", "p", "p", "p", "q"], ["a"] * 5, acc=[1.0, 1.0, 1.0, 1.0, 0.0])
    assert metrics["val-core/a/acc/mean@4"] == 0.5
    assert metrics["val-aux/a/acc/std@4"] == 0.0


def test_a_missing_value_is_counted_and_is_no_zero():
    metrics = summarize(["p", "p", "q"], ["a"] * 3, acc=[1.0, NAN, 0.0])
    assert metrics["val-core/a/acc/mean@1"] == 0.5
    assert metrics["val-aux/a/acc/num_missing"] == 1.0
    assert metrics["val-aux/a/num_responses"] == 3.0


def test_one_uid_in_two_sources_is_two_prompts():
    metrics = summarize(["p", "p"], ["a", "b"], acc=[1.0, 0.0])
    assert metrics["val-core/a/acc/mean@1"] == 1.0
    assert metrics["val-core/b/acc/mean@1"] == 0.0


def test_no_responses_have_no_metrics():
    assert summarize([], []) == {}
    assert summarize([], [], acc=[]) == {}


def test_lengths_are_checked():
    with pytest.raises(ShapeError, match=r"acc must have uids' shape \[2\]; found \[1\]"):
        summarize(["p", "q"], ["a", "a"], acc=[1.0])
    with pytest.raises(ShapeError, match=r"sources must have uids' shape \[2\]; found \[1\]"):
        summarize(["p", "q"], ["a"])


@pytest.mark.parametrize("prediction", [NAN, 42, ["42"]])
def test_a_prediction_that_is_no_text_is_refused(prediction):
    given = {"uids": ["p", "p"], "sources": ["a", "a"], "variables": {"acc": [1.0, 0.0]}}
    with pytest.raises(DataError, match=r"predictions must be text, or None.*found (float|int|list)"):
        summarize_validation(ValidationResponses(**given, predictions=["42", prediction]))
    with pytest.raises(ShapeError, match=r"predictions must have uids' shape \[2\]; found \[1\].*None if"):
        summarize_validation(ValidationResponses(**given, predictions=["42"]))


def test_the_headline_is_the_mean_over_sources():
    metrics = summarize(["p", "q"], ["a", "b"], acc=[1.0, 0.5], reward=[9.0, 9.0])
    assert headline(metrics) == 0.75


def test_only_the_largest_number_of_the_main_variable_is_core():
    values = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    responses = ValidationResponses(
        uids=["p", "q"] * 5,
        sources=["a"] * 10,
        variables={"reward": values, "length": np.arange(10.0)},
        predictions=["x", "y", None, "x", "y"] * 2,
    )
    metrics = summarize_validation(responses)
    core = [name.removeprefix("val-core/a/reward/") for name in metrics if name.startswith("val-core")]
    assert [name for name in core if "ci_" not in name] == [
        "mean@5", "pass@5", "best@5/mean", "best@5/std", "maj@5/mean", "maj@5/std",
    ]  # fmt: skip
    assert [name for name in core if "ci_" in name] == [
        f"{stem}@5/ci_{end}" for stem in ("mean", "pass", "best", "maj") for end in ("low", "high")
    ]
    assert {"val-aux/a/reward/pass@4", "val-aux/a/reward/maj@2/mean", "val-aux/a/length/maj@5/std"} <= metrics.keys()
    assert "val-aux/a/length/pass@1" not in metrics
    for name in metrics:
        DEFINITIONS.lookup(name)


def test_a_threshold_says_what_passes():
    given = {"uids": ["p", "q"], "sources": ["a", "a"], "variables": {"reward": [0.4, 0.6]}}
    metrics = summarize_validation(ValidationResponses(**given), pass_threshold=0.5)
    assert metrics["val-core/a/reward/pass@1"] == 0.5
    assert not any("pass@" in name for name in summarize_validation(ValidationResponses(**given)))


def test_infinite_values_are_missing():
    metrics = summarize(["p", "p", "q", "q"], ["a"] * 4, acc=[1.0, np.inf, 0.0, -np.inf])
    assert metrics == {
        "val-aux/a/num_prompts": 2.0,
        "val-aux/a/num_responses": 4.0,
        "val-aux/a/acc/num_missing": 2.0,
        "val-core/a/acc/mean@1": 0.5,
        "val-core/a/acc/mean@1/ci_low": 0.0,
        "val-core/a/acc/mean@1/ci_high": 1.0,
    }


def test_a_variable_that_no_response_has_stays_the_main_one():
    metrics = summarize(["p", "q"], ["a", "b"], acc=[NAN, np.inf], reward=[1.0, 0.0])
    assert metrics["val-aux/a/acc/num_missing"] == metrics["val-aux/b/acc/num_missing"] == 1.0
    assert metrics["val-aux/a/reward/mean@1"] == 1.0
    assert not any(name.startswith("val-core/") for name in metrics)
    assert headline(metrics) is None


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda column: np.array(column, dtype=object)])
def test_columns_may_be_any_sequences(kind):
    columns = ["a", "a", "b", "b"], ["s"] * 4, ["1", "1", "2", "3"], [1.0, 0.0, 1.0, 0.0]
    found, expected = (
        summarize_validation(ValidationResponses(uids=u, sources=s, predictions=p, variables={"acc": values}))
        for u, s, p, values in (map(kind, columns), columns)
    )
    assert found == expected
    assert "val-core/s/acc/maj@2/mean" in found


@pytest.mark.parametrize("column", ["uids", "sources"])
@pytest.mark.parametrize(("other", "kind"), [(None, "NoneType"), (NAN, "float"), (7, "int"), (b"p", "bytes")])
def test_uids_and_sources_that_are_no_text_are_refused(column, other, kind):
    given = {"uids": ["p", "q"], "sources": ["a", "a"]}
    for texts in ([other, other], [other, "p"]):
        with pytest.raises(DataError, match=rf"{column} must be text; found {kind}\. Pass one per response"):
            summarize(**{**given, column: texts}, acc=[1.0, 0.0])


@pytest.mark.parametrize("values", [["1", "x"], [{}, 1.0], [[1.0], [1.0, 2.0]], [10**400, 1]])
def test_variables_that_are_no_numbers_are_refused(values):
    with pytest.raises(DataError, match="variable 'acc' must have a number for each response"):
        summarize(["p", "q"], ["a", "a"], acc=values)


@pytest.mark.parametrize(
    ("variables", "name"),
    [(["acc", "acc"], "accuracy"), (["reward", "reward"], "mean_reward"), (["acc", "reward"], "score")],
)
def test_the_name_of_the_headline_follows_what_it_measures(variables, name):
    metrics = {f"val-core/org/s{i}/{variable}/mean@4": 0.5 for i, variable in enumerate(variables)}
    assert headline_name(metrics | {"val-aux/org/s0/length/mean@4": 3.0}) == name


def test_the_headline_is_no_interval():
    metrics = summarize(["p", "q", "r"], ["mean@8/x"] * 3, acc=[1.0, 0.0, 0.0])
    assert "val-core/mean@8/x/acc/mean@1/ci_low" in metrics
    assert headline(metrics) == pytest.approx(1 / 3)


def test_uids_are_compared_as_they_are():
    metrics = summarize(["p", "p\0", "p "], ["a"] * 3, acc=[1.0, 0.0, 0.0])
    assert metrics["val-aux/a/num_prompts"] == 3.0


def test_a_table_without_responses_has_no_prompt():
    table = response_table([NAN], prompt_of=[0])
    assert (table.max_count, len(table.counts), len(table.ranks)) == (0, 0, 0)


def test_a_response_table_is_sorted_within_each_prompt():
    table = response_table([2.0, 1.0, NAN, 3.0, -4.0], prompt_of=[7, 3, 7, 7, 3], votes=[0, 1, 2, -1, 0])
    assert table.values.tolist() == [-4.0, 1.0, 2.0, 3.0]
    assert table.prompt_of.tolist() == [0, 0, 1, 1]
    assert table.counts.tolist() == [2, 2]
    assert table.votes.tolist() == [0, 1, 0, -1]
    assert table.ranks.tolist() == [1, 2, 1, 2]
    assert table.max_count == 2


RESPONSES = st.lists(
    st.tuples(
        st.sampled_from("pqr"),
        st.sampled_from(["a", "b/c"]),
        st.one_of(st.just(NAN), st.floats(-1e3, 1e3), st.sampled_from([0.0, 1.0])),
        st.sampled_from([None, "", "1", "2"]),
    ),
    max_size=30,
)


def summary(rows, *, predicts=True):
    uids, sources, values, predictions = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
    return summarize_validation(
        ValidationResponses(
            uids=uids, sources=sources, variables={"acc": values}, predictions=predictions if predicts else None
        ),
    )


@settings(max_examples=60, deadline=None)
@given(RESPONSES, st.randoms(use_true_random=False))
def test_any_order_of_the_responses_gives_the_same_bits(rows, random):
    shuffled = rows.copy()
    random.shuffle(shuffled)
    first, second = summary(rows), summary(shuffled)
    assert list(first) == list(second)
    assert first == second
    for name in first:
        DEFINITIONS.lookup(name)


@settings(max_examples=40, deadline=None)
@given(RESPONSES)
def test_responses_that_are_given_twice_leave_means_votes_and_bests_of_fewer_as_they_are(rows):
    once, twice = summary(rows), summary(rows + rows)
    for name, value in once.items():
        section, rest = name.split("/", 1)
        if name.endswith("/num_prompts") and "@" in name:
            continue  # its name has the doubled number
        if "num_" in name:
            assert twice[name] == 2 * value or "num_prompts" in name
        elif "/mean@" in name and "ci_" not in name:
            stem, count = name.rsplit("@", 1)
            assert twice[f"{stem}@{2 * int(count)}"] == pytest.approx(value, rel=1e-9, abs=1e-9)
        elif ("best@" in name or "worst@" in name or "maj@" in name) and "ci_" not in name:
            same = [twice[key] for key in (f"val-core/{rest}", f"val-aux/{rest}") if key in twice]
            counts = {row[:2]: 0 for row in rows}
            for uid, source, number, _ in rows:
                counts[uid, source] += not np.isnan(number)
            if len({count for count in counts.values() if count}) == 1 and same:
                assert same[0] == pytest.approx(value, rel=1e-9, abs=1e-6), section


@settings(max_examples=40, deadline=None)
@given(RESPONSES)
def test_predictions_change_nothing_but_majorities(rows):
    plain, voted = summary(rows, predicts=False), summary(rows)
    assert {name: value for name, value in voted.items() if "/maj@" not in name} == plain


def test_nothing_but_missing_values():
    assert summarize(["p", "p"], ["a", "a"], acc=[NAN, NAN]) == {
        "val-aux/a/num_prompts": 1.0,
        "val-aux/a/num_responses": 2.0,
        "val-aux/a/acc/num_missing": 2.0,
    }


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.floats(-1e3, 1e3)), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
)
def test_metrics_agree_with_a_loop_in_any_order(rows, random):
    random.shuffle(rows)
    metrics = summarize([f"u{u}" for u, _, _ in rows], [f"s{s}" for _, s, _ in rows], reward=[v for _, _, v in rows])
    for source in {s for _, s, _ in rows}:
        by_uid = {}
        for uid, of, value in rows:
            if of == source:
                by_uid.setdefault(uid, []).append(value)
        n = max(len(values) for values in by_uid.values())
        expected = np.mean([np.mean(values) for values in by_uid.values()])
        assert metrics[f"val-core/s{source}/reward/mean@{n}"] == pytest.approx(expected, rel=1e-9, abs=1e-9)
        stds = [np.std(values) for values in by_uid.values() if len(values) > 1]
        if stds:
            assert metrics[f"val-aux/s{source}/reward/std@{n}"] == pytest.approx(np.mean(stds), rel=1e-6, abs=1e-6)


def test_the_number_of_prompts_behind_a_metric_is_shown_if_it_is_not_all():
    """Of three prompts, one has a failed response and one has only failed ones."""
    metrics = summarize_validation(
        ValidationResponses(
            uids=["p", "p", "q", "q", "r", "r"],
            sources=["a"] * 6,
            variables={"acc": [1, 0, 1, NAN, NAN, NAN]},
            predictions=["1", "2", "1", None, None, None],
        )
    )
    assert metrics["val-aux/a/num_prompts"] == 3.0
    assert metrics["val-aux/a/acc/mean@2/num_prompts"] == 2.0
    assert [metrics[f"val-aux/a/acc/{name}@2/num_prompts"] for name in ("pass", "best", "maj")] == [1.0] * 3
