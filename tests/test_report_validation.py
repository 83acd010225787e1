"""Validation samples of a report in a browser."""

import pytest
from invented_runs import InventedRun
from report_pages import show

from rl_metrics.report import write_report
from rl_metrics.run_files.run_record import open_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    InventedRun(steps=30, trajectories=2).write(folder / "first")
    InventedRun(steps=30, trajectories=2, skill=0.5).write(folder / "second")
    write_report([open_run(folder / "first")], folder / "one.html")
    write_report([open_run(folder / "first"), open_run(folder / "second")], folder / "two.html")
    return folder


def test_samples_of_validations(page, runs):
    tables = {table.step: table.samples for table in open_run(runs / "first").generations}
    show(page, runs / "one.html", "view=validation")
    table = "[...document.querySelectorAll('tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))"
    cells = page.wait(f"({table}).length && {table}")
    shown = [(step, prompt, expected, score, answer) for step, prompt, expected, score, answer, _ in cells]
    assert shown == [("30", one.input, one.ground_truth, f"{one.score:g}", one.output) for one in tables[30]]
    page.run("document.getElementById('search').focus()")
    page.type(tables[30][7].input.lower())
    page.wait(f"{table}.length === 1")
    page.run("[...document.querySelectorAll('tbody a')].find((a) => a.textContent === 'all steps').click()")
    page.wait(f"{table}.length === {len(tables)}")
    assert [row[0] for row in page.run(table)] == [str(step) for step in tables]
    page.run("location.hash = 'view=validation&vstep=all&v1=0.4&vsort=worst'")
    wrong = sum(one.score < 0.4 for samples in tables.values() for one in samples)
    page.wait(f"document.getElementById('found').textContent === '{wrong} samples'")


def test_samples_of_two_runs_beside_each_other(page, runs):
    show(page, runs / "two.html", "view=validation&vstep=10")
    cells = page.wait("[...document.querySelectorAll('tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))")
    first, second = (
        next(table.samples for table in open_run(runs / name).generations if table.step == 10)
        for name in ("first", "second")
    )
    assert [row[4] for row in cells] == [one.output for one in first]
    assert [(row[6], row[8]) for row in cells] == [("10", one.output) for one in second]


def test_many_samples_come_by_and_by(page, tmp_path):
    InventedRun(steps=60).write(tmp_path / "run")
    write_report([open_run(tmp_path / "run")], tmp_path / "a.html")
    show(page, tmp_path / "a.html", "view=validation&vstep=all")
    page.wait("document.querySelectorAll('tbody tr').length === 50")
    page.run("[...document.querySelectorAll('button')].find((b) => b.textContent === 'Show more').click()")
    page.wait("document.querySelectorAll('tbody tr').length === 100")
