"""Engines added to and removed from a live run, and `status`."""

import re
from pathlib import Path

import pytest
from async_runs import async_training, run_states
from tiny_run import PROMPTS_PER_STEP, REWARDS_PER_STEP, TinyRun, copy_tiny_run, make_tiny_run
from train_process import TrainProcess

from rl_async_trainer.main import main
from rl_metrics.run_files.events import read_events
from rl_metrics.trackers.jsonl import read_metrics

STEPS = 8
FIRST, SECOND = 5, 5 * REWARDS_PER_STEP + 5
HOLDS = f"""

unheld = reward
num_asked = 0


def reward(sample):
    global num_asked
    with lock:
        num_asked += 1
        number = num_asked
    for name, first in (("first", {FIRST}), ("second", {SECOND})):
        if number > first:
            (FOLDER / f"held-{{name}}").touch()
            while not (FOLDER / f"released-{{name}}").exists():
                time.sleep(0.01)
    return unheld(sample)
"""
"""Two points where the run waits for this test: within the first step, and some steps later."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = make_tiny_run(tmp_path_factory.mktemp("inputs"))
    with (run.folder / "reward.py").open("a") as file:
        file.write(HOLDS)
    return run


def reach(process: TrainProcess, run: TinyRun, hold: str) -> None:
    process.wait_until((run.folder / f"held-{hold}").exists, f"the {hold} hold")


def release(run: TinyRun, hold: str) -> None:
    (run.folder / f"released-{hold}").touch()


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Run a command in this process; return its exit status and output."""
    capsys.readouterr()
    status = main(words)
    said = capsys.readouterr()
    text = said.out + said.err
    assert "Traceback" not in text
    return status, text


def test_engines_come_and_go_while_it_runs(inputs: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = copy_tiny_run(inputs, tmp_path)
    folder = str(run.run_folder)
    settings = {
        "rollout__placement": "process",
        "reward__timeout_s": None,
        "trainer__steps": STEPS,
        "trainer__validate_every": 0,
        "trainer__validate_first": False,
    }
    with async_training(run, **settings) as process:
        process.wait_until((run.run_folder / "control.json").exists, "somebody to ask")
        status, text = asked(capsys, "status", folder)
        assert (
            status,
            re.match(r"the run is starting, \d+ s after its launch; in progress:\n  \S+ing ", text) is None,
        ) == (
            0,
            False,
        )
        reach(process, run, "first")
        status, text = asked(capsys, "status", folder)
        assert status == 0
        lines = text.splitlines()
        assert lines[0] == f"step 0 of {STEPS}"
        assert lines[1] == "versions: engines serve 0, the learner trains 0"
        found = re.match(r"groups: (\d+) in flight, (\d+) ready, ", lines[2])
        assert found is not None, lines
        generated, ready = map(int, found.groups())
        assert generated + ready == 2 * PROMPTS_PER_STEP
        views = re.compile(r"rollouter: \d groups? in progress, .*\d+ responses? in 1 engine, \d+ in the reward")
        assert any(map(views.match, lines))
        assert any(line.startswith("learner: waits for the next order") for line in lines)

        assert asked(capsys, "scale", folder, "--engines", "2") == (0, "the run now has 2 engines\n")
        assert re.search(r"responses? in 2 engines\b", asked(capsys, "status", folder)[1])
        status, text = asked(capsys, "scale", folder, "--engines", "0")
        assert (status, "a run needs at least one engine; found 0" in text) == (1, True)
        release(run, "first")

        reach(process, run, "second")
        assert asked(capsys, "scale", folder, "--engines", "1") == (0, "the run now has 1 engine\n")
        release(run, "second")
        assert process.wait() == 0, process.text
        assert process.leftovers() == []
        assert "Traceback" not in process.text
    assert run_states(run.run_folder) == dict.fromkeys(run_states(run.run_folder), "done")
    assert len(run_states(run.run_folder)) == STEPS * PROMPTS_PER_STEP
    events = [str(event["event"]) for event in read_events(run.run_folder / "events.jsonl")]
    assert [name for name in events if name in ("engine_added", "engine_removed")] == ["engine_added", "engine_removed"]
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    totals = [row.metrics["fully_async/engines/total"] for row in rows]
    assert totals == sorted(totals, reverse=True), "two, then one"
    assert (totals[0], totals[-1]) == (2, 1)
    published = [row.metrics for row in rows if "weights/canary_max_diff" in row.metrics]  # a step can have two updates
    assert published
    assert all(metrics["weights/canary_max_diff"] < 1e-3 for metrics in published)


def test_a_run_whose_engine_is_in_its_rollouter_refuses_more(
    inputs: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = copy_tiny_run(inputs, tmp_path)
    folder = str(run.run_folder)
    status, text = asked(capsys, "status", folder)
    assert (status, f"no live run in {folder}" in text) == (1, True)
    settings = {"roles__placement": "inline", "reward__timeout_s": None, "trainer__steps": 1}
    with async_training(run, **settings) as process:
        reach(process, run, "first")
        status, text = asked(capsys, "scale", folder, "--engines", "2")
        assert (status, 'set rollout.placement to "process" or "ray"' in text) == (1, True)
        assert asked(capsys, "status", folder)[1].startswith("step 0 of 1\n")
        release(run, "first")
        release(run, "second")
        assert process.wait() == 0, process.text
    status, text = asked(capsys, "scale", folder, "--engines", "2")
    assert (status, f"no live run in {folder}" in text) == (1, True)
    with pytest.raises(SystemExit) as wrong:
        main(["scale", folder, "--engines", "two"])
    assert wrong.value.code == 2
