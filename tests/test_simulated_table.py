"""The simulation reproduces the order of the published table, and every ratio within 20 %."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "simulate" / "published.py"
ASYNCHRONOUS = ("stream", "partial")


@pytest.fixture(scope="module")
def published() -> Any:
    spec = importlib.util.spec_from_file_location("published_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compared(published: Any) -> list[Any]:
    return published.compare_published(num_versions=6, seed=0)


def test_each_asynchronous_row_is_as_much_faster_than_sync_as_published(compared: list[Any]) -> None:
    errors = {(one.row.mode, one.row.split.gpus): one.error for one in compared if one.row.mode in ASYNCHRONOUS}
    assert set(errors) == {("partial", 32), ("partial", 64), ("partial", 128), ("stream", 128)}
    assert all(abs(error) < 0.2 for error in errors.values()), errors


def test_any_two_step_times_of_the_main_table_have_the_published_ratio(compared: list[Any]) -> None:
    rows = [one for one in compared if one.row.mode != "stream"]
    errors = {
        (a.row.mode, a.row.split.gpus, b.row.mode, b.row.split.gpus): (a.run.step_s / b.run.step_s)
        / (a.row.step_s / b.row.step_s)
        - 1
        for a in rows
        for b in rows
        if a.row.step_s > b.row.step_s
    }
    assert len(errors) == 15
    assert all(abs(error) < 0.2 for error in errors.values()), errors


def test_step_times_are_in_the_published_order(compared: list[Any]) -> None:
    """Sync on 64 GPUs is left out: it is 2.5 % from 128 GPUs, less than the longest response varies in few steps."""
    main = [one for one in compared if one.row.mode != "stream" and (one.row.mode, one.row.split.gpus) != ("sync", 64)]
    on_128 = [one for one in compared if one.row.split.gpus == 128]
    for rows in (main, on_128):
        published = sorted(rows, key=lambda one: one.row.step_s)
        assert sorted(rows, key=lambda one: one.run.step_s) == published


def test_phases_of_the_synchronous_rows_are_those_that_costs_were_fitted_to(compared: list[Any]) -> None:
    synchronous = [one for one in compared if one.row.mode == "sync"]
    assert len(synchronous) >= 2
    for one in synchronous:
        assert one.run.step_s == pytest.approx(one.row.step_s, rel=0.05)
        assert one.run.gen_s == pytest.approx(one.row.gen_s, rel=0.1)
        assert one.run.update_s == pytest.approx(one.row.update_s, rel=0.05)
        assert one.run.logprobs_s == pytest.approx(one.row.logprobs_s, rel=0.12)


def test_a_published_step_is_as_many_samples_in_both_modes(published: Any) -> None:
    """In both modes, 400 steps at the published seconds make up the total, except for at most 13 % outside steps."""
    rows = published.published_rows()
    assert {row.mode for row in rows} > {"sync"}
    for row in rows:
        assert 400 * row.step_s < row.total_s[-1] < 1.13 * 400 * row.step_s
        assert list(row.total_s) == sorted(row.total_s)


def test_the_table_has_a_line_for_each_row(published: Any, compared: list[Any]) -> None:
    lines = published.published_table(compared).splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["32", "16:16", "64", "32:32", "128", "64:64", "64:64"]
