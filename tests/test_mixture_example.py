"""Both trainers run the mixture example with small settings; a soak test kills its engines and ranks on Ray."""

import importlib.util
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from async_runs import role_pid, run_history, run_states
from tiny_run import TinyRun, make_tiny_run
from train_process import TrainProcess

from rl_async_trainer.main import main as train_async
from rl_async_trainer.settings import AsyncSettings
from rl_metrics.run_files.events import read_events
from rl_metrics.trackers.jsonl import read_metrics
from rl_sync_trainer.main import main as train_sync
from rl_trainer_parts.settings.sources import load_settings

pytest.importorskip("vllm")

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "mixture"
SMALL = {
    "vllm.kv_cache_gib": 0.01,
    "vllm.max_num_seqs": 16,
    "vllm.num_threads": 1,
    "optimizer.num_threads": 1,
    "optimizer.products": "torch",
    "metrics.console": "off",
    "metrics.details_every": 1,
    "metrics.report": "false",
    "metrics.strict": "true",
    "rollout.group_size": 4,
    "rollout.prompts_per_step": 4,
    "trainer.checkpoint_every": 0,
    "trainer.steps": 2,
    "trainer.validate_every": 0,
}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """examples/mixture/prepare.py, run in the repository's root; modules and import paths are restored afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(FOLDER.parents[1])
        patch.setattr(sys, "path", [*sys.path])
        patch.delitem(sys.modules, "task", raising=False)  # other examples have a task.py too
        spec = importlib.util.spec_from_file_location("mixture_prepare", FOLDER / "prepare.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def inputs(tmp_path: Path) -> TinyRun:
    """Inputs with few problems, and a reward that random policies can get."""
    return make_tiny_run(tmp_path)


def words(settings: str, inputs: TinyRun, changes: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `train` for a settings file of the example, with other inputs."""
    files = {f"prompts.{split}": inputs.folder / f"{split}.parquet" for split in ("train", "validation", "test")}
    places = {"run.directory": inputs.folder / "runs", "policy.path": inputs.folder / "policy"}
    changes = {**places, **files, "reward.function": f"{inputs.folder}/reward.py:reward", **changes}
    return ["train", str(FOLDER / settings), *(f"--{name}={value}" for name, value in changes.items())]


def test_the_three_runs_differ_only_in_how_they_run() -> None:
    sync = load_settings(FOLDER / "settings.toml", [])
    others = [load_settings(FOLDER / name, [], kind=AsyncSettings) for name in ("async.toml", "ray.toml")]
    for section in ("policy", "prompts", "reward"):
        assert [getattr(other, section) for other in others] == [getattr(sync, section)] * 2
    assert (others[1].parallel.expert, others[1].replicas.count) == (2, 2)


def test_a_small_run_of_each_trainer_replays_the_engines_experts(
    example: ModuleType, tmp_path: Path, inputs: TinyRun
) -> None:
    example.make_mixture(inputs.folder / "policy", 0)
    assert train_sync(words("settings.toml", inputs, SMALL)) == 0
    assert train_async(words("async.toml", inputs, {**SMALL, "roles.placement": "inline"})) == 0
    for name in ("mixture", "mixture-async"):
        rows = [row.metrics for row in read_metrics(tmp_path / "runs" / name / "metrics.jsonl") if row.step]
        assert [row["router/unknown_share"] for row in rows] == [0.0] * SMALL["trainer.steps"]
        for row in rows:
            assert 0 <= row["router/rerouted_share"] < 0.5
            assert row["router/k3_kl/replay"] < 0.1
            assert "router/k3_kl/no_replay" in row


def num_steps(inputs: TinyRun) -> int:
    """Return the number of steps in the run's record."""
    return len(run_history(inputs.run_folder).steps) if (inputs.run_folder / "record.jsonl").exists() else 0


@pytest.mark.soak
def test_over_ray_an_engine_and_a_rank_are_killed_and_everything_trains_once(
    example: ModuleType, tmp_path: Path, inputs: TinyRun, seed: int
) -> None:
    """Kill two engines, and two ranks that share the experts, one after the other in the middle of training."""
    example.make_mixture(inputs.folder / "policy", 0)
    draw, steps = random.Random(seed), 24
    changes = {**SMALL, "run.name": "tiny", "trainer.steps": steps, "trainer.checkpoint_every": 4, "run.seed": seed}
    process = TrainProcess(
        words("ray.toml", inputs, changes),
        output=tmp_path / "output.txt",
        environment={},
        module=train_async.__module__,
    )
    roles = draw.sample(["vllm-engine-0", "vllm-engine-1", "learner-0", "learner-1"], 4)
    try:
        for role in roles:
            trained = num_steps(inputs)
            target = trained + draw.randint(1, 3)
            process.wait_until(lambda target=target: num_steps(inputs) >= target, f"step {target}")
            process.wait_until(lambda role=role: role_pid(inputs, role) in process.children(), f"a process of {role}")
            os.kill(role_pid(inputs, role), signal.SIGKILL)
        assert process.wait(600.0) == 0, f"seed {seed}, {roles}:\n{process.text}"
        assert process.leftovers() == []
    finally:
        process.end()
    rows = [row.metrics for row in read_metrics(inputs.run_folder / "metrics.jsonl") if row.step]
    assert (rows[-1]["fully_async/restarts/engines"], rows[-1]["fully_async/restarts/learner"]) == (2.0, 2.0)
    assert {row["router/unknown_share"] for row in rows} == {0.0}, "the other engine's experts are known too"
    events = read_events(inputs.run_folder / "events.jsonl")
    assert [event["role"] for event in events if event["event"] == "role_died"] == ["learner", "learner"]
    trained = [uid for uids in run_history(inputs.run_folder).steps.values() for uid in uids]
    assert len(trained) == len(set(trained)) == steps * SMALL["rollout.prompts_per_step"]
    assert run_states(inputs.run_folder) == dict.fromkeys(trained, "done")
