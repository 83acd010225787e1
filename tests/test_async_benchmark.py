"""The async benchmark: the arithmetic of its summary and bound."""

from pathlib import Path

import pytest
from benchmark_modules import BENCHMARKS, load_benchmark

SETTINGS = """[benchmark]
gpus = 4
rollout_gpus = 1
steps = 2
sync_steps = 1
max_staleness = 1
seed = 0

[batch]
groups = 2
group_size = 2
mini_batch_groups = 2

[lengths]
median = 1
sigma = 0
maximum = 100
prompt_tokens = 1

[engine]
gpus = 1
slots = 2
decode = [[1, 0.5]]

[learner]
update_gpu_s_per_token = 3.0
"""


@pytest.fixture
def workload():
    return load_benchmark("_async_workload")


@pytest.fixture
def summary():
    return load_benchmark("_async_summary")


def test_numbers_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_benchmark("async").main(["--rounds", "0"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "--rounds must be at least 1" in err


def test_the_file_stands_for_a_long_tail(workload) -> None:
    plan, found = workload.read_plan(BENCHMARKS / "async.toml")
    script = workload.Script(file=BENCHMARKS / "async.toml", trace=Path(), seed=0, num_engines=1, train_gpus=1)
    lengths = [tokens for group in range(plan.steps * found.batch.groups) for tokens in script.lengths[group]]
    assert 8 <= max(lengths) * len(lengths) / sum(lengths) <= 20
    assert 0 < plan.rollout_gpus < plan.gpus


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        # 2 slots decode at 0.5 s per token, 3 GPUs train at 1 s per token, prompts have 1 token, steps have 2 groups.
        # The first step's 4 responses of 1 token share 2 slots, which takes 1 s. 8 rows of 2 tokens train in 16 s.
        ([[1, 1]] * 4, {"training_s": 1.0 + 16.0, "generation_s": 2.0 + 8.0, "longest_s": 0.5 + 8.0}),
        # The first step does not wait for the longest response. The step that trains it has at least 8 tokens.
        ([[1, 1], [1, 1], [1, 1], [1, 97]], {"training_s": 112.0 + 1, "generation_s": 26 + 8.0, "longest_s": 48.5 + 8}),
        # Every group has a long response, so nothing trains before the first of them end.
        ([[9, 1], [9, 1], [9, 1], [9, 1]], {"training_s": 5.0 + 48, "generation_s": 10 + 24.0, "longest_s": 4.5 + 24}),
    ],
)
def test_the_bound_is_what_lengths_and_costs_make_of_it(workload, monkeypatch, tmp_path, drawn, expected) -> None:
    file = tmp_path / "workload.toml"
    file.write_text(SETTINGS)
    script = workload.Script(file=file, trace=tmp_path, seed=0, num_engines=1, train_gpus=3)
    monkeypatch.setitem(script.__dict__, "lengths", drawn)
    bound = workload.bound_of(script, range(4), groups_per_step=2, num_startable=4)
    assert {name: getattr(bound, name) for name in expected} == pytest.approx(expected)
    assert bound.seconds == pytest.approx(max(expected.values()))


def test_only_groups_that_may_be_started_fill_the_first_step(workload, monkeypatch, tmp_path) -> None:
    file = tmp_path / "workload.toml"
    file.write_text(SETTINGS)
    script = workload.Script(file=file, trace=tmp_path, seed=0, num_engines=1, train_gpus=3)
    monkeypatch.setitem(script.__dict__, "lengths", [[20, 20], [20, 20], [1, 1], [1, 1]])
    early = workload.bound_of(script, range(4), groups_per_step=2, num_startable=4)
    late = workload.bound_of(script, range(4), groups_per_step=2, num_startable=2)
    assert late.training_s - early.training_s == pytest.approx(20.0 - 1.0)


def test_a_script_travels_as_a_file(workload, tmp_path) -> None:
    script = workload.Script(file=BENCHMARKS / "async.toml", trace=tmp_path, seed=3, num_engines=2, train_gpus=6)
    script.write(tmp_path)
    assert workload.Script.read(tmp_path) == script


def test_rows_are_medians_and_verdicts_compare_each_run_with_its_neighbour(summary) -> None:
    def run(wall_s: float, steps: int, idle: float) -> dict:
        shares = dict.fromkeys(("slept_learner", "idle_engine", "slots_used", "staleness_mean"), 0.5)
        return summary.round_row(
            {"mode": "m", "wall_s": wall_s, "steps": steps, "idle_learner": idle, "bound_s": 9.0, **shares}
        )

    sync = [run(30.0, 10, 0.8), run(50.0, 10, 0.8), run(40.0, 10, 0.8)]
    ours = [run(10.0, 10, 0.06), run(10.0, 10, 0.02), run(18.0, 10, 0.04)]
    row = summary.mode_row("async", ours)
    assert (row["mode"], row["wall_s"], row["step_s"], row["steps"]) == ("async", 10.0, 1.0, 10)
    assert [one["wall_s"] for one in row["rounds"]] == [10.0, 10.0, 18.0]
    found = {one["what"]: one for one in summary.verdicts(sync, ours)}
    assert found["speed"]["of_rounds"] == [3.0, 5.0, 2.2222]
    assert (found["speed"]["found"], found["speed"]["is_met"]) == (3.0, True)
    assert (found["idle_learner"]["found"], found["idle_learner"]["is_met"]) == (0.04, True)
    assert (found["share_of_bound"]["found"], found["share_of_bound"]["is_met"]) == (0.9, True)
    missed = {one["what"]: one["is_met"] for one in summary.verdicts(ours, sync)}
    assert missed == {"speed": False, "idle_learner": False, "share_of_bound": False}
