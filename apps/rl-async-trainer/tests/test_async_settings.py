"""Properties of the asynchronous settings."""

from pathlib import Path

import pytest

from rl_async_trainer.settings import AsyncSettings
from rl_trainer_parts.settings.fields import setting_fields
from rl_trainer_parts.settings.other_names import table
from rl_trainer_parts.settings.sources import build_settings


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


def test_every_counterpart_of_a_setting_of_verl_is_a_setting_of_this_trainer():
    known = {
        name for setting in setting_fields(AsyncSettings).values() for name in (setting.name, *setting.entry_fields())
    }
    named = {one for row in table() for one in row.settings if not one.startswith("--")}
    assert named <= known
