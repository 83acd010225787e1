import base64
import re
from hashlib import sha256
from importlib.resources import files

import pytest
from read_report import scripts_of

from rl_metrics.report.page import SCRIPTS, STYLES, page_head, page_tail, run_names

ASSETS = files("rl_metrics.report") / "assets"
OWN = sorted(name for name in (*SCRIPTS, *STYLES) if not name.startswith("uPlot"))


def page(title="a", **more):
    return (page_head(title, **more) + page_tail({"runs": ["b1"]})).decode()


def test_the_policy_allows_these_scripts_and_styles_alone():
    text = page()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    scripts = [script for attributes, script in scripts_of(text) if "type" not in attributes]
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.S)
    digest = lambda of: f"'sha256-{base64.b64encode(sha256(of.encode()).digest()).decode()}'"
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [digest(script) for script in scripts]
    assert rules["style-src"] == digest(style)
    assert rules["require-trusted-types-for"] == "'script'"
    assert "connect-src" not in rules
    assert "unsafe" not in policy


def test_only_the_served_page_may_ask_its_server():
    assert "connect-src 'self';" in page_head("a", is_live=True).decode()
    assert "manifest" not in [attributes.get("id") for attributes, _ in scripts_of(page_tail(None).decode())]


def test_the_title_is_text():
    text = page("</title><script>alert(1)</script>\0\ud800")
    assert "<script>alert" not in text
    assert "&lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_the_manifest_ends_no_script():
    assert "</script><b>" not in page_tail({"runs": ["</script><b>"]}).decode()


def test_names_of_runs_differ():
    assert run_names(["a", "b", "a"]) == ["a (1)", "b", "a (2)"]
    assert run_names(["run", "run", "run (1)"]) == ["run (2)", "run (3)", "run (1)"]
    assert run_names(["a", "a", "a (1)", "a (1)"]) == ["a (2)", "a (3)", "a (1) (1)", "a (1) (2)"]


@pytest.mark.parametrize("name", OWN)
def test_an_asset_is_small_and_puts_no_text_into_the_page_as_html(name):
    text = (ASSETS / name).read_text("utf-8")
    assert len(text.splitlines()) < 400
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "srcdoc",
        "http:",
        "https:",
        "</script",
    ):
        assert way not in text, way
    if name.endswith(".js"):
        assert text.startswith('"use strict";\n')


def test_every_asset_is_used_and_the_library_has_its_licence():
    there = {file.name for file in ASSETS.iterdir()}
    assert there == {*SCRIPTS, *STYLES, "page.html", "uPlot.iife.min.js", "uPlot.LICENSE"}
    assert "(v1.6.32)" in (ASSETS / "uPlot.iife.min.js").read_text("utf-8")[:80]
    assert "MIT License" in (ASSETS / "uPlot.LICENSE").read_text("utf-8")
