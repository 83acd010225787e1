"""Reports in a browser: on a phone, with dark colours, by keyboard, and by screen reader."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from invented_runs import InventedRun
from report_pages import report_of, show

VIEWS = ("", "curves", "distributions", "times", "rollouts", "validation", "worst", "probes", "run")
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    InventedRun(steps=12).write(folder / "run")
    return report_of(folder / "run")


@pytest.fixture
def as_on(page):
    """A function that sets the page's size and colours until the test ends."""

    def set_to(*, width, height, scheme="light"):
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    yield set_to
    set_to(**DESKTOP)


BROKEN = """
(() => {
  const broken = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.parentElement.checkVisibility() || node.parentElement.closest('script, noscript, option')) continue;
    for (const { 0: word, index } of node.textContent.matchAll(/[\\p{L}\\p{N}]{2,24}/gu)) {
      const range = document.createRange();
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      if (new Set([...range.getClientRects()].map(({ top }) => Math.round(top / 4))).size > 1) broken.push(word);
    }
  }
  return broken;
})()
"""
"""Finds words that are broken across two lines."""


@pytest.mark.parametrize("view", VIEWS)
def test_on_a_phone_no_word_is_broken_and_nothing_is_too_wide(page, report, as_on, view):
    as_on(**PHONE)
    show(page, report, f"view={view}")
    page.wait("document.querySelector('.card, tbody tr, .token') !== null")
    assert page.run(BROKEN) == []
    assert page.run("document.documentElement.scrollWidth") <= PHONE["width"]


def test_on_a_phone_tabs_are_one_row_and_filters_fold(page, report, as_on):
    as_on(**PHONE)
    show(page, report, "view=run")
    tops = page.run("[...document.querySelectorAll('nav a')].map((link) => link.getBoundingClientRect().top)")
    assert len(set(tops)) == 1
    left, right = page.run(
        "(({left, right}) => [left, right])(document.querySelector('[aria-current=page]').getBoundingClientRect())"
    )
    assert left >= 0
    assert right <= PHONE["width"]
    page.run("location.hash = 'view=rollouts&s0=3&finish=stop'")
    page.wait("document.querySelector('.token') !== null")
    folded = page.run("(({open, innerText}) => [open, innerText])(document.querySelector('.more-fields'))")
    assert folded == [False, "Filters, 2 used"]
    assert "arrow" not in page.run("document.body.innerText").lower()
    page.run("document.querySelectorAll('[role=option]')[2].click()")
    page.wait("Math.abs(document.querySelector('.panes').getBoundingClientRect().top) < 100")
    as_on(**DESKTOP)
    show(page, report, "view=rollouts")
    assert page.run("document.querySelector('.more-fields').open") is True


@pytest.fixture(scope="module")
def axe():
    """The script of axe-core, from a wheel whose own library would start another browser."""
    found = find_spec("axe_playwright_python")
    assert found is not None, "no axe-core; run: pip install --no-deps axe-playwright-python"
    (folder,) = found.submodule_search_locations or ()
    return Path(folder, "axe.min.js").read_text("utf-8")


VIOLATIONS = """
axe.run(document, {resultTypes: ['violations']}).then(({ violations }) =>
  violations.flatMap(({ id, nodes }) => nodes.map(({ html, any, all, none }) =>
    [id, html.slice(0, 200), [...any, ...all, ...none].map(({ message }) => message).join('; ')])))
"""


@pytest.mark.parametrize("view", [*VIEWS, "rollouts&row=5&with=6"])
@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")])
def test_axe_finds_nothing(page, report, as_on, axe, view, size, scheme):
    as_on(**size, scheme=scheme)
    show(page, report, f"view={view}")
    page.wait("document.querySelector('.card, tbody tr, .token') !== null")
    page.run(f"{axe}; true")
    assert page.run(VIOLATIONS) == []
