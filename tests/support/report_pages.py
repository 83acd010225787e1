"""What tests of reports in a browser share."""

import re
from collections.abc import Iterator
from pathlib import Path

from chromium import Page

from rl_metrics.rollout_log import RolloutRow
from rl_metrics.run_record import open_run

READY = "document.documentElement.dataset.ready"


def watched(page: Page) -> Iterator[Page]:
    """A page that must have come to no error, asked nobody, and run nothing of the run's texts."""
    page.requests.clear()
    page.errors.clear()
    yield page
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "about:", "http://127.0.0.1:"))] == []
    assert page.run("window.hacked") is None


def show(page: Page, file: Path, hash_: str = "") -> None:
    """Open a report from disk, at a view."""
    page.open("about:blank")
    page.open(f"{file.as_uri()}#{hash_}")
    page.wait(READY)


def rows_of(folder: Path) -> list[RolloutRow]:
    """The trajectories of a run, in the order of the report."""
    return list(open_run(folder).rollouts())


def found(page: Page) -> int:
    """How many trajectories are listed, once no search is under way."""
    text = page.wait("document.querySelector('progress').hidden && document.getElementById('found').textContent")
    count = re.match(r"[\d,]+", text)
    assert count is not None, text
    return int(count[0].replace(",", ""))
