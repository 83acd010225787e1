"""The documentation site, built once and opened from disk in a desktop and a phone browser."""

import html
import json
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from chromium import Page, find_chromium
from tooling import models_page
from tooling.docs_site.notebooks import notebook_page
from tooling.settings_page import PAGE
from tooling.settings_page import page as settings_page

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".nox/docs/bin/python"
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
OPENED = (
    "index",
    "README",
    "docs/settings",
    "docs/recipes",
    "docs/architecture",
    "docs/performance",
    "api/rl_core.queue",
)
BUILD_S = 600.0
VIOLATIONS = """
axe.run(document, {resultTypes: ['violations']}).then(({ violations }) => violations
  .filter(({ impact }) => ['serious', 'critical'].includes(impact))
  .flatMap(({ id, nodes }) => nodes.map(({ html }) => [id, html.slice(0, 200)])))
"""
needs_site = pytest.mark.skipif(not PYTHON.exists(), reason="run `nox -s docs` once, which makes .nox/docs")
needs_browser = pytest.mark.skipif(find_chromium() is None, reason="no Chromium: apt-get install chromium")


def test_the_settings_page_is_that_of_the_code() -> None:
    is_new = PAGE.read_text() == settings_page() + "\n"
    assert is_new, "docs/settings.md is out of date; run `nox -s docs -- --settings`"


def test_the_models_page_is_that_of_the_recorded_results() -> None:
    is_new = models_page.PAGE.read_text() == models_page.page()
    assert is_new, "docs/models.md is out of date; run `nox -s docs -- --models`"


def test_a_notebook_becomes_a_page_with_its_outputs() -> None:
    shown = [{"text": ["1\n", "2\n"]}, {"data": {"image/png": "iVBORw0KGgo=\n", "text/plain": ["<Figure>"]}}]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "words"]},
        {"cell_type": "code", "source": ["print(1)\n", "draw()"], "outputs": shown},
    ]
    assert notebook_page(json.dumps({"cells": cells})) == (
        "# Title\nwords\n\n```python\nprint(1)\ndraw()\n```\n\n```text\n1\n2\n```\n\n"
        "![Output of the cell above](data:image/png;base64,iVBORw0KGgo=)\n"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [str(PYTHON), "-m", "tooling.docs_site.build", "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def page(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    opened = Page(tmp_path_factory.mktemp("browser") / "profile")
    yield opened
    opened.close()


def show(page: Page, site: Path, name: str, *, width: int = 1280, height: int = 900) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
    page.errors.clear()
    page.requests.clear()
    page.open(f"{site.as_uri()}/{name}")
    page.wait(f"location.href.endsWith({name!r}) && document.readyState === 'complete'")


@needs_site
@needs_browser
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", OPENED)
def test_a_page_opens_from_disk(page: Page, site: Path, name: str, size: dict[str, int]) -> None:
    show(page, site, f"{name}.html", **size)
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert page.run("document.documentElement.scrollWidth") <= size["width"]
    assert page.run("document.querySelector('h1').innerText.length") > 0


@needs_site
@needs_browser
def test_search_works_from_disk(page: Page, site: Path) -> None:
    show(page, site, "index.html")
    page.run("document.querySelector('.search-button-field').click()")
    page.wait("document.activeElement.type === 'search'")
    page.type("staleness")
    page.run("document.activeElement.form.requestSubmit()")
    page.wait("document.querySelectorAll('#search-results li a').length > 10")
    found = page.run("[...document.querySelectorAll('#search-results li a')].map((link) => link.href)")
    assert any("/docs/guides/transfer-queue.html#staleness" in link for link in found)
    assert page.errors == []


@needs_site
@needs_browser
def test_the_site_turns_light_and_dark(page: Page, site: Path) -> None:
    show(page, site, "index.html")
    background = "getComputedStyle(document.body).backgroundColor"
    for mode, color in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 30)")):
        page.run(f"document.querySelector('.theme-change-button[data-mode={mode}]').click()")
        page.wait(f"{background} === '{color}'")
    page.run("localStorage.clear()")


@needs_site
@needs_browser
@pytest.mark.parametrize("name", ["index", "docs/recipes", "api/rl_core.queue"])
@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_axe_finds_nothing_serious(page: Page, site: Path, name: str, size: dict[str, int], scheme: str) -> None:
    found = find_spec("axe_playwright_python")
    assert found is not None, "no axe-core; run: pip install --no-deps axe-playwright-python"
    (folder,) = found.submodule_search_locations or ()
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    show(page, site, f"{name}.html", **size)
    page.run(f"{Path(folder, 'axe.min.js').read_text('utf-8')}; true")
    assert page.run(VIOLATIONS) == []


@needs_site
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("docs/architecture", "../api/rl_core.html#rl_core.TransferQueue.issue"),
        ("docs/architecture", "../source/packages/rl-core/src/rl_core/queue/client.py.html"),
        ("docs/architecture", "settings.html#optimizer"),
        ("docs/guides/health", "../metrics.html#policy"),
        ("docs/reference/rl-core", "../../api/rl_core.queue.html#module-rl_core.queue"),
        ("docs/recipes", "settings.html#reward"),
    ],
)
def test_names_settings_metrics_and_files_are_links(site: Path, name: str, target: str) -> None:
    assert f'href="{target}"' in (site / f"{name}.html").read_text()


