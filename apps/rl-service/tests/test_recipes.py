"""Recipes of the tinker cookbook, unmodified and offline, as processes in their own environment, with a tiny policy."""

import os
import sys

import pytest
from recipe_runs import ARITHMETIC, RECIPES, Recipe, fall, rise_of, serving
from recipe_world import PROBLEMS, SUMS, make_world

pytest.importorskip("tinker", reason="the tinker client is not installed (pip install tinker)")
PYTHON = os.environ.get("SERVICE_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="nox could not make the recipes' environment (`nox -s service`)")
SHORT = (
    Recipe(
        name="sl_loop",
        module="sl_loop",
        options="lora_rank=4 batch_size=8 learning_rate=1e-2 max_steps=4 save_every=2",
        figure=fall("train_mean_nll"),
    ),
    Recipe(
        name="rl_loop",
        module="rl_loop",
        options="lora_rank=4 batch_size=2 group_size=2 max_tokens=8 max_steps=2 loss_fn=importance_sampling",
    ),
)


@pytest.fixture(scope="module")
def untaught(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    make_world(folder)
    with serving(folder, PYTHON, **{"engine.name": "transformers", "engine.placement": "inline"}) as site:
        yield site


@pytest.mark.parametrize("recipe", SHORT, ids=lambda recipe: recipe.name)
def test_a_recipe_runs_unmodified(untaught, recipe, tmp_path):
    run = untaught.run(recipe, log=tmp_path / "log")
    assert "Training completed" in run.output
    assert run.sampler.startswith("tinker://")
    if recipe.figure is not None:
        assert recipe.figure.is_reached(recipe.figure.value(run.metrics))


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught")
    make_world(folder, courses=PROBLEMS)
    with serving(folder, PYTHON, **{"engine.name": "transformers"}) as site:
        yield site


@pytest.fixture(scope="module")
def teacher(taught, tmp_path_factory):
    return taught.run(RECIPES[0], log=tmp_path_factory.mktemp("teacher")).sampler


@pytest.mark.soak
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_reaches_its_number(taught, teacher, recipe, tmp_path):
    check_number(recipe, taught.run(recipe, log=tmp_path / "log", teacher=teacher))


@pytest.mark.soak
def test_math_rl_learns_its_own_arithmetic(tmp_path):
    make_world(tmp_path, courses=SUMS, has_digits=True)
    with serving(tmp_path, PYTHON, **{"engine.name": "transformers"}) as site:
        check_number(ARITHMETIC, site.run(ARITHMETIC, log=tmp_path / "log"))


def check_number(recipe, run):
    if recipe.figure is None:
        return
    value = recipe.figure.value(run.metrics)
    said = f"| {recipe.name} | {recipe.figure.name} | {recipe.figure.wanted} | {value:.4g} | {run.seconds:.0f} s |"
    sys.stdout.write(f"{said}\n")
    assert recipe.figure.is_reached(value)


def test_a_rise_is_from_the_first_tenth_to_the_last_fifth():
    assert rise_of([0.0, 0.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 1.0, 3.0]) == 2.0
