"""`rl-metrics check` and `rl-metrics rules`, on files."""

import json
from pathlib import Path

import pytest

from rl_metrics.cli import main
from rl_metrics.health import GUIDE

GUIDE_PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "health.md"
BEGIN, END = "<!-- rules: begin -->\n", "<!-- rules: end -->\n"


@pytest.fixture
def run(tmp_path):
    """Return a function that writes a run of 20 steps with these values."""

    def write(**values):
        folder = tmp_path / "arithmetic"
        folder.mkdir(exist_ok=True)
        rows = [{"step": step, "time": step, **values} for step in range(1, 21)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write


def test_a_healthy_run(run, capsys):
    assert main(["check", str(run(**{"actor/ppo_kl": 0.01}))]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        f"arithmetic: ok at step 20 (1 of 1 checks had enough data; {len(GUIDE) - 1} do not apply, see --all)\n\nConv"
    )
    assert "ok        kl_high" in out
    assert "actor/ppo_kl is at 0.01 nats (0.005 to 0.02 is usual, above" in out


def test_a_finding_is_told_with_evidence_causes_and_advice(run, capsys):
    assert main(["check", str(run(**{"actor/ppo_kl": 0.08}))]) == 1
    out = capsys.readouterr().out
    assert "CRITICAL kl_high, since step 1: The policy moves too far within a step." in out
    assert "  evidence: actor/ppo_kl is at 0.08 nats (0.005 to 0.02 is usual, above 0.03 is too high)" in out
    assert "  cause 1:  learning rate too high" in out
    assert "  cause 1:  learning rate too high\n     try:    divide the learning rate by three\n" in out


def test_what_does_not_apply_is_shown_with_all(run, capsys):
    folder = run(**{"actor/ppo_kl": 0.0})
    assert main(["check", str(folder)]) == 2
    assert "kl_high" not in capsys.readouterr().out
    assert main(["check", str(folder), "--all"]) == 2
    shown = capsys.readouterr().out
    assert "?         kl_high" in shown
    assert "with one update a batch every ratio is 1" in shown
    assert all(rule.name in shown for rule in GUIDE)


def test_stability_is_shown_as_a_table(run, capsys):
    folder = run(**{"actor/pg_loss": 0.02, "actor/grad_norm": 0.9, "actor/entropy": 0.3})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["actor/entropy"] = 0.7
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["check", str(folder)]) == 1
    shown = capsys.readouterr().out.partition("Stability: mean over all steps")[2].splitlines()
    table = shown[1:5]
    assert shown[5] == "  outside actor/entropy: no check warns about it yet"
    assert [line.split() for line in table] == [
        ["metric", "mean", "healthy", "newest", "healthy", "source", "of", "the", "range"],
        ["ok", "actor/pg_loss", "0.02", "-0.05", "to", "0.05", "0.02", "-0.05", "to", "0.05", "evaluation", "guide"],
        [
            "outside",
            "actor/entropy",
            "0.32",
            "-",
            "0.7",
            "0.2",
            "to",
            "0.5",
            "evaluation",
            "guide,",
            "late",
            "in",
            "a",
            "run",
        ],
        ["outside", "actor/grad_norm", "0.9", "at", "most", "0.8", "0.9", "at", "most", "1", "evaluation", "guide"],
    ]
    assert main(["check", str(folder), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["stability"]
    assert [(row["metric"], row["mark"]) for row in told][-1] == ("actor/grad_norm", "outside")
    assert told[1]["mean"] == pytest.approx(0.32)


def test_the_least_severity_that_fails(run):
    folder = run(**{"actor/grad_norm": 2.0})  # a warning
    assert main(["check", str(folder)]) == 1
    assert main(["check", str(folder), "--fail-on", "critical"]) == 0
    assert main(["check", str(folder), "--set", "grad_norm.max=2.5", "--set", "grad_norm.mean_max=2.5"]) == 0
    assert main(["check", str(folder), "--off", "grad_norm"]) == 0


def test_the_verdict_is_written_as_json(run, capsys):
    assert main(["check", str(run(**{"actor/ppo_kl": 0.08})), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["status"], verdict["step"]) == ("critical", 20)
    assert [finding["rule"] for finding in verdict["findings"]] == ["kl_high"]


def test_the_file_alone_is_judged_without_its_torn_last_line(run):
    file = run(**{"actor/ppo_kl": 0.08}) / "metrics.jsonl"
    with file.open("a") as lines:
        lines.write('{"step": 21, "actor/pp')
    assert main(["check", str(file)]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "kl_hig.max=1"], "the nearest is 'kl_high.max'"),
        (["--set", "kl_high.max"], "--set must be RULE.THRESHOLD=VALUE"),
        (["--set", "kl_high.max=nan"], "--set must be RULE.THRESHOLD=VALUE"),
        (["--off", "memry"], "the nearest is 'memory'"),
    ],
)
def test_what_cannot_be_is_refused(run, capsys, arguments, said):
    assert main(["check", str(run()), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_no_run_and_a_run_without_a_step(tmp_path, capsys):
    assert main(["check", str(tmp_path / "none")]) == 2
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["check", str(tmp_path)]) == 2
    assert "no step" in capsys.readouterr().err


def test_hostile_names_do_not_reach_the_terminal(run, capsys):
    assert main(["check", str(run(**{"nonfinite/\x1b[31mred": 1.0}))]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[31mred" in out


def test_the_rules_are_listed(capsys):
    assert main(["rules"]) == 0
    out = capsys.readouterr().out
    assert "kl_high.max = 0.03: running median, nats; k1 may be negative (evaluation guide, which" in out
    assert main(["rules", "--json"]) == 0
    assert [rule["name"] for rule in json.loads(capsys.readouterr().out)] == [rule.name for rule in GUIDE]


@pytest.mark.skipif(not GUIDE_PAGE.parent.is_dir(), reason="docs/ is in the checkout only")
def test_the_guide_page_is_up_to_date(capsys):
    assert main(["rules", "--markdown"]) == 0
    table = capsys.readouterr().out
    page = GUIDE_PAGE.read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == table.strip(), (
        "docs/guides/health.md is out of date; put `rl-metrics rules --markdown` between its two marks"
    )


def test_what_cannot_be_judged_is_no_success(run, capsys):
    assert main(["check", str(run(**{"foreign/name": 1.0}))]) == 2
    assert capsys.readouterr().out.startswith(
        f"arithmetic: unknown at step 20 (0 of 0 checks had enough data; {len(GUIDE)} do not apply, see --all)\n"
    )


def test_tokens_that_train_on_other_experts_than_were_sampled_are_found(run, capsys):
    assert main(["check", str(run(**{"router/unknown_share": 0.25}))]) == 1
    assert "the engine's experts are unknown for 25 % of the tokens" in capsys.readouterr().out
