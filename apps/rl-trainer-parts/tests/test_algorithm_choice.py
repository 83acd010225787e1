"""`algorithm.name` chooses the values of a paper, and options are settings of the chosen functions."""

import math
import pickle
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
from annotated_types import Ge
from torch import Tensor

from rl_core.errors import SettingsError
from rl_core.files import parse_toml
from rl_distill import ALGORITHMS, Algorithm
from rl_distill.objectives import ADVANTAGES, POLICY_LOSSES, RewardedRows
from rl_trainer_parts.checks.algorithm import algorithm_problems, unknown_names
from rl_trainer_parts.learning.objective import make_policy_objective, method_title
from rl_trainer_parts.settings.algorithm_choice import (
    changes_of_paper,
    option_fields,
    option_types,
    options_of,
    with_algorithm,
)
from rl_trainer_parts.settings.fields import plain_settings
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings, load_settings

PAGES = Path(__file__).parents[3] / "docs" / "algorithms"
NEEDED = ("--policy.path=p", "--prompts.train=t")


def chosen(*words: str) -> Settings:
    return load_settings(None, [*NEEDED, *(f"--algorithm.{word}" for word in words)], {})


def algorithm(*words: str) -> dict[str, Any]:
    return asdict(chosen(*words).algorithm)


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_every_value_of_an_algorithm_reaches_the_settings(name: str) -> None:
    settings, of_paper = chosen(f"name={name}"), ALGORITHMS.get(name)
    values = asdict(settings.algorithm)
    for field in ("advantage", "policy_loss", "clip_low", "clip_high", "aggregation", "old_logprobs"):
        assert values[field] == getattr(of_paper, field)
    for field in ("kl_in", "kl_coefficient", "kl_estimator"):
        assert values[field] == getattr(of_paper, field)
    assert {option: values[option] for option in of_paper.options} == dict(of_paper.options)
    assert settings.dynamic_sampling.filter == of_paper.filter
    assert changes_of_paper(settings) == {}
    assert method_title(settings) == of_paper.title
    make_policy_objective(settings)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("grpo", {"aggregation": "seq-mean-token-mean", "kl_in": "loss", "kl_coefficient": 0.04, "kl_estimator": "k3"}),
        ("grpo", {"advantage": "grpo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": math.inf}),
        ("dr_grpo", {"advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm", "kl_coefficient": 0.0}),
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean", "kl_coefficient": 0.0}),
        ("gspo", {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"}),
        ("ppo", {"advantage": "gae", "gamma": 1.0, "lam": 0.95, "kl_in": "reward", "kl_estimator": "k1"}),
        ("rloo", {"advantage": "rloo", "policy_loss": "gpg", "aggregation": "seq-mean-token-sum"}),
        ("cispo", {"policy_loss": "cispo", "clip_low": 1.0, "kl_coefficient": 0.0}),
    ],
)
def test_values_of_papers(name: str, values: dict[str, Any]) -> None:
    assert algorithm(f"name={name}").items() >= values.items()


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_each_algorithm_has_a_page_with_its_settings(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    written = parse_toml(text.partition("```toml\n")[2].partition("```")[0], where=name)
    filled = with_algorithm({"algorithm": {"name": name}})
    del filled["algorithm"]["name"]
    shown = {key: value for key, value in filled["algorithm"].items() if value is not None}
    if not shown["kl_coefficient"]:
        del shown["kl_in"], shown["kl_estimator"]
    if shown["old_logprobs"] == "rollout":
        del shown["old_logprobs"]
    assert written == {**filled, "algorithm": shown}
    assert (PAGES / "curves" / f"{name}.svg").is_file()
    assert f"({name}.md)" in (PAGES / "README.md").read_text()


def test_without_a_name_the_defaults_are_those_of_other_trainers() -> None:
    assert algorithm() == {**algorithm(), "name": None, "aggregation": "token-mean", "kl_coefficient": 0.0}
    assert chosen().algorithm == chosen("advantage=grpo").algorithm
    assert method_title(chosen("advantage=rloo")) == "RLOO"


def test_a_value_of_the_user_takes_precedence() -> None:
    changed = chosen("name=dapo", "clip_high=0.3", "dual_clip=4")
    assert changes_of_paper(changed) == {
        "algorithm.clip_high": (0.3, 0.28),
        "algorithm.dual_clip": (4.0, math.inf),
    }
    words = [*NEEDED, "--algorithm.name=dapo", "--dynamic_sampling.filter="]
    assert changes_of_paper(load_settings(None, words, {})) == {"dynamic_sampling.filter": ("", "reward_spread")}


def test_the_plan_names_no_change_that_follows_from_another() -> None:
    of_loss, of_kl = chosen("name=dapo", "policy_loss=gspo"), chosen("name=rloo", "kl_coefficient=0")
    assert changes_of_paper(of_loss) == {"algorithm.policy_loss": ("gspo", "ppo_clip")}
    assert changes_of_paper(of_kl) == {"algorithm.kl_coefficient": (0.0, 0.03)}
    assert changes_of_paper(chosen("advantage=rloo")) == {}


def test_values_of_a_replaced_part_are_left_out() -> None:
    other_loss = algorithm("name=grpo", "policy_loss=gspo")
    assert (other_loss["clip_low"], "dual_clip" in other_loss) == (None, False)
    other_advantage = algorithm("name=ppo", "advantage=reinforce_plus_plus")
    assert (other_advantage["gamma"], "lam" in other_advantage) == (1.0, False)
    without_kl = algorithm("name=rloo", "kl_coefficient=0")
    assert (without_kl["kl_in"], without_kl["kl_estimator"]) == ("loss", "k3")
    assert list(algorithm_problems(chosen("name=rloo", "kl_coefficient=0"))) == []


def test_the_order_of_sources_holds_for_names_and_options(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[policy]\npath = "p"\n[prompts]\ntrain = "t"\n[algorithm]\nname = "ppo"\nlam = 0.5\ngamma = 0.8\n')
    settings = load_settings(file, ["--algorithm.lam=0.7"], {"RL__ALGORITHM__GAMMA": "0.9"})
    assert options_of(settings.algorithm, "advantage") == {"gamma": 0.9, "lam": 0.7, "whiten": True}
    with pytest.raises(SettingsError, match=r"algorithm.lam \(.*settings.toml\) is an option of advantage gae"):
        load_settings(file, ["--algorithm.name=gspo"], {})


def test_settings_survive_their_file_and_a_process() -> None:
    settings = chosen("name=ppo", "lam=0.9", "dual_clip=5")
    assert build_settings(plain_settings(settings, has_none=False)) == settings
    copy = pickle.loads(pickle.dumps(settings))
    assert (copy, type(copy)) == (settings, type(settings))
    assert settings.model_copy(update={"run": replace(settings.run, seed=3)}).algorithm == settings.algorithm


def test_each_option_is_listed_with_its_functions() -> None:
    fields = option_fields()
    assert fields["algorithm.lam"].limits == {"ge": 0, "le": 1}
    assert fields["algorithm.gamma"].meaning.startswith("Option of advantage gae, advantage reinforce_plus_plus.")
    for registry, part in ((ADVANTAGES, "advantage"), (POLICY_LOSSES, "policy_loss")):
        for name in registry.names():
            options = option_types(**{"advantage": "", "policy_loss": "", part: name})
            assert {f"algorithm.{option}" for option in options} <= fields.keys()


def far(rows: RewardedRows, *, reach: Annotated[int, Ge(1)] = 2) -> dict[str, Tensor]:
    """Test an advantage of another package.

    Args:
        rows: The batch.
        reach: How far it reaches.
    """
    return {"advantages": rows.rewards[rows.group] * reach}


def test_packages_bring_algorithms_with_typed_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVANTAGES._builtin, "far", far)
    mine = Algorithm(title="Mine", source="arXiv:0000.00000", advantage="far", clip_high=0.5, options={"reach": 3})
    monkeypatch.setitem(ALGORITHMS._builtin, "mine", mine)
    settings = chosen("name=mine", "reach=4")
    assert options_of(settings.algorithm, "advantage") == {"reach": 4}
    assert algorithm("name=mine").items() >= {"reach": 3, "clip_high": 0.5}.items()
    with pytest.raises(SettingsError, match=r"algorithm.reach must be at least 1; found 0 \(command line\)"):
        chosen("name=mine", "reach=0")


def needy(rows: RewardedRows, *, must: int) -> dict[str, Tensor]:
    raise NotImplementedError


class Callable:
    """An advantage that is an object."""

    def __call__(self, rows: RewardedRows, *, far: Annotated[float, Ge(0)] = 1.0) -> dict[str, Tensor]:
        raise NotImplementedError


def test_functions_of_every_kind_bring_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, one in (("needy", needy), ("object", Callable()), ("bound", partial(far, reach=5))):
        monkeypatch.setitem(ADVANTAGES._builtin, name, one)
    option_fields.cache_clear()
    assert {"algorithm.must", "algorithm.far", "algorithm.reach"} <= option_fields().keys()
    monkeypatch.undo()
    option_fields.cache_clear()


def test_an_option_without_a_default_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVANTAGES._builtin, "needy", needy)
    monkeypatch.setitem(ALGORITHMS._builtin, "mine", Algorithm(title="M", source="none", advantage="needy"))
    settings = chosen("name=mine", "must=3")
    assert options_of(settings.algorithm, "advantage") == {"must": 3}
    assert list(changes_of_paper(settings)) == ["algorithm.must"]
    with pytest.raises(SettingsError, match=r"algorithm.must: required, and not set"):
        chosen("name=mine")


