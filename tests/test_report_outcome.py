"""The first view of a report in a browser: the outcome on one screen, and folded parts."""

import json
import re
import shutil
from pathlib import Path

import pytest
from invented_runs import InventedRun
from report_pages import report_of, show, write_run

from rl_metrics.health import GUIDE

RECORDINGS = Path(__file__).parent / "recordings"
MAIN = "document.getElementById('main').innerText.replaceAll('\\u00a0', ' ')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("healthy_0", "learning_rate_too_high"):
        shutil.copytree(RECORDINGS / name, folder / name)
    return folder


def test_a_report_opens_on_the_outcome(page, folder):
    show(page, report_of(folder / "healthy_0"))
    assert page.run("[...document.querySelectorAll('nav a')].map((a) => a.textContent)").index("Outcome") == 0
    sentence = page.run("document.querySelector('.sentence').textContent")
    assert sentence.startswith(
        "Validation on arithmetic (reward) rose from 0.478 to 0.948, the test set's accuracy went from 0.502 to 0.958 "
        "(without an interval, it may be chance) and the training reward rose from"
    )
    text = page.run(MAIN)
    for said in (
        "examples/arithmetic/prepared/policy", "GRPO, loss ppo_clip", "64 prompts, 8 responses each",
        "0.478 → 0.948", "▲ +0.47 [+0.419, +0.516]", "step 0 [0.436, 0.524]", "step 60 [0.926, 0.966]",
        "Wall time", "Samples per second", "Where the time went", "Look at next",
        "Wilson's interval over the problems", "bootstrap over validation problems (1,000 draws)",
    ):  # fmt: skip
        assert said in text
    bottom = (
        "Math.max(...[...document.querySelectorAll('.outcomes > *')].map((one) => one.getBoundingClientRect().bottom))"
    )
    assert page.run(f"{bottom} <= innerHeight")


def test_checks_are_folded_behind_their_count(page, folder):
    show(page, report_of(folder / "learning_rate_too_high"))
    (fold,) = page.run("[...document.querySelectorAll('.checks')].map((one) => [one.open, one.innerText])")
    passing = page.run("document.querySelectorAll('.check .badge.ok').length")
    assert fold[0] is False
    found = re.search(r"(\d+) of (\d+) checks pass.*; (\d+) do not apply", fold[1])
    assert found is not None
    assert int(found[1]) == passing
    assert int(found[2]) + int(found[3]) == len(GUIDE)
    assert " critical" in fold[1]
    assert page.run("document.querySelectorAll('.finding').length") >= 3
    first = page.run("document.querySelector('.next li').textContent")
    assert "The reward has fallen far below its best. Try: " in first
    page.run("document.querySelector('.next a').click()")
    page.wait("document.querySelector('.card h3').textContent === 'critic/score/mean'")


def test_two_outcomes_and_what_differs(page, folder):
    show(page, report_of(folder / "healthy_0", folder / "learning_rate_too_high"))
    heads = page.run("[...document.querySelectorAll('.outcome h2')].map((one) => one.textContent)")
    assert heads == ["healthy_0", "learning_rate_too_high"]
    differing = page.run(
        "[...document.querySelectorAll('.scroll tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    assert "optimizer.learning_rate" in [row[0] for row in differing]
    assert "run.name" not in [row[0] for row in differing]


@pytest.mark.parametrize("metrics", [[], [{"loss": 0.5}], [{"loss": 0.5 / step} for step in range(1, 9)]])
def test_a_run_of_metrics_alone(page, tmp_path, metrics):
    write_run(tmp_path / "run", metrics=metrics)
    show(page, report_of(tmp_path / "run"))
    assert page.wait("document.querySelector('.sentence').textContent.length") > 10
    assert "The training is unknown" in page.run(MAIN)


def test_the_worst_of_the_newest_step_are_a_click_away(page, tmp_path):
    InventedRun(steps=8, skill=0.2).write(tmp_path / "run")
    with (tmp_path / "run" / "settings.toml").open("a") as file:
        file.write(f"[prompts]\ntrain = {json.dumps('train.jsonl')}\n")
    show(page, report_of(tmp_path / "run"))
    page.run("[...document.querySelectorAll('.next a')].find((a) => a.textContent.includes('of step 8')).click()")
    page.wait("document.getElementById('found')?.textContent.match(/^[1-9]/)")
    assert "s0=8&s1=8" in page.run("location.hash")
