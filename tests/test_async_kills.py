"""`kill -9` of roles at random points of an asynchronous run: each prompt trains once."""

import random
from time import monotonic

import pytest
from async_faults import ROLES, Killer, assert_trained_exactly_once, restarts_of, scripted_training
from tiny_run import TinyRun, copy_tiny_run, make_tiny_run

LONG_S = 1800.0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    folder = tmp_path_factory.mktemp("async") / "inputs"
    folder.mkdir()
    return make_tiny_run(folder)


@pytest.fixture
def run(inputs: TinyRun) -> TinyRun:
    """Copy the inputs to a folder beside them, where runs share compiled modules."""
    number = len(list(inputs.folder.parent.iterdir()))
    return copy_tiny_run(inputs, inputs.folder.parent / f"run-{number}")


def kill_roles(run: TinyRun, *, num_kills: int, steps: int, seed: int, kind: str) -> None:
    """Kill one role after another in one run, which must still finish."""
    killer = Killer(run, random.Random(seed))
    roles = [ROLES[index % len(ROLES)] for index in range(num_kills)]
    killer.draw.shuffle(roles)
    started = monotonic()
    with scripted_training(run, trainer__steps=steps, roles__placement=kind) as process:
        for role in roles:
            killer.kill_one(process, role)
        assert process.wait(LONG_S) == 0, f"seed {seed}, kills {killer.kills}:\n{process.text}"
        assert process.leftovers() == []
    assert_trained_exactly_once(run, steps=steps)
    print(f"seed {seed}: {killer.counts} in {monotonic() - started:.0f} s; restarts {restarts_of(run)}")  # noqa: T201


def kill_everything(run: TinyRun, *, num_kills: int, steps: int, seed: int, kind: str) -> None:
    """Kill all processes of a run and resume it, `num_kills` times; then let it finish."""
    killer = Killer(run, random.Random(seed))
    started = monotonic()
    for _ in range(num_kills):
        words = ["--resume"] if (run.run_folder / "settings.toml").exists() else []
        with scripted_training(run, *words, trainer__steps=steps, roles__placement=kind) as process:
            killer.kill_everything(process)
            assert process.leftovers() == []
    with scripted_training(run, "--resume", trainer__steps=steps, roles__placement=kind) as process:
        assert process.wait(LONG_S) == 0, f"seed {seed}, kills {killer.kills}:\n{process.text}"
        assert process.leftovers() == []
    assert_trained_exactly_once(run, steps=steps)
    print(f"seed {seed}: {killer.kills} in {monotonic() - started:.0f} s")  # noqa: T201


def test_async_everything_killed_at_random_points(run: TinyRun, seed: int) -> None:
    kill_everything(run, num_kills=3, steps=10, seed=seed, kind="process")


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["process", "ray"])
def test_async_roles_killed_twenty_times_in_one_run(run: TinyRun, seed: int, kind: str) -> None:
    kill_roles(run, num_kills=20, steps=60, seed=seed, kind=kind)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["process", "ray"])
def test_async_everything_killed_ten_times(run: TinyRun, seed: int, kind: str) -> None:
    kill_everything(run, num_kills=10, steps=30, seed=seed, kind=kind)
