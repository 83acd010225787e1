"""Properties of the asynchronous settings."""

from pathlib import Path

import pytest

from rl_async_trainer.settings import AsyncSettings
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
