"""`rl-async-trainer simulate`, from its arguments to its output and files."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rl_async_trainer.simulate import measure_run, simulate, workload_text
from rl_core.errors import SettingsError
from rl_rollout.simulation.asynchronous import Schedule, simulate_async
from rl_rollout.simulation.outcome import GpuSplit
from rl_rollout.simulation.search import best_split, splits
from rl_rollout.simulation.synchronous import simulate_sync
from rl_rollout.simulation.workload import Lengths, read_workload

SMALL = """
name = "small"
[batch]
groups = 8
group_size = 4
mini_batch_groups = 2
[lengths]
median = 60
sigma = 1.1
maximum = 2000
[engine]
gpus = 2
slots = 16
decode = [[1, 0.01], [16, 0.025]]
[learner]
update_gpu_s_per_token = 2e-3
gpus_multiple = 2
[weights]
publish_s = 0.05
swap_s = 0.05
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return str(file)


def test_a_table_compares_modes_with_sync(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "found.json"
    words = [small, "--gpus", "8", "--staleness", "0,1", "--steps", "3", "--seed", "5", "--json", str(target)]
    assert simulate(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small: 8 x 4 responses a step, sync_every 1"
    assert [line.split("  ")[0] for line in lines[1:]] == ["mode", "sync", "on policy", "partial"]
    found = json.loads(target.read_text())
    sync, on_policy, partial = found["results"]
    expected = simulate_async(
        read_workload(Path(small)), GpuSplit(rollout_gpus=4, train_gpus=4), Schedule(), num_versions=3, seed=5
    )
    assert (found["workload"], found["seed"]) == ("small", 5)
    assert (partial["step_s"], partial["bound_s"]) == (expected.step_s, expected.bound_s)
    assert partial["speedup"] == sync["step_s"] / expected.step_s
    assert (partial["rollout_gpus"], partial["train_gpus"], partial["max_staleness"]) == (4, 4, 1)
    assert on_policy["staleness_mean"] == 0


def test_a_search_shows_the_fastest_split_of_each_staleness(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        simulate([small, "--gpus", "16", "--search", "--staleness", "1,2,4", "--sync-every", "2", "--steps", "3"]) == 0
    )
    workload = read_workload(Path(small))
    sync = simulate_sync(workload, gpus=16, num_steps=3, seed=0)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    for row, staleness in zip(rows, (1, 2, 4), strict=True):
        best = best_split(workload, 16, Schedule(max_staleness=staleness, sync_every=2), num_versions=3, seed=0)
        assert row[2:4] == [str(best.split), str(staleness)]
        assert row[4:6] == [f"{best.step_s:.4g}", f"{sync.step_s / best.step_s:.2f}"]


def test_a_search_finds_what_trying_every_split_finds(small: str) -> None:
    workload = read_workload(Path(small))
    policy = Schedule(max_staleness=2, sync_every=2)
    every = [simulate_async(workload, one, policy, num_versions=3, seed=0) for one in splits(workload, 24)]
    assert len(every) == 11
    assert best_split(workload, 24, policy, num_versions=3, seed=0) == min(every, key=lambda one: one.step_s)


def test_a_split_of_ones_own_and_whole_rollouts(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate([small, "--split", "6:2", "--partial", "false", "--staleness", "1", "--steps", "2"]) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:4] == ["whole", "8", "6:2", "1"]


def test_a_reader_that_has_gone_ends_only_the_output(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pipe(io.StringIO):
        """A pipe whose reader goes after the first line, as `head -1` does."""

        def write(self, text: str) -> int:
            if self.getvalue():
                raise BrokenPipeError
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Pipe())
    assert simulate([small, "--gpus", "8", "--steps", "1", "--json", str(tmp_path / "found.json")]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["results"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "7"], "--gpus must be multiples of engine.gpus = 2; found 7"),
        (["--gpus", "4,7", "--search"], "--gpus must be multiples of engine.gpus = 2; found 7"),
        (["--gpus", "many"], "--gpus must be integers of at least 2"),
        (["--split", "64"], "--split must be two numbers of GPUs such as 64:64; found '64'"),
        (["--split", "3:5"], "multiple of engine.gpus = 2"),
        (["--split", "4:4", "--gpus", "16"], "--split 4:4 has 8 GPUs, but --gpus is 16"),
        (["--gpus", "2"], "2 GPUs cannot be split"),
        (["--staleness", "-1"], "--staleness"),
        (["--sync-every", "3"], "sync_every must divide the 4 mini-batches"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--seed", "-3"], "--seed must be at least 0"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--search", "--split", "4:4"], "not allowed with"),
        (["--run-gpus", "2"], "Name the run, or leave it out"),
        (["--from", "run"], "either a workload or --from RUN; found both"),
        (["--json", "/nowhere/found.json", "--gpus", "8", "--steps", "1"], "/nowhere/found.json cannot be written"),
    ],
)
def test_words_that_cannot_be_are_refused(small: str, words: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        simulate([small, *words])
    assert message in str(refusal.value)


def write_run(folder: Path, *, steps: int, gen_s: float) -> None:
    row = {
        "timing_s/gen": gen_s,
        "timing_s/update_actor": 8.0,
        "timing_s/update_weights": 0.25,
        "timing_s/adv": 0.5,
        "rollout/num_groups": 8,
        "rollout/num_trajectories": 32,
        "response_length/mean": 90.0,
        "response_length/max": 400.0,
        "prompt_length/mean": 10.0,
        "agent_loop/slowest/generate_sequences": 5.0,
        "agent_loop/slowest/response_length": 400.0,
    }
    lines = [{"step": 0, "timing_s/testing": 1.0}, {**row, "step": 1, "timing_s/gen": 99.0}]
    lines += [{**row, "step": step} for step in range(2, steps + 1)]
    folder.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.joinpath("settings.toml").write_text("[rollout]\nmax_response_tokens = 512\n[trainer]\nminibatches = 4\n")


def test_a_run_gives_the_workload_that_takes_its_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, steps=4, gen_s=12.0)
    workload = measure_run(tmp_path, rollout_gpus=1, train_gpus=2)
    outcome = simulate_sync(workload, gpus=1, num_steps=3, seed=0)
    assert outcome.gen_s == pytest.approx(12.0, rel=0.01)
    assert workload.learner.updates_seconds(3200, num_updates=4, gpus=2) == pytest.approx(8.0)
    assert (workload.batch.groups, workload.batch.group_size, workload.batch.mini_batch_groups) == (8, 4, 2)
    assert (workload.lengths.maximum, workload.weights.publish_s) == (512, 0.25)
    target = tmp_path / "measured.toml"
    words = ["--from", str(tmp_path), "--run-gpus", "1:2", "--write", str(target), "--gpus", "4", "--staleness", "1"]
    assert simulate(words) == 0
    assert read_workload(target) == workload
    assert "partial" in capsys.readouterr().out


def test_a_generation_faster_than_its_slowest_response_lowers_the_floor(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3, gen_s=1.0)
    workload = measure_run(tmp_path, rollout_gpus=1, train_gpus=1)
    assert simulate_sync(workload, gpus=1, num_steps=3, seed=0).gen_s == pytest.approx(1.0, rel=0.01)


def test_a_folder_without_what_is_needed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        measure_run(tmp_path, rollout_gpus=1, train_gpus=1)
    tmp_path.joinpath("metrics.jsonl").write_text('{"step": 1, "timing_s/update_actor": 2.0}\n')
    with pytest.raises(SettingsError, match=r"has no step with timing_s/gen.*rl-sync-trainer"):
        measure_run(tmp_path, rollout_gpus=1, train_gpus=1)


def test_what_is_written_is_read_again(small: str, tmp_path: Path) -> None:
    by_quantiles = replace(
        read_workload(Path(small)), lengths=Lengths(quantiles=((0, 10), (0.5, 100.5), (1, 1000)), maximum=800)
    )
    for workload in (read_workload(), by_quantiles):
        (tmp_path / "again.toml").write_text(workload_text(workload))
        assert read_workload(tmp_path / "again.toml") == workload
