"""A run killed repeatedly with `kill -9`, at random points, ends with the same result as an undisturbed run."""

import random
import signal
from pathlib import Path

import pytest
from run_equality import assert_equal_runs
from tiny_run import REWARDS_BEFORE_STEP_1, REWARDS_PER_STEP, TinyRun, copy_tiny_run, make_tiny_run, train_here
from train_process import training

MOST_CALLS = REWARDS_BEFORE_STEP_1 + 3 * REWARDS_PER_STEP


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run without kills."""
    run = make_tiny_run(tmp_path_factory.mktemp("undisturbed"))
    assert train_here(run, trainer__checkpoint_every=1) == 0
    return run


@pytest.fixture(autouse=True)
def killing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the reward send SIGKILL, which cannot be handled."""
    monkeypatch.setenv("TINY_RUN_SIGNAL", str(int(signal.SIGKILL)))


def kill_and_go_on(run: TinyRun, *, num_kills: int, seed: int) -> None:
    """Kill the process in a random reward call, up to `num_kills` times, then let it finish."""
    draw = random.Random(seed)
    for attempt in range(num_kills):
        call = draw.randrange(MOST_CALLS)
        words = ["--resume"] if (run.run_folder / "settings.toml").exists() else []
        with training(run, *words, hold_after=call, trainer__checkpoint_every=1) as process:
            status = process.wait()
            assert status in (0, -signal.SIGKILL), f"seed {seed}, attempt {attempt}, call {call}:\n{process.text}"
            assert process.leftovers() == []
        if status == 0:
            return
    assert train_here(run, "--resume", trainer__checkpoint_every=1) == 0


@pytest.mark.soak
@pytest.mark.parametrize("round_index", range(5))
def test_killed_many_times_at_random_points(undisturbed: TinyRun, tmp_path: Path, seed: int, round_index: int) -> None:
    run = copy_tiny_run(undisturbed, tmp_path / "run")
    kill_and_go_on(run, num_kills=20, seed=seed + round_index)
    assert_equal_runs(run, undisturbed)
