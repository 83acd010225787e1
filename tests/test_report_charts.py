"""Charts of a report in a browser: means, metrics without a number, phases, and the keyboard."""

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
    assert all("first: not finite at any of its 3 steps." in card for card in cards)
    show(page, report_of(tmp_path / "first", tmp_path / "second"), "view=curves")
    page.wait("document.querySelectorAll('canvas').length === 1")
    score, norm = page.run(said)
    assert "second: not finite at any of its 3 steps." in norm
    assert "first: not finite" in score
    assert "second: not" not in score


def test_what_is_beside_a_step_is_none_of_its_phases(page, tmp_path):
    times = {"step": 2.0, "gen": 1.5, "testing": 9.0, "save_checkpoint": 4.0, "reward_wait": 3.0}
    write_run(tmp_path / "run", metrics=[{f"timing_s/{name}": time for name, time in times.items()}])
    show(page, report_of(tmp_path / "run"), "view=times")
    assert page.run("[...document.querySelectorAll('.phase')].map((one) => one.textContent)") == ["gen 1.5 s"]
    text = page.run("document.getElementById('main').innerText")
    assert "The step took 2 s. gen 1.5 s. Outside the step: testing 9 s, save_checkpoint 4 s." in text
    assert "Of the phases' time: gen 100 %." in text


def test_distributions_say_how_right_they_are(page, tmp_path):
    InventedRun(steps=3).write(tmp_path / "run")
    show(page, report_of(tmp_path / "run"), "view=distributions")
    assert "accurate to 2 %" in page.run("document.getElementById('main').innerText")


def test_a_chart_moves_by_keyboard(page, report):
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


def test_zoom_is_shared_and_kept_by_the_address(page, report):
    show(page, report, "view=curves")
    of_chart = "({ card: { chart: { scales: { x } } } }) => [x.min, x.max].join()"
    scales = f"[...document.querySelectorAll('.chart')].map({of_chart})"
    page.wait("[...document.querySelectorAll('.chart')].every(({ card }) => card.chart)")
    page.run(
        "(({ card: { chart } }) => chart.setSelect({ top: 0, height: 9, left: chart.valToPos(2, 'x'),"
        " width: chart.valToPos(5, 'x') - chart.valToPos(2, 'x') }))(document.querySelector('.chart'))"
    )
    page.wait(f"{scales}.join(' ') === '2,5 2,5'")
    assert page.run("location.hash") == "#view=curves&x0=2&x1=5"
    assert page.run("[...document.querySelectorAll('.range input')].map(({ value }) => value)") == ["2", "5"]
    page.call("Page.reload")
    page.wait("performance.getEntriesByType('navigation')[0].type === 'reload'")
    page.wait(f"{scales}.join(' ') === '2,5 2,5'")
    page.run("document.querySelector('.chart').focus()")
    page.press("Escape")
    page.wait(f"{scales}.join(' ') === '1,7 1,7' && location.hash === '#view=curves'")


def test_what_never_moves_is_a_line_of_a_table(page, tmp_path):
    metrics = [
        {METRIC: 0.0, "actor/lr": 1e-6, "actor/ppo_kl": step * 1e-9, "actor/grad_norm": step} for step in range(9)
    ]
    write_run(tmp_path / "run", metrics=metrics)
    show(page, report_of(tmp_path / "run"), "view=curves")
    assert page.run("[...document.querySelectorAll('.card h3')].map((one) => one.textContent)") == [
        METRIC,
        "actor/grad_norm",
    ]
    page.wait("document.querySelectorAll('canvas').length === 2")
    y = "document.querySelector('.chart').card.chart.scales.y"
    assert page.run(f"[{y}.min, {y}.max]") == [0, 1]
    still = "[...document.querySelectorAll('.chapter')].at(-1)"
    assert page.run(f"[{still}.open, {still}.querySelector('summary').textContent]") == [False, "Constant 2 metrics"]
    rows = page.run(
        f"[...{still}.querySelectorAll('tbody tr')].map((row) => [...row.cells].slice(0, 2).map((c) => c.textContent))"
    )
    assert rows == [["actor/lr", "1e-6"], ["actor/ppo_kl", "0 except for rounding"]]


def test_the_logarithmic_axis_says_what_it_leaves_out(page, tmp_path):
    write_run(tmp_path / "run", metrics=[{"actor/grad_norm": value} for value in (0.0, 0.01, 100.0)])
    show(page, report_of(tmp_path / "run"), "view=curves&axis=log")
    page.wait(f"{LEGEND} === '3,100'")
    y = "document.querySelector('.chart').card.chart.scales.y"
    assert page.run(f"[{y}.distr, {y}.min, {y}.max]") == [3, 0.01, 100]
    assert "omits values that are not above 0" in page.run("document.querySelector('.card').innerText")


def test_what_belongs_to_a_curve_is_hidden_with_it(page, tmp_path):
    name = "val-core/sums/acc/mean@1"
    write_run(
        tmp_path / "run",
        metrics=[{name: 0.5, f"{name}/ci_low": 0.4, f"{name}/ci_high": 0.6 + step} for step in range(2)],
    )
    show(page, report_of(tmp_path / "run"), "view=curves")
    page.wait(f"{LEGEND} === '2,0.5'")
    assert page.run("document.querySelectorAll('.card').length") == 1
    shown = "document.querySelector('.chart').card.chart.series.slice(1).map(({ show }) => show).join()"
    assert page.run(shown) == "true,true,true"
    page.run("document.querySelector('.u-legend [role=button]').click()")
    page.wait(f"{shown} === 'false,false,false'")


def test_a_step_leads_to_its_rollouts(page, tmp_path):
    InventedRun(steps=7).write(tmp_path / "run")
    show(page, report_of(tmp_path / "run"), f"view=curves&chart={METRIC}")
    page.wait("document.querySelector('canvas') !== null")
    page.run("document.querySelector('.chart').focus()")
    for key in ("ArrowLeft", "ArrowLeft", "ArrowLeft", "Enter"):
        page.press(key)
    links = "[...document.querySelectorAll('.at a')]"
    page.wait(f"{links}.length === 3")
    assert page.run("document.querySelector('.at').textContent") == "Step 5 · rollouts · validation · time"
    page.point(".u-over", click=True)
    page.wait("document.querySelector('.at').textContent.startsWith('Step 4 · rollouts · validation of step 5 · time')")
    page.run(f"{links}[0].click()")
    page.wait("document.getElementById('found')?.textContent.startsWith('16 of')")
