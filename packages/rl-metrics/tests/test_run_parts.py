import json
import math

import numpy as np
import pytest

from rl_metrics.reductions.histogram import Histogram
from rl_metrics.report.run_parts import (
    flat_settings,
    notable_events,
    pack_distributions,
    pack_probes,
    read_verdict,
    slowest_sessions,
)
from rl_metrics.run_files.run_record import ProbeRow, open_run


def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "time": 10.0 * step, "a": 1.0} for step in (1, 2, 3)])
    return tmp_path


def test_the_runs_own_verdict_wins(folder):
    check = {"rule": "kl", "side": "convergence", "title": "KL", "status": "warning", "reading": "0.04",
             "applies": True, "excuse": ""}  # fmt: skip
    finding = {"rule": "kl", "side": "convergence", "severity": "warning", "what": "KL is high.", "since_step": 2,
               "evidence": [{"metric": "actor/ppo_kl", "text": "0.04", "value": 0.04}], "causes": ["x"],
               "advice": ["y"], "because": []}  # fmt: skip
    written = {"status": "warning", "step": 3, "checks": [check], "findings": [finding], "target": None}
    (folder / "health.json").write_text(json.dumps(written))
    assert read_verdict(open_run(folder)).to_json() == written


@pytest.mark.parametrize("step", [2, 4])
def test_a_verdict_of_another_step_is_made_anew(folder, step):
    """A verdict from before the newest step, or from a step that a resume undid."""
    check = {"rule": "kl", "side": "convergence", "title": "KL", "status": "critical", "reading": "9"}
    written = {"status": "critical", "step": step, "checks": [check], "findings": []}
    (folder / "health.json").write_text(json.dumps(written))
    verdict = read_verdict(open_run(folder))
    assert (verdict.step, verdict.status) == (3, "unknown")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"status": "great"}', b"\xff", b"[" * 100_000, b'{"step": 1e999}']
)
def test_a_verdict_that_cannot_be_read_is_made_anew(folder, content):
    (folder / "health.json").write_bytes(content)
    verdict = read_verdict(open_run(folder))
    assert verdict.step == 3
    assert verdict.checks


def test_quantiles_equal_those_by_hand(folder):
    histogram = Histogram()
    histogram.add(np.arange(101.0))
    rows = [{"step": 2, "time": 0.0, "histograms": {"distribution/reward": histogram.to_json(), "torn": {"count": 1}}}]
    write_lines(folder / "histograms.jsonl", rows)
    described, columns = pack_distributions(open_run(folder))
    assert (described[0]["name"], described[0]["quantiles"]) == (
        "distribution/reward",
        [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0],
    )
    assert "Reward of a trajectory" in described[0]["meaning"]
    assert columns["dx0"][1].tolist() == [2]
    found = [columns[f"d0q{number}"][1][0] for number in range(7)]
    assert found == pytest.approx([0, 5, 25, 50, 75, 95, 100], rel=0.03)


def test_slowest_sessions_know_their_step(folder):
    events = [
        {"time": 9.0, "event": "slowest_session", "prompt_uid": "a", "generate_s": 1.0, "reward_s": 0.5},
        {"time": 15.0, "event": "slowest_session", "prompt_uid": "b", "generate_s": 4.0},
        {"time": 31.0, "event": "slowest_session", "prompt_uid": "c"},
        {"time": 5.0, "event": "slowest_session", "step": 77, "generate_s": 2.0},
        {"time": 1.0, "event": "other"},
    ]
    write_lines(folder / "events.jsonl", events)
    found = slowest_sessions(open_run(folder))
    assert [(one.get("prompt_uid"), one["step"], one["total_s"]) for one in found] == [
        ("b", 2, 4.0),
        (None, 77, 2.0),
        ("a", 1, 1.5),
        ("c", None, 0.0),
    ]


def test_events_that_come_with_every_step_are_left_out(folder):
    events = [
        {"time": 1.0, "event": "run_started", "settings": "<b>x</b>"},
        {"time": 2.0, "event": "slowest_session"},
        {"time": None, "event": "slow_tracker", "level": "warning", "detail": {"a": ["\ud800"]}},
        {"time": 3.0, "event": "health_finding", "rule": "kl", "causes": ["in the checklist"], "advice": []},
    ]
    write_lines(folder / "events.jsonl", events)
    assert notable_events(open_run(folder)) == [
        {"time": 1.0, "event": "run_started", "level": "", "text": "settings: <b>x</b>"},
        {"time": None, "event": "slow_tracker", "level": "warning", "text": 'detail: {"a": ["\ud800"]}'},
        {"time": 3.0, "event": "health_finding", "level": "", "text": "rule: kl"},
    ]


def probe(step, token, candidates, position=0):
    return ProbeRow(step=step, time=0.0, policy_version=step, probe="p", prompt="1+1=", response="2", position=position,
                    token=token, logprob=-0.5, candidates=candidates)  # fmt: skip


def test_probes_are_packed_by_token_and_candidate():
    rows = [
        probe(1, "2", (("3", -0.1), ("2", -2.5))),
        probe(1, "x", (), position=1),
        probe(5, "2", (("2", -0.25), ("4", -3.0))),
    ]
    described, columns = pack_probes(rows)
    assert [(one["position"], one["candidates"]) for one in described] == [(0, ["2", "3", "4"]), (1, ["x"])]
    assert columns["px0"][1].tolist() == [1, 5]
    assert columns["p0c0"][1].tolist() == [-2.5, -0.25]
    assert columns["p0c1"][1][0] == -0.1
    assert math.isnan(columns["p0c1"][1][1])
    assert columns["p1c0"][1].tolist() == [-0.5]  # no candidates were written, but the token's own logprob is known


def test_settings_are_flat():
    settings = {"a": 1, "b": {"c": [1, 2], "d": {"e": "x"}}, "long": "y" * 600}
    assert flat_settings(settings)[:3] == [("a", "1"), ("b.c", "[1, 2]"), ("b.d.e", "x")]
    assert len(flat_settings(settings)[3][1]) == 500
