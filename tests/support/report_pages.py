"""Shared parts of tests of reports in a browser."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from chromium import Page

from rl_metrics.report import write_report
from rl_metrics.run_files.rollout_log import RolloutLog, RolloutRow
from rl_metrics.run_files.run_record import open_run
from rl_metrics.trackers.jsonl import JsonlTracker

READY = "document.documentElement.dataset.ready"


def watched(page: Page) -> Iterator[Page]:
    """Yield a page; check that it had no errors, made no requests, and executed none of the run's texts."""
    page.requests.clear()
    page.errors.clear()
    yield page
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "about:", "data:", "http://127.0.0.1:"))] == []
    assert page.run("window.hacked") is None


def show(page: Page, file: Path, hash_: str = "") -> None:
    """Open a report from disk in a view."""
    page.open("about:blank")
    page.open(f"{file.as_uri()}#{hash_}")
    page.wait(READY)


def write_run(
    folder: Path, *, rows: Sequence[RolloutRow] = (), metrics: Sequence[Mapping[str, float]] = ({"loss": 0.5},)
) -> None:
    """Write a run with these trajectories and these metrics of its steps, from 1."""
    folder.mkdir()
    tracker = JsonlTracker(folder / "metrics.jsonl")
    for step, of_step in enumerate(metrics, 1):
        tracker.log(step, of_step)
    tracker.close()
    log = RolloutLog(folder / "rollouts.jsonl")
    log.write(rows)
    log.close()


def report_of(folder: Path, *more: Path) -> Path:
    """Write a report of runs beside the first one's folder."""
    file = folder.with_suffix(".html")
    write_report([open_run(one) for one in (folder, *more)], file)
    return file


def rows_of(folder: Path) -> list[RolloutRow]:
    """Return the trajectories of a run, in the report's order."""
    return list(open_run(folder).rollouts())


def found(page: Page) -> int:
    """Return the number of listed trajectories, after any search has finished."""
    text = page.wait("document.querySelector('progress').hidden && document.getElementById('found').textContent")
    count = re.match(r"[\d,]+", text)
    assert count is not None, text
    return int(count[0].replace(",", ""))
