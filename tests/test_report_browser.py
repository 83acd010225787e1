"""Reports in a real headless Chromium."""

import json
import re
import sys
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from invented_runs import InventedRun
from report_pages import READY, found, rows_of, show

from rl_core.data import ImageSpan
from rl_core.images import ImageStore, encode_image
from rl_metrics.health import judge
from rl_metrics.report import write_report
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.rollout_log import RolloutLog
from rl_metrics.run_files.run_record import open_run
from rl_metrics.trackers.jsonl import JsonlTracker

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 2">',
    "<svg onload=window.hacked=3>",
    "javascript:window.hacked=4",
    "before\0after",
    "\u202egnp.exe",
    "half of a character: \ud800",
    "<!--<script>",
    "line one\nline two\ttab",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    InventedRun(steps=30).write(folder / "first", texts=HOSTILE)
    InventedRun(steps=30, skill=0.5, is_finished=False).write(folder / "second")
    write_report([open_run(folder / "first")], folder / "one.html")
    write_report([open_run(folder / "first"), open_run(folder / "second")], folder / "two.html")
    return folder


NOT_BLANK = """
[...document.querySelectorAll('canvas')].map((canvas) => {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
})
"""


def test_it_opens_from_disk_and_asks_nobody(page, runs):
    show(page, runs / "one.html")
    assert page.requests[-1] == (runs / "one.html").as_uri()
    assert page.run("document.title") == "first \u2013 report"
    assert "step 30; finished, 30 steps" in page.run("document.getElementById('verdicts').textContent")
    assert page.run("document.querySelectorAll('.check').length") > 10


@pytest.mark.parametrize(
    ("view", "least"), [("outcome", 1), ("curves", 4), ("distributions", 2), ("times", 1), ("worst", 1), ("probes", 1)]
)
@pytest.mark.parametrize("report", ["one", "two"])
def test_charts_are_drawn(page, runs, report, view, least):
    show(page, runs / f"{report}.html", f"view={view}")
    page.run("document.querySelector('.card').scrollIntoView()")
    page.wait(f"document.querySelectorAll('canvas').length >= {least}")
    page.wait(f"({NOT_BLANK}).every((colors) => colors > 3)")


def test_charts_that_are_not_seen_wait(page, runs):
    show(page, runs / "one.html", "view=curves")
    page.wait("document.querySelectorAll('canvas').length")
    assert page.run("document.querySelectorAll('canvas').length < document.querySelectorAll('.chart').length")
    last = "[...document.querySelectorAll('.chart')].at(-1)"
    page.wait(f"({last}.scrollIntoView(), {last}.querySelector('canvas') !== null)")


def test_findings_with_their_causes(page, tmp_path):
    InventedRun(steps=30, skill=0.0).write(tmp_path / "run")
    record = open_run(tmp_path / "run")
    first, *more = judge(record.history).findings
    write_report([record], tmp_path / "a.html")
    show(page, tmp_path / "a.html")
    assert f"Most likely cause: {first.causes[0]}." in page.run("document.getElementById('verdicts').innerText")
    assert page.run("document.querySelectorAll('.finding').length") == 1 + len(more)
    unfolded = page.run("[...document.querySelectorAll('.finding[open]')].map((one) => one.innerText)")
    for text in (first.what, *first.causes, *first.advice, *(one.metric for one in first.evidence)):
        assert [text in one for one in unfolded] == [True]
    page.run("document.querySelector('.finding a').click()")
    page.wait(f"document.querySelector('.card h3').textContent === {json.dumps(first.evidence[0].metric)}")


