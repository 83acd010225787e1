"""Layouts, clusters and critics that cannot be are refused by arithmetic alone."""

from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import SettingsError
from rl_sync_trainer.checks import check_values
from rl_sync_trainer.settings import Settings
from rl_sync_trainer.sources import build_settings


def settings_with(changes: dict[str, Any]) -> Settings:
    values: dict[str, dict[str, Any]] = {
        "policy": {"path": Path("p")},
        "prompts": {"train": Path("t")},
        "reward": {"function": "exact_match"},
    }
    for name, value in changes.items():
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = value
    return build_settings(values, {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel.ranks": 4, "parallel.tensor": 3}, "ranks = 4 must be a multiple of tensor * pipeline * context"),
        ({"parallel.ranks": 2}, 'set cluster.kind to "process" or "ray"; found "inline"'),
        (
            {"parallel.ranks": 2, "policy.learner": "torch", "cluster.kind": "process"},
            "needs policy.learner",
        ),
        ({"parallel.sequence": True}, "sequence = true needs tensor > 1"),
        ({"parallel.virtual_pipeline": 2}, "virtual_pipeline = 2 needs pipeline > 1"),
        ({"cluster.ray_address": "host:1"}, 'cluster.ray_address is for cluster.kind = "ray"'),
        ({"cluster.gpus_per_rank": 1}, "set nothing aside for a rank in the trainer's process"),
        ({"trainer.epochs": 0}, "trainer.epochs must be at least 1; found 0"),
        ({"critic.value_clip": 0}, "critic.value_clip must be above 0; found 0"),
        (
            {"algorithm.advantage": "gae", "policy.learner": "torch"},
            "needs a critic, which policy.learner",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_values(settings_with(changes))
    assert said in str(refused.value)


def test_four_ranks_in_processes_are_taken() -> None:
    check_values(settings_with({"parallel.ranks": 4, "parallel.tensor": 2, "cluster.kind": "process"}))
