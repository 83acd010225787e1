"""Verdicts on recorded runs, with their own settings."""

import json

import pytest

from rl_core.errors import SettingsError
from rl_metrics.health.judging import judge_run
from rl_metrics.run_files.run_record import open_run


def recorded(folder, settings=""):
    rows = [{"step": step, "time": 1.0, "actor/ppo_kl": 0.04} for step in range(1, 11)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "settings.toml").write_text(settings)
    return open_run(folder)


def found(verdict):
    return [finding.rule for finding in verdict.findings]


def test_a_run_without_thresholds_is_judged_by_the_defaults(tmp_path):
    assert found(judge_run(recorded(tmp_path))) == ["kl_high"]


@pytest.mark.parametrize(
    "settings",
    ['[health.thresholds]\n"kl_high.max" = 0.05\n', '[health]\noff = ["kl_high"]\n'],
)
def test_the_settings_of_a_run_count(tmp_path, settings):
    assert found(judge_run(recorded(tmp_path, settings))) == []


def test_what_the_caller_asks_for_counts_more(tmp_path):
    run = recorded(tmp_path, '[health.thresholds]\n"kl_high.max" = 0.05\n')
    assert found(judge_run(run, thresholds={"kl_high.max": 0.01})) == ["kl_high"]
    assert found(judge_run(run, thresholds={"kl_high.max": 0.01}, off=["kl_high"])) == []
    with pytest.raises(SettingsError, match="nearest"):
        judge_run(run, thresholds={"kl_hihg.max": 0.01})


@pytest.mark.parametrize(
    "settings",
    [
        "health = 3\n",
        "[health]\nthresholds = 3\noff = 4\n",
        '[health]\noff = ["no_such_rule", 3]\n[health.thresholds]\n"no_such.max" = 1.0\n"kl_high.max" = "x"\n',
        '[health.thresholds]\n"kl_high.max" = nan\n',
    ],
)
def test_settings_that_say_nothing_are_left_out(tmp_path, settings):
    assert found(judge_run(recorded(tmp_path, settings))) == ["kl_high"]
