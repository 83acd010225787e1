"""Reports in a real headless Chromium."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
from chromium import Page, find_chromium

from rl_metrics.json_lines import JsonLinesWriter
from rl_metrics.report import write_report
from rl_metrics.report.server import ReportServer
from rl_metrics.run_record import open_run
from rl_metrics.testing.invented_runs import InventedRun

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium, and `nox -s tests` could not install it: apt-get install chromium"
)

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
READY = "document.documentElement.dataset.ready"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    InventedRun(steps=30).write(folder / "first", texts=HOSTILE)
    InventedRun(steps=30, skill=0.5, is_finished=False).write(folder / "second")
    write_report([open_run(folder / "first")], folder / "one.html")
    write_report([open_run(folder / "first"), open_run(folder / "second")], folder / "two.html")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    page = Page(tmp_path_factory.mktemp("browser") / "profile")
    yield page
    page.close()


@pytest.fixture
def page(browser):
    """A page that must have come to no error, asked nobody, and run nothing of the run's texts."""
    browser.requests.clear()
    browser.errors.clear()
    yield browser
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "http://127.0.0.1:"))] == []
    assert browser.run("window.hacked") is None


def show(page: Page, file: Path, hash_: str = "") -> None:
    page.open("about:blank")
    page.open(f"{file.as_uri()}#{hash_}")
    page.wait(READY)


def rows_of(folder: Path):
    return list(open_run(folder).rollouts())


def found(page: Page) -> int:
    """How many trajectories are listed."""
    text = page.wait("document.querySelector('progress').hidden && document.getElementById('found').textContent")
    return int(re.match(r"[\d,]+", text)[0].replace(",", ""))


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
    ("view", "least"), [("health", 4), ("curves", 4), ("distributions", 2), ("times", 1), ("probes", 1)]
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


def test_metrics_are_found_by_name(page, runs):
    show(page, runs / "one.html", "view=curves")
    page.run("document.querySelector('input[type=search]').focus()")
    page.type("entropy")
    page.wait("document.querySelectorAll('.card').length === 1")
    assert page.run("location.hash") == "#view=curves&chart=entropy"


def test_filters(page, runs):
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


def test_search(page, runs):
    rows = rows_of(runs / "first")
    wanted = rows[100].prompt
    show(page, runs / "one.html", "view=rollouts")
    page.run("document.getElementById('search').focus()")
    page.type(wanted.upper())
    expected = sum(wanted in row.prompt or wanted in row.response for row in rows)
    page.wait(f"document.getElementById('found').textContent.startsWith('{expected} of')")
    assert page.run("document.querySelectorAll('[role=option]').length") > 0


def test_a_trajectory_token_by_token(page, runs):
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
    page.point(".token:nth-child(3)")
    page.wait("document.getElementById('tip').innerText.includes('0: not trained')")
    assert page.run("document.querySelector('.token:nth-child(3)').className") == "token masked"


def test_colours_by_column(page, runs):
    show(page, runs / "one.html", "view=rollouts&row=40")
    page.wait("document.querySelectorAll('.token').length")
    colors = "[...document.querySelectorAll('.token')].map((token) => token.style.backgroundColor).join()"
    seen = set()
    for key in page.run("[...document.querySelector('select[aria-label=Colour]').options].map(({ value }) => value)"):
        page.run(
            f"document.querySelector('select[aria-label=Colour]').value = {json.dumps(key)};"
            "document.querySelector('select[aria-label=Colour]').dispatchEvent(new Event('change'))"
        )
        seen.add(page.run(colors))
        assert page.run("location.hash").endswith(f"color={key}")
    assert len(seen) >= 7


def test_the_keyboard(page, runs):
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


