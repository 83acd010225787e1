"""Properties of the asynchronous settings."""

from pathlib import Path

import pytest

from rl_async_trainer.settings import AsyncSettings, schedule_problems
from rl_core.errors import SettingsError
from rl_trainer_parts.rollouts.skip_cache import with_absolute_cache
from rl_trainer_parts.settings.algorithm_choice import option_fields
from rl_trainer_parts.settings.fields import setting_fields
from rl_trainer_parts.settings.other_names import table
from rl_trainer_parts.settings.sources import build_settings

PLAIN = {"policy": {"path": "policy"}, "prompts": {"train": "train.jsonl"}, "reward": {"function": "exact_match"}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, True),
        ({"algorithm": {"old_logprobs": "recompute"}}, False),
        ({"schedule": {"max_staleness": 0}}, False),
        ({"schedule": {"max_staleness": 0, "sync_every": 2}}, True),
        ({"schedule": {"max_staleness": 0}, "trainer": {"minibatches": 2}}, True),
    ],
)
def test_where_an_update_moves_away_from_the_policy_that_sampled(tmp_path: Path, sections: dict, expected: bool):
    given = {
        "run": {"directory": tmp_path},
        "policy": {"path": "policy"},
        "prompts": {"train": "train.jsonl"},
        "reward": {"function": "exact_match"},
    }
    settings = build_settings(given | sections, kind=AsyncSettings)
    assert settings.zero_metrics == (() if expected else ("actor/ppo_kl", "rollout_corr/kl"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"trainer": {"target": {"value": "high"}}},
            r"trainer\.target\.value: must be number \| none; found 'high'\. Value to reach; .*\.",
        ),
        (
            {"trainer": {"target": {"valu": 1}}},
            r"unknown setting 'trainer.target.valu'. Did you mean .*target.value'.*",
        ),
        (
            {"health": {"thresholds": {"a.b": "high"}}},
            r"health\.thresholds: must be \{name = number\}; found text in item a\.b\.",
        ),
        (
            {"correction": {"reject": {"token_k1": "low"}}},
            r"correction\.reject: must be \{name = number \| \[number, number\]\}; found text in item token_k1\.",
        ),
    ],
)
def test_an_item_of_a_table_says_what_it_must_be(sections: dict, message: str):
    with pytest.raises(SettingsError, match=rf"^{message}$"):
        build_settings(PLAIN | sections, kind=AsyncSettings)


def test_every_counterpart_of_a_setting_of_verl_is_a_setting_of_this_trainer():
    known = {
        name for setting in setting_fields(AsyncSettings).values() for name in (setting.name, *setting.entry_fields())
    }
    named = {one for row in table() for one in row.settings if not one.startswith("--")}
    assert named <= known | option_fields().keys()


def test_a_replayed_validation_is_refused_by_name(tmp_path: Path):
    for validation, expected in ((False, []), (True, ["rollout_cache.validation"])):
        skip = {"enabled": True, "validation": validation}
        settings = build_settings({**PLAIN, "run": {"directory": tmp_path}, "rollout_cache": skip}, kind=AsyncSettings)
        assert [problem.split()[0] for problem in schedule_problems(settings)] == expected


@pytest.mark.parametrize(
    ("directory", "expected"),
    [("cache", "{here}/cache"), ("/shared/cache", "/shared/cache"), ("s3://bucket/cache", "s3://bucket/cache")],
)
def test_roles_use_the_cache_of_the_directory_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str, expected: str
):
    monkeypatch.chdir(tmp_path)
    skip = {"enabled": True, "directory": directory}
    settings = build_settings({**PLAIN, "run": {"directory": tmp_path}, "rollout_cache": skip}, kind=AsyncSettings)
    assert with_absolute_cache(settings).rollout_cache.directory == expected.format(here=tmp_path)
