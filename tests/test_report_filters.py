"""Trajectory lists of a report in a browser: filters, links from the worst cases, and odd addresses."""

import json
import math
from dataclasses import replace

import pytest
from report_pages import found, report_of, show, write_run

from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.rollout_log import RolloutRow
from rl_metrics.trackers.jsonl import JsonlTracker

REWARDS = (0.3, 0.3, 0.7, 0.49995, math.nan, 123462.0, 123460.7, 20000.5, 3e9 + 1, 3e9 + 2)


def row(number, reward, **more):
    of = {
        "step": 1,
        "time": 1.0,
        "prompt_uid": f"u{number}",
        "problem": f"p{number}",
        "prompt": "1+1=",
        "response": "2",
    }
    return RolloutRow(**(of | {"reward": reward, "components": {"acc": reward}} | more))


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    rows = [row(number, reward) for number, reward in enumerate(REWARDS)]
    write_run(folder, rows=rows)
    tracker = JsonlTracker(folder / "metrics.jsonl")
    sample = GenerationSample(prompt_uid="u", input="", output="", score=0.3, policy_version=(1, 1), source="trainer")
    tracker.log_generations(1, "validation", [sample, replace(sample, score=0.7)])
    tracker.close()
    return report_of(folder)


BOUNDS = (
    *((low, high) for low in (0.3, 0.7, 0.49995, 123462, 20000.5, 3000000001) for high in ("", low)),
    *(("", high) for high in (0.3, 0.7, 123461, 123460.7, 3000000001)),
)


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_what_was_typed_finds_what_was_recorded(page, rewarded, low, high):
    expected = sum((low == "" or reward >= low) and (high == "" or reward <= high) for reward in REWARDS)
    show(page, rewarded, f"view=rollouts&r0={low}&r1={high}")
    assert found(page) == expected
    page.run(f"location.hash = 'view=rollouts&part=acc&p0={low}&p1={high}&sort=newest'")
    page.wait("document.querySelector('select[aria-label=Order]').value === 'newest'")
    assert found(page) == expected


def test_a_score_that_was_typed_finds_its_samples(page, rewarded):
    show(page, rewarded, "view=validation&v0=0.3&v1=0.3")
    page.wait("document.getElementById('found').textContent === '1 sample'")


def test_large_whole_numbers_are_shown_as_they_were_recorded(page, rewarded):
    show(page, rewarded, "view=rollouts&r0=123462&r1=123462")
    assert found(page) == 1
    assert page.wait("document.querySelector('[role=option] .score').textContent") == "123462"


def test_curves_of_large_whole_numbers(page, tmp_path):
    metrics = [
        {"training/policy_version": 123456 + step, "perf/total_num_tokens": 2**24 + 1 + step} for step in range(7)
    ]
    write_run(tmp_path / "run", metrics=metrics)
    show(page, report_of(tmp_path / "run"), "view=curves")
    for name, value in (("training/policy_version", "123462"), ("perf/total_num_tokens", "16777223")):
        page.run(f"location.hash = 'view=outcome'; location.hash = 'view=curves&chart={name}'")
        newest = f"document.querySelector('[aria-label^=\"{name}\"] .u-legend tr:nth-child(2) .u-value')"
        page.wait(f"{newest}.textContent === '{value}'")


WORST = (
    row(0, 0.0, source="math", problem="sum-1+2"),
    row(1, 0.49996, source="math", problem="sum-1+2", finish="length"),
    row(2, math.nan, source="math", problem="sum-1+20", failure="timeout"),
    row(3, 0.9, source="math", problem="sum-1+20", failure="timeout", components={"acc": 0.4}),
    row(4, 1.0, source="math", problem="Sum-1+2", components={"acc": 0.1}),
    row(5, 0.0, source="", problem="\u202eodd", failure="any"),
    row(6, 1.0, source="code", problem="q", finish="", components={"acc": 0.0}),
    row(7, math.nan, source="code", problem="q", finish="", components={}),
    row(8, 0.1, source="code", problem="long " * 100 + "one", components={"long " * 100 + "one": 0.1}),
    row(9, 0.2, source="code", problem="long " * 100 + "two", components={"long " * 100 + "two": 0.2}),
)


