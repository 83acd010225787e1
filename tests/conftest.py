"""Shared fixtures of tests of reports in a browser."""

from collections.abc import Iterator

import pytest
from chromium import Page, find_chromium
from report_pages import watched


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page of a headless Chromium, closed after each test file, because other tests count processes."""
    if find_chromium() is None:
        pytest.skip("no Chromium, and `nox -s tests` could not install it: apt-get install chromium")
    page = Page(tmp_path_factory.mktemp("browser") / "profile")
    yield page
    page.close()


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """The page; fails if it had errors, made requests, or executed any of the run's texts."""
    yield from watched(browser)
