"""What charts of a report say, in a browser: means, metrics without a number, phases, and the keyboard."""

import math

import pytest
from invented_runs import InventedRun
from report_pages import report_of, show, write_run

METRIC = "critic/score/mean"
VALUES = (1.0, 3.0, math.nan, 5.0, 7.0, 9.0, 11.0)
LEGEND = "[...document.querySelectorAll('.u-legend .u-value')].map((one) => one.textContent).join()"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    write_run(folder, metrics=[{METRIC: value, "actor/entropy": value} for value in VALUES])
    return report_of(folder)


@pytest.mark.parametrize(("smooth", "newest"), [("", "11"), ("5", "7"), ("20", "6"), ("constructor", "11")])
def test_a_mean_is_that_of_the_last_values(page, report, smooth, newest):
    show(page, report, f"view=curves&chart={METRIC}&smooth={smooth}")
    page.wait(f"{LEGEND} === '7,{newest}'")


def test_a_metric_that_was_never_finite_says_so(page, tmp_path):
    for name, value in (("first", math.nan), ("second", 0.5)):
        write_run(tmp_path / name, metrics=[{METRIC: value, "actor/grad_norm": math.inf}] * 3)
    said = "[...document.querySelectorAll('.card')].map((one) => one.innerText)"
    show(page, report_of(tmp_path / "first"), "view=curves")
    cards = page.run(said)
    assert [card.splitlines()[0] for card in cards] == [METRIC, "actor/grad_norm"]
    assert all("first: it was not finite at any of its 3 steps." in card for card in cards)
    show(page, report_of(tmp_path / "first", tmp_path / "second"), "view=curves")
    page.wait("document.querySelectorAll('canvas').length === 1")
    score, norm = page.run(said)
    assert "second: it was not finite at any of its 3 steps." in norm
    assert "first: it was not finite" in score
    assert "second: it" not in score


def test_what_is_beside_a_step_is_none_of_its_phases(page, tmp_path):
    times = {"step": 2.0, "gen": 1.5, "testing": 9.0, "save_checkpoint": 4.0, "reward_wait": 3.0}
    write_run(tmp_path / "run", metrics=[{f"timing_s/{name}": time for name, time in times.items()}])
    show(page, report_of(tmp_path / "run"), "view=times")
    assert page.run("[...document.querySelectorAll('.phase')].map((one) => one.textContent)") == ["gen 1.5 s"]
    text = page.run("document.getElementById('main').innerText")
    assert "The step took 2 s. gen 1.5 s. Beside the step: testing 9 s, save_checkpoint 4 s." in text
    assert "Of the phases' time: gen 100 %." in text


def test_distributions_say_how_right_they_are(page, tmp_path):
    InventedRun(steps=3).write(tmp_path / "run")
    show(page, report_of(tmp_path / "run"), "view=distributions")
    assert "right to 2 %" in page.run("document.getElementById('main').innerText")


def test_a_chart_by_keyboard(page, report):
    show(page, report, f"view=curves&chart={METRIC}")
    page.wait("document.querySelector('canvas') !== null")
    page.run("document.querySelector('.chart').focus()")
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    page.wait(f"{LEGEND} === '6,9'")
    page.press("ArrowRight")
    page.wait(f"{LEGEND} === '7,11'")
    card = "document.querySelector('.chart').card.chart"
    page.run(f"{card}.setScale('x', {{ min: 2, max: 4 }})")
    page.wait(f"{card}.scales.x.min === 2")
    page.press("ArrowRight")
    page.wait(f"{LEGEND} === '4,5'")
    page.press("Escape")
    page.wait(f"{card}.scales.x.min === 1 && {card}.scales.x.max === 7")
    page.run("document.activeElement.blur()")
    page.wait(f"{LEGEND} === '7,11'")


def test_a_curve_is_hidden_by_keyboard(page, report):
    show(page, report, f"view=curves&chart={METRIC}")
    page.wait("document.querySelector('canvas') !== null")
    switch = "document.querySelector('.u-legend [role=button]')"
    pressed = f"{switch}.getAttribute('aria-pressed')"
    assert page.run(f"[{switch}.textContent, {pressed}]") == ["run", "true"]
    page.run(f"{switch}.focus()")
    is_shown = "String(document.querySelector('.chart').card.chart.series[1].show)"
    for shown in ("false", "true"):
        page.press("Enter")
        page.wait(f"{pressed} === '{shown}' && {is_shown} === '{shown}'")
