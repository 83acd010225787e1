"""The simulation reproduces the order of the published table, and every ratio within 20 %."""

import pytest

from rl_rollout.simulation.published import ComparedRow, compare_published, published_rows

ASYNCHRONOUS = ("stream", "partial")


@pytest.fixture(scope="module")
def compared() -> list[ComparedRow]:
    return compare_published(num_versions=6, seed=0)


def test_each_asynchronous_row_is_as_much_faster_than_sync_as_published(compared: list[ComparedRow]) -> None:
    errors = {(one.row.mode, one.row.cluster.gpus): one.error for one in compared if one.row.mode in ASYNCHRONOUS}
    assert set(errors) == {("partial", 32), ("partial", 64), ("partial", 128), ("stream", 128)}
    assert all(abs(error) < 0.2 for error in errors.values()), errors


def test_any_two_step_times_of_the_main_table_have_the_published_ratio(compared: list[ComparedRow]) -> None:
    rows = [one for one in compared if one.row.mode != "stream"]
    errors = {
        (a.row.mode, a.row.cluster.gpus, b.row.mode, b.row.cluster.gpus): (a.outcome.step_s / b.outcome.step_s)
        / (a.row.step_s / b.row.step_s)
        - 1
        for a in rows
        for b in rows
        if a.row.step_s > b.row.step_s
    }
    assert len(errors) == 15
    assert all(abs(error) < 0.2 for error in errors.values()), errors


def test_step_times_are_in_the_published_order(compared: list[ComparedRow]) -> None:
    """Sync on 64 GPUs is left out: it is 2.5 % from 128 GPUs, less than the longest response varies in few steps."""
    main = [
        one for one in compared if one.row.mode != "stream" and (one.row.mode, one.row.cluster.gpus) != ("sync", 64)
    ]
    on_128 = [one for one in compared if one.row.cluster.gpus == 128]
    for rows in (main, on_128):
        published = sorted(rows, key=lambda one: one.row.step_s)
        assert sorted(rows, key=lambda one: one.outcome.step_s) == published


def test_phases_of_the_synchronous_rows_are_those_that_costs_were_fitted_to(compared: list[ComparedRow]) -> None:
    for one in compared:
        if one.row.mode == "sync":
            assert one.outcome.step_s == pytest.approx(one.row.step_s, rel=0.05)
            assert one.outcome.gen_s == pytest.approx(one.row.gen_s, rel=0.1)
            assert one.outcome.update_s == pytest.approx(one.row.update_s, rel=0.05)
            assert one.outcome.logprobs_s == pytest.approx(one.row.logprobs_s, rel=0.12)


def test_a_published_step_is_as_many_samples_in_both_modes() -> None:
    """In both modes, 400 steps at the published seconds make up the total, except for at most 13 % outside steps."""
    for row in published_rows():
        assert 400 * row.step_s < row.total_s[-1] < 1.13 * 400 * row.step_s
        assert list(row.total_s) == sorted(row.total_s)
