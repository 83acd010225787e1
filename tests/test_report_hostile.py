"""A report shows every text of a run, even HTML and scripts, as text and never executes it."""

import contextlib
import json

import pytest
from report_pages import READY

from rl_core.cluster import RoleReport
from rl_metrics.hang import HangReport, write_hang_report
from rl_metrics.health.finding import Check, Evidence, Finding, Verdict
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.report import write_report
from rl_metrics.report.server import ReportServer
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.rollout_log import RolloutLog, RolloutRow
from rl_metrics.run_files.run_record import open_run
from rl_metrics.trackers.jsonl import JsonlTracker

FORMS = (
    "<img src=//evil.invalid onerror=hacked=1>{}",
    "</script><script>hacked=1</script>{}",
    '"><svg onload=hacked=1>{}',
    "javascript:hacked=1//{}",
    "<a href=javascript:hacked=1>{}</a>",
    "<style>*{{display:none}}</style>{}",
)

SHOWN = {
    "outcome": (
        *("model", "training data", "reward function", "failure reason"),
        *("check title", "check reading", "finding", "evidence", "evidence metric", "cause", "advice"),
        *("hang cause", "last progress", "hang at", "queue", "role", "state", "doing", "stack", "count"),
    ),
    "curves": ("metric",),
    "distributions": ("histogram",),
    "times": ("phase", "slowest uid"),
    "rollouts&row=0": (
        *("prompt", "response", "token", "truth", "uid", "problem", "source", "finish", "failure", "component"),
        *("timing",),
    ),
    "validation": (
        *("table", "input", "output", "expected", "sample source", "sample failure", "sample component"),
    ),
    "worst&group=source": ("source",),
    "worst&group=finish": ("finish",),
    "worst&group=failure": ("failure",),
    "worst&group=problem": ("prompt",),
    "worst&group=part": ("component",),
    "probes": ("probe prompt", "probe response", "probe token", "candidate"),
    "run": (
        *("event", "level", "event field", "event text", "setting", "setting value", "summary", "summary value"),
    ),
}  # fmt: skip
"""Views of the page, and the fields that carry hostile text in each."""

TEXTS = """
[document.body, ...document.body.querySelectorAll('[aria-label], [title], [placeholder]')].map((one) =>
  [one === document.body ? one.textContent : '', one.title, one.ariaLabel].join(' ')).join(' ')
"""


def plant(folder, form):
    """Write a run whose every text is the form around the text's name."""
    text = form.format
    folder.mkdir()
    tracker = JsonlTracker(folder / "metrics.jsonl")
    for step in (1, 2):
        tracker.log(step, {text("metric"): step, f"timing_s/{flat(text('phase'))}": 1.0, "timing_s/step": 1.0})
    histogram = Histogram()
    histogram.add([1.0, 2.0])
    tracker.log_histograms(1, {text("histogram"): histogram})
    tracker.log_generations(1, text("table"), [sample(text)])
    tracker.log_generations(1, "another table", [sample(str)])
    tracker.close()
    rollouts = RolloutLog(folder / "rollouts.jsonl")
    rollouts.write([trajectory(text), trajectory(str)])
    rollouts.close()
    events = [
        {"event": text("event"), "level": text("level"), text("event field"): [text("event text")]},
        {"event": "slowest_session", "step": 1, "prompt_uid": text("slowest uid"), "generate_s": 1.0},
        {"event": "run_failed", "error": text("failure reason")},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps({"time": 1.0, **event}) + "\n" for event in events))
    probe = {"step": 1, "time": 1.0, "policy_version": 1, "probe": text("probe"), "prompt": text("probe prompt"),
             "response": text("probe response"), "position": 0, "token": text("probe token"), "logprob": -0.5,
             "candidates": [[text("candidate"), -0.1]]}  # fmt: skip
    (folder / "probes.jsonl").write_text(json.dumps(probe) + "\n")
    settings = f"[{json.dumps(text('setting'))}]\n{json.dumps(text('setting'))} = {json.dumps(text('setting value'))}\n"
    settings += "".join(
        f"[{section}]\n{name} = {json.dumps(text(planted))}\n"
        for section, name, planted in (
            ("policy", "path", "model"),
            ("prompts", "train", "training data"),
            ("reward", "function", "reward function"),
        )
    )
    (folder / "settings.toml").write_text(settings)
    (folder / "summary.json").write_text(json.dumps({text("summary"): text("summary value")}))
    (folder / "health.json").write_text(json.dumps(verdict(text).to_json()))
    write_hang_report(folder / "hang.json", hang(text))