def test_worst_cases_lead_to_their_trajectories(page, runs):
    rows = rows_of(runs / "first")
    show(page, runs / "one.html", "view=worst&group=source")
    bad = [row for row in rows if row.source == "sums" and (row.reward < 0.5 or row.failure)]
    cells = page.wait("[...document.querySelectorAll('tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))")
    (of_sums,) = [row for row in cells if row[0] == "sums"]
    assert of_sums[1] == str(len(bad))
    page.run("[...document.querySelectorAll('tbody a')].find((a) => a.textContent === 'sums').click()")
    listed = sum(row.source == "sums" and row.reward < 0.5 for row in rows)
    page.wait(f"document.getElementById('found')?.textContent.startsWith('{listed} of')")


def test_two_runs_beside_each_other(page, runs):
    show(page, runs / "two.html", "view=curves&chart=critic")
    page.wait("document.querySelectorAll('.u-legend .u-series').length === 3")
    assert "second" in page.run("document.querySelector('.legend').innerText")
    rows = rows_of(runs / "first")
    row = next(number for number, row in enumerate(rows) if row.step == 12)
    page.run(f"location.hash = 'view=rollouts&run=0&row={row}'")
    page.wait("document.querySelectorAll('.pane .tokens').length === 2")
    heads = page.run("[...document.querySelectorAll('.pane h3')].map((head) => head.textContent)")
    assert heads == [f"first · {rows[row].problem}", f"second · {rows[row].problem}"]
    steps = page.run(
        "[...document.querySelectorAll('.pane .facts.wide')].map((d) => d.innerText.match(/step\\s+(\\d+)/)[1])"
    )
    assert steps == ["12", "12"]
    page.run("location.hash = 'view=rollouts&run=1'")
    page.wait(f"document.getElementById('found').textContent.startsWith('{30 * 16} of')")


def test_light_and_dark(page, runs):
    show(page, runs / "one.html")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.run(background) == "rgb(255, 255, 255)"
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.wait(f"{background} === 'rgb(20, 23, 27)'")
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])


def test_it_prints(page, runs):
    show(page, runs / "one.html", "view=health")
    assert len(page.call("Page.printToPDF")["data"]) > 10_000


def test_what_can_be_used_has_a_name(page, runs):
    show(page, runs / "two.html", "view=rollouts&row=5")
    page.wait("document.querySelectorAll('.pane .tokens').length === 2")
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


def test_served_it_follows_the_run(page, tmp_path):
    InventedRun(steps=3, is_finished=False).write(tmp_path / "run")
    server = ReportServer([tmp_path / "run"])
    try:
        page.open("about:blank")
        page.open(f"{server.url}#view=rollouts&row=3")
        page.wait(READY)
        page.wait("document.querySelectorAll('.token').length")
        page.run("window.isTheSame = true")
        writer = JsonLinesWriter(tmp_path / "run" / "metrics.jsonl")
        writer.append({"step": 4, "time": 1.0, "critic/score/mean": 0.5})
        writer.close()
        page.wait("document.getElementById('verdicts').textContent.includes('step 4')")
        page.wait("document.querySelectorAll('.token').length")
        assert page.run("window.isTheSame && location.hash") == "#view=rollouts&row=3"
        page.open("about:blank")
    finally:
        server.close()


@pytest.mark.slow
def test_many_trajectories(page, tmp_path):
    InventedRun(steps=400, trajectories=125, tokens=50).write(tmp_path / "run")
    began = time.perf_counter()
    write_report([open_run(tmp_path / "run")], tmp_path / "a.html")
    written_s, size_mb = time.perf_counter() - began, (tmp_path / "a.html").stat().st_size / 1e6
    show(page, tmp_path / "a.html", "view=rollouts&row=49999")
    page.wait("document.querySelectorAll('.token').length")
    sys.stdout.write(f"written in {written_s:.1f} s, {size_mb:.0f} MB, open after {page.run(READY)} ms\n")
    assert size_mb < 60
    page.run("location.hash = 'view=rollouts&q=carry'")
    assert found(page) > 40_000