ANSWERS = (
    ("How do I start?", ("README.html",), "nox -s train"),
    ("Where is verl's rollout.n?", ("reference.html", "docs/settings.html"), "rollout.group_size"),
    ("Is there an FSDP backend?", ("guides.html", "docs/guides/from-verl.html"), "is FSDP, for models of transformers"),
    ("What is clip-higher here?", ("guides.html", "docs/guides/from-verl.html"), "algorithm.clip_high"),
    ("How do I use my own reward?", ("docs/recipes.html",), "--reward.function="),
    ("How do I resume a run after kill -9?", ("docs/recipes.html",), "--resume"),
    ("How do I train a LoRA adapter?", ("guides.html", "docs/guides/lora.html"), "lora.rank"),
    ("Is there a fully asynchronous trainer?", ("guides.html", "docs/guides/async.html"), "schedule.max_staleness"),
    ("How do I use several GPUs?", ("docs/recipes.html",), "--parallel.ranks="),
    ("What does actor/ppo_kl mean?", ("reference.html", "docs/metrics.html"), "actor/ppo_kl"),
    ("What does put of the queue take?", ("reference.html", "api/rl_core.html"), 'id="rl_core.TransferQueue.put"'),
    ("How does it compare with verl?", ("project.html", "docs/comparison.html"), "verl"),
    ("How do I connect an existing agent?", ("guides.html", "docs/guides/gateway.html"), "OPENAI_BASE_URL"),
    ("What changed since the last release?", ("project.html", "packages/rl-core/CHANGELOG.html"), "rl-core"),
)
"""Questions of a reader who knows verl, the pages to click through from the first one, and a part of the answer."""


@needs_site
@pytest.mark.parametrize(("clicked", "answer"), [case[1:] for case in ANSWERS], ids=[case[0] for case in ANSWERS])
def test_an_answer_is_two_clicks_away(site: Path, clicked: tuple[str, ...], answer: str) -> None:
    page = site / "index.html"
    for target in clicked:
        links = {(page.parent / link).resolve() for link in re.findall(r'href="([^"#:]+)', page.read_text())}
        page = site / target
        assert page in links
    assert answer in html.unescape(re.sub("</?span[^>]*>", "", page.read_text())) or answer in page.read_text()


@needs_site
def test_the_source_of_a_public_name_is_a_click_away(site: Path) -> None:
    page = (site / "api/rl_core.html").read_text()
    file = "source/packages/rl-core/src/rl_core/queue/client.py"
    line = re.search(rf'href="\.\./{file}\.html#(L-\d+)"', page[page.index('id="rl_core.TransferQueue"') :])
    assert line is not None
    (shown,) = re.findall(rf'<span id="{line[1]}">(.*?)\n', (site / f"{file}.html").read_text())
    assert re.sub("<.*?>", "", shown) == "class TransferQueue(ABC):"


@needs_site
def test_what_is_broken_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "names.json").write_text('{"public": {}, "sources": {}}')
    (source / "index.md").write_text(
        "# A page\n\n[no page](nowhere.md) [none](#nowhere)\n`rl_core.queue.nowhere` {py:class}`rl_core.Nowhere`\n"
    )
    words = [
        "-c",
        str(ROOT / "tooling/docs_site"),
        "--fail-on-warning",
        "-b",
        "html",
        str(source),
        str(tmp_path / "made"),
    ]
    command = [str(PYTHON), "-m", "sphinx", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 1
    for said in ("'nowhere.md'", "'nowhere'", "`rl_core.queue.nowhere` does not exist", "not found: rl_core.Nowhere"):
        assert said in done.stderr, done.stderr
