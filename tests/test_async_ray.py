"""The asynchronous trainer over real Ray: vLLM and Megatron, all parts in actors, and an existing cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from async_runs import async_training, differences_from_sync, run_states, train_async_here, trained_versions
from run_equality import learnt
from tiny_run import PROMPTS_PER_STEP, TinyRun, copy_tiny_run, make_tiny_run
from train_process import TrainProcess, training

from rl_core.cluster.ray.session import RayOptions, start_ray, stop_ray
from rl_core.testing import wait_until
from rl_metrics.trackers.jsonl import read_metrics

pytest.importorskip("vllm")

MEGATRON = {"policy__backend": "megatron"}
SHORT = {"trainer__validate_every": 0, "trainer__validate_first": False, "trainer__checkpoint_every": 0}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("inputs"))


def finish(process: TrainProcess) -> None:
    assert process.wait(600) == 0, process.text
    assert process.leftovers() == []
    assert "Traceback" not in process.text


@pytest.mark.slow
def test_on_policy_over_ray_with_vllm_and_megatron_equals_the_synchronous_trainer(inputs: TinyRun, tmp_path: Path):
    sync, run = copy_tiny_run(inputs, tmp_path / "sync"), copy_tiny_run(inputs, tmp_path / "async")
    settings = {"rollout__engine": "vllm", "trainer__steps": 5, **MEGATRON}
    with training(sync, **settings) as process:
        finish(process)
    with async_training(run, roles__placement="ray", schedule__max_staleness=0, **settings) as process:
        finish(process)
    assert differences_from_sync(run, sync) == []
    assert learnt(run, step=5) == learnt(sync, step=5)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Start a Ray cluster for runs to join."""
    yield start_ray(RayOptions(num_cpus=8, object_store_bytes=300 << 20))
    stop_ray()


@pytest.mark.slow
def test_everything_is_an_actor_of_a_cluster_that_the_run_joins_and_leaves(
    cluster: Any, inputs: TinyRun, tmp_path: Path
):
    from ray._private.state import actors

    run = copy_tiny_run(inputs, tmp_path)
    settings: dict[str, Any] = {
        "cluster__ray_address": cluster.get_runtime_context().gcs_address,
        "roles__placement": "ray",
        "rollout__placement": "ray",
        "replicas__count": 2,
        "replicas__gpus": 0,
        "cluster__placement": "ray",
        "cluster__gpus_per_rank": 0,
        "parallel__ranks": 2,
        "rollout__max_response_tokens": 40,
        "vllm__max_num_seqs": 8,
        "trainer__steps": 4,
    }
    with async_training(run, **settings, **MEGATRON, **SHORT) as process:
        finish(process)
    states = run_states(run.run_folder)
    assert len(states) == 4 * PROMPTS_PER_STEP
    assert set(states.values()) == {"done"}
    ages = {step - 1 - oldest for step, oldest, _ in trained_versions(run.run_folder)}
    assert ages
    assert ages <= {0, 1}
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    assert [row.metrics["fully_async/engines/total"] for row in rows] == [2.0] * 4
    published = [row.metrics for row in rows if "weights/canary_max_diff" in row.metrics]  # a step can have two updates
    assert published
    assert all(metrics["weights/canary_max_diff"] < 1e-3 for metrics in published)
    wait_until(lambda: {actor["State"] for actor in actors().values()} == {"DEAD"}, "the run's actors to end")
    assert len(actors()) >= 7, "roles, engines, ranks and the queue were in the cluster"
    assert cluster.available_resources()["CPU"] == cluster.cluster_resources()["CPU"] == 8.0


def test_an_address_without_ray_is_refused(inputs: TinyRun, capsys: pytest.CaptureFixture[str]):
    settings = {"roles__placement": "process", "cluster__ray_address": "host:1"}
    assert train_async_here(inputs, "--dry-run", **settings) == 2
    assert (
        'cluster.ray_address needs roles.placement = "ray" or cluster.placement = "ray" or' in capsys.readouterr().err
    )
