"""The report in a browser while its run continues or hangs."""

import json
import os

from invented_runs import InventedRun
from report_pages import READY, show

from rl_core.cluster import RoleReport
from rl_metrics.hang import HangReport, write_hang_report
from rl_metrics.health.finding import Evidence, Finding, Verdict
from rl_metrics.report import write_report
from rl_metrics.report.server import ReportServer
from rl_metrics.run_files.json_lines import JsonLinesWriter
from rl_metrics.run_files.run_record import open_run


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


def test_what_a_reader_does_outlives_a_renewal(page, tmp_path):
    InventedRun(steps=20, skill=0.0, is_finished=False).write(tmp_path / "run")
    server = ReportServer([tmp_path / "run"])
    writer = JsonLinesWriter(tmp_path / "run" / "metrics.jsonl")

    def renew(step):
        writer.append({"step": step, "time": 1.0, "critic/score/mean": 0.5})
        page.wait(f"document.getElementById('verdicts').textContent.includes('step {step};')")

    try:
        page.open("about:blank")
        page.open(f"{server.url}#view=rollouts&row=30&q=carry")
        page.wait(READY)
        page.wait("document.querySelectorAll('.token').length && document.querySelector('progress').hidden")
        page.point(".token:nth-child(2)", click=True)
        page.run("document.querySelector('.list').scrollTop = 600; document.querySelector('input[name=s0]').focus()")
        renew(21)
        page.wait("document.querySelector('progress').hidden")
        assert page.run("document.querySelector('.list').scrollTop") == 600
        assert page.run("document.activeElement.name") == "s0"
        assert page.run("document.querySelector('.token.current').dataset.place") == "1"
        page.run("location.hash = 'view=outcome'")
        page.wait("document.querySelectorAll('details[open]').length")
        page.run("document.querySelectorAll('details').forEach((one) => { one.open = false; })")
        page.run("scrollTo(0, 50)")
        renew(22)
        assert page.run("[scrollY, document.querySelectorAll('details[open]').length]") == [50, 0]
        page.open("about:blank")
    finally:
        writer.close()
        server.close()


OPEN = "[...document.querySelectorAll('.finding')].map((one) => [one.dataset.key, one.open])"


def test_what_is_open_and_what_has_the_focus_outlives_a_renewal(page, tmp_path):
    InventedRun(steps=20, is_finished=False).write(tmp_path / "run")
    steps = iter(range(21, 100))

    def judge(step):
        evidence = (Evidence(metric="actor/entropy", text="0.5"), Evidence(metric="critic/score/mean", text="0.1"))
        findings = tuple(
            Finding(rule=rule, side="task", severity="warning", what=f"{rule} is {step}", since_step=1, causes=("x",),
                    advice=("y",), evidence=evidence) for rule in ("first", "second", "third")
        )  # fmt: skip
        verdict = Verdict(status="warning", step=step, checks=(), findings=findings)
        (tmp_path / "run" / "health.json").write_text(json.dumps(verdict.to_json()))

    def renew():
        judge(step := next(steps))
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": 1.0, "critic/score/mean": 0.5}) + "\n")
        page.wait(f"document.getElementById('verdicts').textContent.includes('step {step};')")

    def keeps_the_focus(selector, told="textContent"):
        """Check that a renewal moves the focus to the new element with the same text."""
        page.run(f"(({selector}).focus(), document.activeElement.isBefore = true)")
        before = page.run(f"[document.activeElement.localName, document.activeElement.{told}]")
        assert before[0] != "body", selector
        renew()
        page.wait("document.activeElement !== document.body && document.activeElement.isBefore !== true")
        assert page.run(f"[document.activeElement.localName, document.activeElement.{told}]") == before

    judge(20)
    server = ReportServer([tmp_path / "run"])
    try:
        page.open("about:blank")
        page.open(server.url)
        page.wait(READY)
        page.wait("document.querySelectorAll('.finding').length > 1")
        page.run("document.querySelectorAll('.finding').forEach((one) => { one.open = !one.open; })")
        before = page.run(OPEN)
        assert {is_open for _, is_open in before} == {True, False}
        renew()
        after = dict(page.run(OPEN))
        assert [[key, after[key]] for key, _ in before] == before
        keeps_the_focus("document.querySelectorAll('.finding summary')[1]", "dataset.key")
        for selector in (
            "document.querySelectorAll('nav a')[2]",
            "document.querySelectorAll('.finding[open] a')[1]",
        ):
            keeps_the_focus(selector)
        page.run("location.hash = 'view=validation'")
        page.wait("document.querySelectorAll('tbody a').length > 3")
        keeps_the_focus("document.querySelectorAll('tbody a')[2]", "hash")
        keeps_the_focus("document.querySelector('select[aria-label=Order]')", "ariaLabel")
        keeps_the_focus("document.querySelector('form button')")
        page.open("about:blank")
    finally:
        server.close()


def test_a_run_that_hangs(page, tmp_path):
    InventedRun(steps=5, is_finished=False).write(tmp_path / "run")
    stack = 'Thread 0x1 (most recent call first):\n  File "/x/link.py", line 44, in receive\n'
    rollouter = RoleReport(name="rollouter", doing="12 responses in 1 engine", stack=stack)
    roles = (rollouter, RoleReport(name="engine 1", is_answering=False, since_s=305.0))
    causes = ("engine 1 is stuck",)
    hang = HangReport(at="2027-01-01", run="run", no_progress_s=312.0, roles=roles, causes=causes)
    file = tmp_path / "run" / "hang.json"
    write_hang_report(file, hang)
    os.utime(file, (2e9, 2e9))  # newer than the last step
    write_report([open_run(tmp_path / "run")], tmp_path / "a.html")
    show(page, tmp_path / "a.html")
    top = page.run("document.getElementById('verdicts').innerText")
    assert "It hangs: no progress for 312 s; engine 1 is stuck." in top
    shown = page.run("document.querySelector('details.hang[open]').innerText")
    for text in ("does not answer for 5.1 min", "12 responses in 1 engine", "receive (link.py:44)"):
        assert text in shown
    os.utime(file, (1e9, 1e9))  # older than the last step: the run has continued
    write_report([open_run(tmp_path / "run")], tmp_path / "a.html")
    show(page, tmp_path / "a.html")
    assert "hangs" not in page.run("document.getElementById('verdicts').innerText")
    assert page.run("document.querySelector('details.hang').open") is False
