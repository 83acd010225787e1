"""The console that the settings select."""

import pytest

from rl_trainer_parts.reporting.trackers import make_console
from rl_trainer_parts.settings.schema import Settings

STEP = {"critic/rewards/mean": 0.5, "actor/ppo_kl": -8.9e-9, "rollout_corr/kl": 1e-9}


def shown(capsys, tmp_path, **sections):
    """Return the console line of a step."""
    settings = Settings(policy={"path": tmp_path}, prompts={"train": tmp_path / "train.jsonl"}, **sections)
    console = make_console(settings)
    console.log(1, STEP)
    console.close()
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("trainer", "kl"), [({}, "kl 0\n"), ({"minibatches": 2}, "kl -8.9e-09"), ({"epochs": 2}, "kl -8.9e-09")]
)
def test_a_line_has_the_kl_to_the_policy_that_sampled_as_0_where_it_is_0_by_design(capsys, tmp_path, trainer, kl):
    line = shown(capsys, tmp_path, trainer=trainer)
    assert kl in line
    assert "reward 0.500" in line


def test_off_shows_nothing(capsys, tmp_path):
    assert shown(capsys, tmp_path, metrics={"console": "off"}) == ""