def test_a_legend_tells_the_newest_values_until_the_cursor_comes(page, tmp_path):
    for name, values in (("long", (0.25, 0.5, 0.75)), ("short", (0.125,))):
        (tmp_path / name).mkdir()
        rows = [json.dumps({"step": step, "critic/score/mean": value}) for step, value in enumerate(values, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    write_report([open_run(tmp_path / "long"), open_run(tmp_path / "short")], tmp_path / "a.html")
    show(page, tmp_path / "a.html", "view=curves&chart=critic/score/mean")
    values = "[...document.querySelectorAll('.u-legend .u-value')].map((one) => one.textContent)"
    page.wait(f"{values}.join() === '3,0.75,0.125'")
    page.point(".u-over")
    page.wait(f"{values}.join() === '2,0.5,0.125'")  # the short run shows its nearest value


def test_metrics_are_found_by_name(page, runs):
    show(page, runs / "one.html", "view=curves")
    page.run("document.querySelector('input[type=search]').focus()")
    page.type("entropy")
    page.wait("document.querySelectorAll('.card').length === 1")
    assert page.run("location.hash") == "#view=curves&chart=entropy"


def test_filters_show_the_rows_they_name(page, runs):
    rows = rows_of(runs / "first")
    show(page, runs / "one.html", "view=rollouts")
    assert found(page) == len(rows)
    for hash_, is_in in (
        ("s0=10&s1=12", lambda row: 10 <= row.step <= 12),
        ("r1=0.5", lambda row: row.reward <= 0.5),
        ("source=sums&finish=length", lambda row: (row.source, row.finish) == ("sums", "length")),
        ("failure=any", lambda row: row.failure is not None),
        ("failure=none&r0=0.9", lambda row: row.failure is None and row.reward >= 0.9),
        (f"problem={rows[0].problem}".replace("+", "%2B"), lambda row: row.problem == rows[0].problem),
    ):
        page.run(f"location.hash = 'view=rollouts&{hash_}'")
        expected = sum(map(is_in, rows))
        assert 0 < expected < len(rows)
        page.wait(f"document.getElementById('found').textContent.startsWith('{expected} of')")


def test_a_filter_that_is_typed_keeps_the_focus(page, runs):
    show(page, runs / "one.html", "view=rollouts")
    page.run("document.querySelector('input[name=s0]').focus()")
    page.type("30")
    expected = sum(row.step == 30 for row in rows_of(runs / "first"))
    page.wait(f"document.getElementById('found').textContent.startsWith('{expected} of')")
    assert page.run("document.activeElement.name") == "s0"
    page.point("form button", click=True)
    page.wait("document.getElementById('found').textContent.match(/^(\\d+) of \\1 /)")


def test_search_finds_rows_by_text(page, runs):
    rows = rows_of(runs / "first")
    wanted = rows[100].prompt
    show(page, runs / "one.html", "view=rollouts")
    page.run("document.getElementById('search').focus()")
    page.type(wanted.upper())
    expected = sum(wanted in row.prompt or wanted in row.response for row in rows)
    page.wait(f"document.getElementById('found').textContent.startsWith('{expected} of')")
    assert page.run("document.querySelectorAll('[role=option]').length") > 0


def test_a_trajectory_is_shown_token_by_token(page, runs):
    rows = rows_of(runs / "first")
    place = next(place for place, row in enumerate(rows) if row.step == 20)
    row = rows[place]
    show(page, runs / "one.html", f"view=rollouts&row={place}")
    page.wait("document.querySelectorAll('.token').length")
    assert page.run("document.querySelector('.pane pre').textContent") == row.prompt
    assert page.run("[...document.querySelectorAll('.token')].map((t) => t.textContent).join('')") == "".join(
        token.replace("\n", "↵\n") for token in row.tokens
    )
    page.point(".token:nth-child(2)")
    tip = page.wait("!document.getElementById('tip').hidden && document.getElementById('tip').innerText")
    for name in ("logprob, rollout", "logprob, policy", "advantage", "mask", "version", "entropy", "correction weight"):
        assert name in tip
    assert re.search(rf"entropy\s+{row.columns['entropy'][1]:.3g}"[:-1], tip), (tip, row.columns["entropy"][1])
    page.point(".token.masked")
    page.wait("document.getElementById('tip').innerText.includes('0: not trained')")
    assert page.run("document.querySelector('.token.masked').className") == "token masked"


def test_thumbnails_of_a_trajectorys_images(page, tmp_path):
    InventedRun(steps=2).write(tmp_path / "run")
    store = ImageStore(tmp_path / "run" / "images")
    digest = store.put(encode_image(np.full((60, 120, 3), (200, 30, 30), np.uint8)))
    spans = tuple(ImageSpan(digest=one, start=1, length=2) for one in (digest, "<img onerror=x>"))
    row = replace(rows_of(tmp_path / "run")[0], step=2, images=spans, prompt="Or [image 120x60]?", response="[image]b")
    row = replace(row, tokens=("[image]", "", "b"), mask=(False, False, True), columns={})
    with closing(RolloutLog(tmp_path / "run" / "rollouts.jsonl")) as rollouts:
        rollouts.write([row])
    write_report([open_run(tmp_path / "run")], tmp_path / "a.html")
    show(page, tmp_path / "a.html", f"view=rollouts&row={len(rows_of(tmp_path / 'run')) - 1}")
    page.wait("document.querySelectorAll('.token').length")
    page.wait("document.querySelector('.images img')?.naturalWidth === 96")
    assert page.run("document.querySelector('.images img').naturalHeight") == 48
    assert page.run("document.querySelector('.images').innerText").strip() == "image 2"
    assert page.run("[...document.querySelectorAll('.token')].map((t) => t.textContent)") == ["[image]", "", "b"]
    assert page.run("document.querySelectorAll('[onerror]').length") == 0


def test_thumbnails_of_a_validations_images(page, tmp_path):
    InventedRun(steps=2).write(tmp_path / "run")
    digest = ImageStore(tmp_path / "run" / "images").put(encode_image(np.full((60, 120, 3), 200, np.uint8)))
    of = {"prompt_uid": "u", "input": "Or [image 120x60]?", "output": "", "policy_version": (2, 2), "source": "s"}
    with closing(JsonlTracker(tmp_path / "run" / "metrics.jsonl")) as tracker:
        tracker.log_generations(2, "validation", [GenerationSample(**of, images=(digest,))])
    write_report([open_run(tmp_path / "run")], tmp_path / "a.html")
    show(page, tmp_path / "a.html", "view=validation")
    page.wait("document.querySelector('.images img')?.naturalWidth === 96")
    assert page.run("document.querySelectorAll('.images').length") == 1


def test_colours_differ_by_column(page, runs):
    show(page, runs / "one.html", "view=rollouts&row=40")
    page.wait("document.querySelectorAll('.token').length")
    colors = "[...document.querySelectorAll('.token')].map((token) => token.style.backgroundColor).join()"
    seen = set()
    for key in page.run("[...document.querySelector('select[aria-label=Color]').options].map(({ value }) => value)"):
        page.run(
            f"document.querySelector('select[aria-label=Color]').value = {json.dumps(key)};"
            "document.querySelector('select[aria-label=Color]').dispatchEvent(new Event('change'))"
        )
        seen.add(page.run(colors))
        assert page.run("location.hash").endswith(f"color={key}")
    assert len(seen) >= 7


def test_a_long_response_is_shown_whole(page, tmp_path):
    InventedRun(steps=1, trajectories=1, tokens=40_000).write(tmp_path / "run")
    write_report([open_run(tmp_path / "run")], tmp_path / "a.html")
    (row,) = rows_of(tmp_path / "run")
    assert len(row.tokens) > 20_000
    for color in ("version", "entropy", "advantage"):
        show(page, tmp_path / "a.html", f"view=rollouts&row=0&color={color}")
        page.wait(f"document.querySelectorAll('.token').length === {len(row.tokens)}")
    page.run("document.querySelector('.tokens').focus()")
    for key, place in (("Home", 0), ("PageDown", 50), ("PageDown", 100), ("PageUp", 50), ("End", len(row.tokens) - 1)):
        page.press(key)
        page.wait(f"document.querySelector('.token.current').dataset.place === '{place}'")


def test_the_keyboard_moves_the_selection(page, runs):
    show(page, runs / "one.html", "view=rollouts&row=5")
    page.wait("document.querySelectorAll('.token').length")
    page.run("document.querySelector('.list').focus()")
    page.press("ArrowDown")
    page.press("ArrowDown")
    page.press("ArrowUp")
    page.wait("location.hash.includes('row=6') && document.querySelector('[aria-selected=true]').dataset.row === '6'")
    page.press("End")
    page.wait(f"document.querySelector('[aria-selected=true]').dataset.row === '{len(rows_of(runs / 'first')) - 1}'")
    page.wait("document.querySelectorAll('.token').length > 3")
    page.run("document.querySelector('.tokens').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.wait("document.querySelector('.token.current').dataset.place === '1'")
    assert "token" in page.run("document.querySelector('dl[aria-live]').innerText")
    page.press("End")
    page.wait("document.querySelector('.token.current') === [...document.querySelectorAll('.token')].at(-1)")
    page.press("Home")
    page.wait("document.querySelector('.token.current').dataset.place === '0'")


def test_the_selected_one_is_in_view(page, runs):
    show(page, runs / "two.html", "view=rollouts&row=200")
    page.wait("document.querySelector('[aria-selected=true]') !== null")
    page.run("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    list_, item = (
        page.run(f"(({{top, bottom}}) => [top, bottom])(document.querySelector('{one}').getBoundingClientRect())")
        for one in (".list", "[aria-selected=true]")
    )
    assert list_[0] <= item[0] < item[1] <= list_[1]


def test_the_address_keeps_the_view(page, runs):
    show(page, runs / "one.html", "view=rollouts&s0=4&row=90&color=entropy")
    page.wait("document.querySelectorAll('.token').length")
    before = page.run("[found.textContent, document.querySelector('.pane').innerText]")
    page.call("Page.reload")
    page.wait(f"performance.getEntriesByType('navigation')[0].type === 'reload' && {READY}")
    page.wait("document.querySelectorAll('.token').length")
    assert page.run("[found.textContent, document.querySelector('.pane').innerText]") == before


@pytest.mark.parametrize("place", range(len(HOSTILE)))
def test_hostile_text_is_text(page, runs, place):
    rows = rows_of(runs / "first")
    row = next(number for number, row in enumerate(rows) if row.step == 1 and row.reward == 0.25) + place
    show(page, runs / "one.html", f"view=rollouts&row={row}")
    page.wait("document.querySelectorAll('.token').length === 2")
    codes = {"\0": "⟨U+0000⟩", "\u202e": "⟨U+202E⟩", "\ud800": "?"}
    shown = "".join(codes.get(character, character) for character in HOSTILE[place])
    assert page.run("document.querySelector('.pane pre').textContent") == shown
    assert page.run("document.querySelectorAll('img, svg, iframe, main script').length") == 0
    page.run("location.hash = 'view=worst&group=failure'")
    page.wait("document.querySelectorAll('tbody tr').length > 5")


def test_mistakes_of_validations_are_grouped_like_those_of_training(page, runs):
    tables = open_run(runs / "first").generations
    wrong = [(table.step, one.prompt_uid) for table in tables for one in table.samples if one.score < 0.5]
    show(page, runs / "one.html", "view=worst&of=validation&group=source")
    cells = page.wait("[...document.querySelectorAll('tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))")
    (of_default,) = [row for row in cells if row[0] == "default"]  # the chart's legend has rows too
    assert of_default[1] == str(len(wrong))
    page.run("location.hash = 'view=worst&of=validation&group=problem'")
    page.wait(f"document.querySelectorAll('tbody tr:has(a)').length === {len({uid for _, uid in wrong})}")
    page.run("location.hash = 'view=worst&of=validation&group=part'")
    page.wait("document.querySelector('tbody a')?.textContent === 'acc'")
    page.run("document.querySelector('tbody a').click()")
    page.wait(f"document.getElementById('found')?.textContent === '{len(wrong)} samples'")


def test_worst_cases_lead_to_their_trajectories(page, runs):
    rows = rows_of(runs / "first")
    show(page, runs / "one.html", "view=worst&group=source")
    bad = [row for row in rows if row.source == "sums" and (row.reward < 0.5 or row.failure)]
    cells = page.wait("[...document.querySelectorAll('tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))")
    (of_sums,) = [row for row in cells if row[0] == "sums"]
    assert of_sums[1] == str(len(bad))
    newest = [row for row in bad if row.step == max(row.step for row in bad)][-1]
    assert (
        f"step {newest.step} {newest.prompt} → {' '.join(newest.response.removesuffix('<|im_end|>').split())[:40]}"
        in of_sums[5]
    )
    label = page.run("document.querySelector('.chart').getAttribute('aria-label')")
    last = [row for row in rows if row.step == 30]
    share = sum(row.reward < 0.5 or row.failure is not None for row in last) / len(last)
    assert label.endswith(f"Newest: first {100 * share:.3g} %.")
    page.run("[...document.querySelectorAll('tbody a')].find((a) => a.textContent === 'sums').click()")
    page.wait(f"document.getElementById('found')?.textContent.startsWith('{len(bad)} of')")


def test_two_runs_beside_each_other(page, runs):
    show(page, runs / "two.html", "view=curves&chart=critic")
    page.wait("document.querySelectorAll('.u-legend .u-series').length === 3")
    assert "second" in page.run("document.querySelector('.legend').innerText")
    rows = rows_of(runs / "first")
    row = next(number for number, row in enumerate(rows) if row.step == 12)
    page.run(f"location.hash = 'view=rollouts&run=0&row={row}'")
    page.wait("document.querySelectorAll('.pane .tokens').length === 2")
    heads = page.run("[...document.querySelectorAll('.pane h2')].map((head) => head.textContent)")
    assert heads == [f"first · {rows[row].problem}", f"second · {rows[row].problem}"]
    steps = page.run(
        "[...document.querySelectorAll('.pane .facts.wide')].map((d) => d.innerText.match(/step\\s+(\\d+)/)[1])"
    )
    assert steps == ["12", "12"]
    page.run("location.hash = 'view=rollouts&run=1'")
    page.wait(f"document.getElementById('found').textContent.startsWith('{30 * 16} of')")


def test_the_list_tells_what_was_asked_and_answered(page, runs):
    rows = rows_of(runs / "first")
    show(page, runs / "one.html", "view=rollouts&sort=newest")
    item = page.wait("document.querySelector('[role=option]').innerText")
    newest = next(row for row in rows if row.step == 30)
    assert newest.prompt in item
    assert " ".join(newest.response.removesuffix("<|im_end|>").split())[:40] in item


def test_the_same_problem_across_steps(page, tmp_path):
    InventedRun(steps=60).write(tmp_path / "run")
    write_report([open_run(tmp_path / "run")], tmp_path / "a.html")
    rows = rows_of(tmp_path / "run")
    problem = next(row.problem for row in rows if len({one.step for one in rows if one.problem == row.problem}) > 1)
    same = [place for place, row in enumerate(rows) if row.problem == problem]
    show(page, tmp_path / "a.html", f"view=rollouts&row={same[0]}")
    cells = page.wait(
        "[...document.querySelectorAll('.same tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))"
    )
    assert [cell[0] for cell in cells] == [f"step {rows[place].step}" for place in same]
    assert [rows[place].response.split()[0] in cell[2] for place, cell in zip(same, cells, strict=True)]
    page.run("[...document.querySelectorAll('.same tbody a')].at(-1).click()")
    page.wait(f"document.querySelector('.pane .facts').innerText.match(/step\\s+{rows[same[-1]].step}\\b/)")


def test_the_timeline_of_a_step_has_its_phases(page, runs):
    show(page, runs / "one.html", "view=times&at=7")
    metrics = open_run(runs / "first").history.values
    phases = page.wait("[...document.querySelectorAll('.phase')].map((p) => [p.title.split(':')[0], p.clientWidth])")
    assert [name for name, _ in phases] == ["gen", "old_log_prob", "update_actor", "update_weights"]
    seconds = [metrics[f"timing_s/{name}"][6] for name, _ in phases]
    widths = [width for _, width in phases]
    for width, second in zip(widths, seconds, strict=True):
        assert width / sum(widths) == pytest.approx(second / sum(seconds), abs=0.03)
    page.run("document.querySelector('figure input').value = 30")
    page.run("document.querySelector('figure input').dispatchEvent(new Event('change'))")
    page.wait("document.querySelectorAll('figure h3')[1].textContent.includes('step 30')")


def test_parts_of_the_reward_lead_to_their_rows(page, runs):
    rows = rows_of(runs / "first")
    show(page, runs / "one.html", "view=worst&group=part")
    cells = page.wait("[...document.querySelectorAll('tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))")
    wrong = [row for row in rows if row.components.get("acc", 1.0) < 0.5 and (row.reward < 0.5 or row.failure)]
    assert next(row for row in cells if row[0] == "acc")[1] == str(len(wrong))
    page.run("[...document.querySelectorAll('tbody a')].find((a) => a.textContent === 'acc').click()")
    page.wait(f"document.getElementById('found')?.textContent.startsWith('{len(wrong)} of')")


def test_the_report_turns_light_and_dark(page, runs):
    show(page, runs / "one.html")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.run(background) == "rgb(255, 255, 255)"
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.wait(f"{background} === 'rgb(20, 23, 27)'")
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])


def test_the_report_prints_as_pdf(page, runs):
    show(page, runs / "one.html", "view=outcome")
    assert len(page.call("Page.printToPDF")["data"]) > 10_000


@pytest.mark.parametrize(
    ("view", "there"),
    [("rollouts&row=5", ".pane .tokens"), ("validation", "tbody tr"), ("times", ".phase"), ("curves", "canvas")],
)
def test_what_can_be_used_has_a_name(page, runs, view, there):
    show(page, runs / "two.html", f"view={view}")
    page.wait(f"document.querySelectorAll('{there}').length > 1")
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "link", "textbox", "searchbox", "combobox", "spinbutton", "listbox", "option", "img", "meter")
    nameless = [
        node["role"]["value"]
        for node in nodes
        if not node.get("ignored") and node["role"]["value"] in roles and not node.get("name", {}).get("value")
    ]
    page.call("Accessibility.disable")
    assert nameless == []


@pytest.mark.parametrize("num_steps", [40, pytest.param(400, marks=pytest.mark.soak)])
def test_many_trajectories_fit_into_a_report(page, tmp_path, num_steps):
    InventedRun(steps=num_steps, trajectories=125, tokens=50).write(tmp_path / "run")
    began = time.perf_counter()
    write_report([open_run(tmp_path / "run")], tmp_path / "a.html")
    written_s, size_mb = time.perf_counter() - began, (tmp_path / "a.html").stat().st_size / 1e6
    show(page, tmp_path / "a.html", f"view=rollouts&row={num_steps * 125 - 1}")
    page.wait("document.querySelectorAll('.token').length")
    sys.stdout.write(f"written in {written_s:.1f} s, {size_mb:.0f} MB, open after {page.run(READY)} ms\n")
    assert size_mb < 0.15 * num_steps
    page.run("location.hash = 'view=rollouts&q=carry'")
    assert found(page) > 100 * num_steps