def test_an_entry_that_is_no_algorithm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS._builtin, "mine", {"advantage": "grpo"})
    with pytest.raises(SettingsError, match=r"'mine' of another package must be an rl_distill.Algorithm"):
        chosen("name=mine")


def test_old_options_are_refused_with_their_new_names(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[policy]\npath = "p"\n[prompts]\ntrain = "t"\n[algorithm.advantage_options]\nlam = 0.5\n')
    with pytest.raises(SettingsError) as caught:
        load_settings(file, ["--algorithm.policy_loss_options={dual_clip = 4}"], {})
    first, second = str(caught.value).splitlines()
    assert first.endswith("is gone, because each option is a setting of its own. Write algorithm.lam.")
    assert second.endswith("Write algorithm.dual_clip.")


def test_options_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def clashing(rows: RewardedRows, *, aggregation: int = 1) -> dict[str, Tensor]:
        raise NotImplementedError

    monkeypatch.setitem(ADVANTAGES._builtin, "clashing", clashing)
    with pytest.raises(SettingsError, match=r"option .aggregation., and so has a setting of .algorithm.. Rename it"):
        options_of(chosen("advantage=clashing").algorithm, "advantage")


def test_unknown_names_have_a_hint() -> None:
    named = [("algorithm.name", "gspoo", ALGORITHMS.names())]
    assert next(unknown_names(named)).endswith("Did you mean 'gspo'?")