@pytest.mark.parametrize("group", ["source", "finish", "failure", "problem", "part"])
def test_a_link_lists_as_many_worst_cases_as_were_counted(page, tmp_path, group):
    write_run(tmp_path / "run", rows=WORST)
    show(page, report_of(tmp_path / "run"), f"view=worst&group={group}")
    rows = "[...document.querySelectorAll('.scroll tbody tr')]"
    counted = page.wait(f"{rows}.map(({{ cells }}) => [cells[0].firstChild.hash, cells[1].innerText])")
    assert len(counted) >= 2
    if group != "part":
        assert sum(int(count) for _, count in counted) == 7
    for address, count in counted:
        page.run(f"location.hash = {json.dumps(address)}")
        page.wait(f"document.getElementById('found')?.textContent.startsWith('{count} of')")


def test_the_worst_cases_are_a_filter_that_can_be_taken_away(page, tmp_path):
    write_run(tmp_path / "run", rows=WORST)
    show(page, report_of(tmp_path / "run"), "view=rollouts&worst=any")
    assert found(page) == 7
    worst = "document.querySelector('select[aria-label=\"Worst cases\"]')"
    assert page.run(f"{worst}.selectedOptions[0].text") == "failed or below 0.5"
    page.run(f"{worst}.value = ''; {worst}.dispatchEvent(new Event('change'))")
    page.wait(f"document.getElementById('found').textContent.startsWith('{len(WORST)} of')")
    assert page.run("location.hash") == "#view=rollouts"


WITHOUT_CHARTS = """(() => {
  const main = document.getElementById('main').cloneNode(true);
  main.querySelectorAll('.chart').forEach((chart) => chart.remove());
  return main.textContent;
})()"""
"""The page's text without its charts, whose legends appear once they are in view."""


@pytest.mark.parametrize(
    "address",
    [
        *(
            f"view=rollouts&{name}=constructor"
            for name in ("sort", "worst", "color", "row", "run", "beside", "s0", "r1")
        ),
        *("view=worst&group=constructor", "view=validation&vsort=constructor", "view=validation&run=constructor"),
        *(f"view={view}&run={run}" for view in ("rollouts", "validation") for run in ("0.5", "-1", "9", "1e999")),
        *(f"view=rollouts&row={place}" for place in ("0.5", "-1", "99", "Infinity")),
        *(
            "view=rollouts&row=0&beside=0.5",
            "view=curves&smooth=constructor&axis=constructor&x0=constructor&x1=1e999",
            "view=times&at=constructor",
            "view=constructor",
        ),
    ],
)
def test_what_an_address_cannot_mean_is_as_if_it_were_not_there(page, both, address):
    view, *odd = address.split("&")
    kept = [part for part in odd if part == "row=0"]
    show(page, both, "&".join([view.replace("constructor", "outcome"), *kept]))
    drawn = f"!document.querySelector('progress:not([hidden])') && {WITHOUT_CHARTS}"
    ready = "document.querySelector('.token, tbody tr, .card, .pane > p') !== null"
    page.wait(ready)
    expected = page.wait(drawn)
    show(page, both, address)
    page.wait(ready)
    page.wait(f"{WITHOUT_CHARTS} === {json.dumps(expected)}")
    selects = "[...document.querySelectorAll('select')].map((one) => one.selectedIndex)"
    assert -1 not in page.run(selects)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    for name in ("first", "second"):
        rows = [row(number, number % 2, tokens=("2",), mask=(True,)) for number in range(3)]
        metrics = [{"timing_s/step": 1.0, "timing_s/gen": 1.0, "critic/score/mean": 0.5}] * 2
        write_run(folder / name, rows=rows, metrics=metrics)
        tracker = JsonlTracker(folder / name / "metrics.jsonl")
        sample = GenerationSample(
            prompt_uid="u", input="", output="", score=0.3, policy_version=(1, 1), source="trainer"
        )
        tracker.log_generations(1, "validation", [sample, replace(sample, score=0.1)])
        tracker.close()
    return report_of(folder / "first", folder / "second")