def flat(text):
    """Replace the slashes, which separate parts in the names of phases and folders."""
    return text.replace("/", "|")


def sample(text):
    return GenerationSample(
        prompt_uid=text("sample uid"), input=text("input"), output=text("output"), score=0.0, policy_version=(1, 1),
        ground_truth=text("expected"), source=text("sample source"), failure=text("sample failure"),
        components={text("sample component"): 1.0},
    )  # fmt: skip


def trajectory(text):
    return RolloutRow(
        step=1, time=1.0, prompt_uid=text("uid"), problem=text("problem"), source=text("source"), prompt=text("prompt"),
        response=text("response"), ground_truth=text("truth"), reward=0.0, components={text("component"): 0.0},
        extras={text("extra"): [text("said")]},
        timings={text("timing"): 1.0}, finish=text("finish"), failure=text("failure"), tokens=(text("token"),),
        mask=(True,), columns={"policy_logprobs": (-0.5,)},
    )  # fmt: skip


def verdict(text):
    evidence = (Evidence(metric=text("evidence metric"), text=text("evidence")),)
    finding = Finding(rule="r", side="task", severity="critical", what=text("finding"), since_step=1, evidence=evidence,
                      causes=(text("cause"),), advice=(text("advice"),))  # fmt: skip
    check = Check(rule="r", side="task", title=text("check title"), status="critical",
                  reading=text("check reading"))  # fmt: skip
    return Verdict(status="critical", step=2, checks=(check,), findings=(finding,))


def hang(text):
    stack = f'Thread 0x1 (most recent call first):\n  File "{text("stack")}", line 44, in receive\n'
    role = RoleReport(
        name=text("role"), state=text("state"), doing=text("doing"), stack=stack, counts={text("count"): 1.0}
    )
    return HangReport(at=text("hang at"), run="run", no_progress_s=99.0, last_progress=text("last progress"),
                      roles=(role,), queue={text("queue"): 1.0},
                      causes=(text("hang cause"),))  # fmt: skip


def look(page, url, form, name):
    """Check in each view that every planted text is shown as written, and that none had an effect."""
    for view, planted in SHOWN.items():
        page.open("about:blank")
        page.open(f"{url}#view={view}")
        page.wait(READY)
        if view.startswith("rollouts"):
            page.wait("document.querySelectorAll('.token').length")
            page.point(".token")
            assert form.format("token") in page.wait("!document.getElementById('tip').hidden && tip.textContent")
        if view == "validation":
            page.wait("document.querySelectorAll('tbody tr').length")
        shown = flat(page.run(TEXTS))
        assert [one for one in (*map(form.format, planted), name) if flat(one) not in shown] == [], view
        scripts = "document.querySelectorAll('script:not([type])').length"
        assert page.run(scripts) == 2, view  # the chart library's and the page's own
        assert page.run("document.querySelectorAll('img, svg, iframe, b, style').length") == 1, view  # the page's style
        assert page.run("[...document.links].filter(({ href }) => !href.includes('#view=')).length") == 0, view
        assert page.run("window.hacked") is None, view
    page.open("about:blank")


@pytest.mark.parametrize("form", FORMS)
def test_no_text_of_a_run_is_run(page, tmp_path, form):
    name = flat(form.format("run"))
    plant(tmp_path / name, form)
    write_report([open_run(tmp_path / name)], tmp_path / "a.html")
    look(page, (tmp_path / "a.html").as_uri(), form, name)
    assert {url.partition("#")[0] for url in page.requests} <= {(tmp_path / "a.html").as_uri(), "about:blank"}


def test_nor_where_it_is_served_beside_another(page, tmp_path):
    form = FORMS[0]
    name = flat(form.format("run"))
    plant(tmp_path / name, form)
    plant(tmp_path / "other", FORMS[1])
    with contextlib.closing(ReportServer([tmp_path / name, tmp_path / "other"])) as server:
        look(page, server.url, form, name)
        assert [url for url in page.requests if not url.startswith((server.url, "about:"))] == []
