import pytest
from refusals import refusal

from rl_core.errors import SettingsError
from rl_distill.objectives import ADVANTAGES
from rl_distill.objectives.registry import try_advantage


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_every_built_in_advantage_runs_as_it_is(name):
    assert refusal(try_advantage, name, {}) is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gropo", {}, "unknown advantage 'gropo'. Did you mean 'grpo'"),
        ("gae", {"lambda": 0.9}, "unknown option of advantage 'gae': 'lambda'. Did you mean 'lam'"),
        ("gae", {"lam": 1.5}, "lam of advantage 'gae' must be a number of at least 0 and at most 1; found 1.5"),
        ("grpo", {"eps": "small"}, "eps of advantage 'grpo' must be a finite number of at least 0; found 'small'"),
        ("gdpo", {"weights": 1.0}, "weights of advantage 'gdpo' must be a mapping, a string to a finite number"),
    ],
)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(SettingsError) as caught:
        try_advantage(name, options)
    assert message in str(caught.value)


def test_gdpo_is_tried_with_the_components_that_it_names():
    assert refusal(try_advantage, "gdpo", {"weights": {"style": 1.0}}) is None
