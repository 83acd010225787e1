"""The modes of the asynchronous trainer, on real engines and the Megatron learner."""

import json
from pathlib import Path

import pytest
from async_runs import differences_from_sync, run_history, train_async_here, trained_versions
from run_equality import learnt
from tiny_run import PROMPTS_PER_STEP, TinyRun, copy_tiny_run, make_tiny_run, train_here

from rl_metrics.trackers.jsonl import read_metrics


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def run(inputs: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_tiny_run(inputs, tmp_path / "run")


def test_on_policy_equals_the_synchronous_trainer_bit_for_bit(inputs: TinyRun, tmp_path: Path):
    sync, run = copy_tiny_run(inputs, tmp_path / "sync"), copy_tiny_run(inputs, tmp_path / "async")
    settings = {"trainer__steps": 5, "rollout__top_p": 0.9, "rollout__top_k": 8, "algorithm__old_logprobs": "recompute"}
    assert train_here(sync, **settings) == 0
    assert train_async_here(run, schedule__max_staleness=0, run__readable_by="group", **settings) == 0
    assert differences_from_sync(run, sync) == []
    for row in read_metrics(run.run_folder / "metrics.jsonl")[1:]:
        assert row.metrics["training/rollout_probs_diff_max"] < 1e-4, "the learner replays the engine's nuclei"
        assert abs(row.metrics["rollout_corr/kl"]) < 1e-5
    assert learnt(run, step=5) == learnt(sync, step=5)
    found, wanted = (json.loads((one.run_folder / "summary.json").read_text()) for one in (run, sync))
    scores = [f"{split}_mean_reward_{which}" for split in ("validation", "test") for which in ("first", "last")]
    assert [found[name] for name in scores] == [wanted[name] for name in scores]
    assert readable_more_widely(sync.run_folder, than=0o700) == []
    assert readable_more_widely(run.run_folder, than=0o750) == []
    for name in ("settings.toml", "checkpoints/step_5/policy/model.safetensors"):
        assert (run.run_folder / name).stat().st_mode & 0o777 == 0o640


def readable_more_widely(folder: Path, *, than: int) -> list[Path]:
    """Return a run's files and folders with permissions beyond `than`, whichever process wrote them."""
    return [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o777 & ~than]


def test_streaming_trains_only_what_the_present_version_made(run: TinyRun):
    settings = {"schedule__max_staleness": 0, "schedule__sync_every": 2, "trainer__steps": 5}
    assert train_async_here(run, **settings) == 0
    versions = trained_versions(run.run_folder)
    assert len(versions) == 5 * PROMPTS_PER_STEP
    assert all(oldest == newest == (step - 1) // 2 for step, oldest, newest in versions)
    assert sorted(run_history(run.run_folder).published) == [0, 1, 2, 3]
    assert json.loads((run.run_folder / "summary.json").read_text())["policy_version"] == 3, "the last step ends one"


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_whole_responses_have_one_version_and_none_is_too_old(run: TinyRun, max_staleness: int):
    settings = {"schedule__max_staleness": max_staleness, "schedule__partial_rollout": False, "trainer__steps": 6}
    assert train_async_here(run, **settings) == 0
    versions = trained_versions(run.run_folder)
    assert len(versions) == 6 * PROMPTS_PER_STEP
    assert all(0 <= step - 1 - oldest <= max_staleness for step, oldest, _ in versions)
    rows = [row.metrics for row in read_metrics(run.run_folder / "metrics.jsonl") if row.step]
    assert [row["fully_async/partial/partial_ratio"] for row in rows] == [0.0] * 6
    assert max(row["fully_async/staleness/max"] for row in rows) >= 1, "it never ran ahead"


def test_partial_responses_go_on_under_new_weights(run: TinyRun):
    """Engines get more requests than fit at once, so that some responses are in progress at each update."""
    settings = {
        "rollout__max_response_tokens": 40,
        "vllm__max_num_seqs": 8,
        "trainer__steps": 8,
        "prompts__validation_limit": 2,
        "algorithm__old_logprobs": "recompute",
        "correction__weights": "token",
    }
    assert train_async_here(run, **settings) == 0
    versions = trained_versions(run.run_folder)
    assert all(0 <= step - 1 - oldest <= 1 for step, oldest, _ in versions)
    assert any(oldest < newest for _, oldest, newest in versions), "no response saw two versions"
    rows = [row.metrics for row in read_metrics(run.run_folder / "metrics.jsonl") if row.step]
    assert sum(row["fully_async/partial/total_partial_num"] for row in rows) > 0
    assert max(row["fully_async/partial/max_partial_span"] for row in rows) == 1
    assert all(row["rollout_corr/rollout_is_mean"] > 0 for row in rows)


def test_every_mode_says_what_it_is(run: TinyRun, capsys: pytest.CaptureFixture[str]):
    cases = {
        "on policy": {"schedule__max_staleness": 0},
        "streaming within a version": {"schedule__max_staleness": 0, "schedule__sync_every": 4},
        "responses have one version each": {"schedule__partial_rollout": False},
        "responses continue under new weights": {},
    }
    for words, settings in cases.items():
        assert train_async_here(run, "--dry-run", **settings) == 0
        assert words in capsys.readouterr().out
