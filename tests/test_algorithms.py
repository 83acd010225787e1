"""Every variant of the objective in a training run: metrics are defined and finite, and the policy changes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import fake_gpu, figures
from tiny_run import REWARDS_PER_STEP, TinyRun, copy_tiny_run, make_tiny_run, train_here

from rl_distill import ALGORITHMS
from rl_metrics.trackers.jsonl import read_histograms, read_metrics
from rl_sync_trainer.main import main

RECOMPUTED = {"algorithm__old_logprobs": "recompute"}
VARIANTS: dict[str, dict[str, Any]] = {
    "mean-of-sums": {"algorithm__aggregation": "seq-mean-token-sum"},
    "mean-of-means": {"algorithm__aggregation": "seq-mean-token-mean"},
    "kl-k1": {"algorithm__kl_coefficient": 0.1, "algorithm__kl_estimator": "k1"},
    "kl-k2": {"algorithm__kl_coefficient": 0.1, "algorithm__kl_estimator": "k2"},
    "kl-k3": {"algorithm__kl_coefficient": 0.1, "algorithm__kl_estimator": "k3"},
    "kl-straight-through": {"algorithm__kl_coefficient": 0.1, "algorithm__kl_estimator": "k3+"},
    "kl-abs": {"algorithm__kl_coefficient": 0.1, "algorithm__kl_estimator": "abs"},
    "kl-in-the-reward": {
        "algorithm__advantage": "reinforce_plus_plus",
        "algorithm__kl_coefficient": 0.1,
        "algorithm__kl_estimator": "k1",
        "algorithm__kl_in": "reward",
        "algorithm__kl_target": 0.01,
    },
    **{
        name: {"algorithm__name": name, "trainer__minibatches": 2} for name in ALGORITHMS.names() if name != "gdpo"
    },  # which needs components of a reward
    "remax-refill": {"algorithm__advantage": "remax", "dynamic_sampling__filter": "reward_spread"},
    "lite-ppo": {"algorithm__advantage": "lite_ppo", "algorithm__aggregation": "token-sum"},
    "maxrl-and-dro": {"algorithm__advantage": "maxrl", "algorithm__policy_loss": "dro", "trainer__minibatches": 2},
    "otb-corrected": {**RECOMPUTED, "algorithm__advantage": "optimal_token_baseline", "correction__weights": "token"},
    "truncated": {"rollout__mask_truncated": True, "algorithm__advantage": "rloo"},
    "advantage-baseline": {"algorithm__advantage": "reinforce_plus_plus_baseline", "algorithm__session_rule": "each"},
    "dppo_kl": {"algorithm__policy_loss": "dppo_kl", "trainer__minibatches": 2},
    "entropy": {"algorithm__entropy_coefficient": 0.01},
    "recomputed": RECOMPUTED,
    "corrected-by-token": {**RECOMPUTED, "correction__weights": "token"},
    "corrected-by-sequence": {**RECOMPUTED, "correction__weights": "sequence"},
    "banded": {**RECOMPUTED, "correction__weights": "token", "correction__floor": 0.5},
    "rejection": {**RECOMPUTED, "correction__reject": "{token_k1 = 2.0, seq_mean_k3 = 0.1}"},
    "minibatches": {"trainer__minibatches": 2},
    "no-dual-clip": {"algorithm__dual_clip": math.inf},
    "ppo-epochs": {"algorithm__advantage": "gae", "trainer__minibatches": 2, "trainer__epochs": 2},
    "offload": {"trainer__offload_learner": True, "algorithm__advantage": "gae", "algorithm__kl_coefficient": 0.1},
    "refill": {"dynamic_sampling__filter": "reward_spread", "dynamic_sampling__max_rounds": 2},
    "other-temperature": {"rollout__temperature": 0.7},
    "truncated-sampling": {"rollout__top_p": 0.8, "rollout__top_k": 6, "algorithm__advantage": "gae", **RECOMPUTED},
    "muon": {"optimizer__algorithm": "muon", "algorithm__advantage": "gae"},
    "class-of-transformers": {"policy__backend": "transformers"},
    "everything": {
        **RECOMPUTED,
        "correction__weights": "token",
        "algorithm__kl_coefficient": 0.1,
        "algorithm__entropy_coefficient": 0.01,
        "trainer__minibatches": 2,
    },
}


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("algorithms"))


@pytest.fixture
def run(tiny_run: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_tiny_run(tiny_run, tmp_path / "run")


def train_two_steps(run: TinyRun, **settings: Any) -> list[dict[str, float]]:
    """Return the metrics of two steps. The run is strict: an undefined metric fails it."""
    with fake_gpu():
        assert train_here(run, trainer__steps=2, trainer__validate_first=False, **settings) == 0
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    assert [row.step for row in rows] == [1, 2]
    for row in rows:
        assert [name for name, value in row.metrics.items() if not math.isfinite(value)] == []
        assert row.metrics["queue/rows"] == 0  # all acked
        assert row.metrics.items() >= figures("perf").items() | figures("engine").items()
    distributions = read_histograms(run.run_folder / "histograms.jsonl")
    assert [row.step for row in distributions] == [1, 2]
    for row in distributions:
        assert row.histograms["distribution/reward"].count == REWARDS_PER_STEP
        assert row.histograms["distribution/generate_s"].min > 0
    return [row.metrics for row in rows]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", VARIANTS)
def test_two_steps_train_and_report_their_metrics(name: str, run: TinyRun) -> None:
    settings = VARIANTS[name]
    first, second = train_two_steps(run, **settings)
    assert weights(run.run_folder / "checkpoints" / "step_2" / "policy") != weights(run.folder / "policy")
    assert first["actor/grad_norm"] > 0
    assert first["training/policy_version"] == 1
    if settings.get("algorithm__kl_in") == "reward":
        assert first["actor/kl_coef"] > second["actor/kl_coef"]  # the KL starts far below its target
    if name.endswith("_cov"):
        assert first["actor/selected_fraction"] >= 0
    if "dynamic_sampling__filter" in settings:
        assert 1 <= first["rollout/num_rounds"] <= 2
        assert first["rollout/made_up_groups"] <= first["rollout/refused_groups"]
        if not first["rollout/made_up_groups"]:
            assert first["rollout/groups_without_spread_ratio"] == 0
    if "rollout__mask_truncated" in settings:
        assert first["response/masked_ratio"] == first["response_length/clip_ratio"] > 0
    if "remax" in name:
        assert 0 <= first["rollout/greedy_reward"] <= 1
    if settings.get("correction__weights"):
        assert first["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)
    if settings.get("correction__reject"):
        assert first["rollout_corr/rollout_rs_masked_fraction"] < 0.1
    named = settings.get("algorithm__name")
    if "algorithm__kl_coefficient" in settings or (named and ALGORITHMS.get(named).kl_coefficient):
        if settings.get("trainer__minibatches", 1) == 1:
            assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-5)  # the policy still equals the reference
        assert second["actor/kl_loss"] != pytest.approx(0, abs=1e-5)
    else:
        assert "actor/kl_loss" not in first
    if settings.get("algorithm__old_logprobs") == "recompute":
        assert first["training/rollout_probs_diff_max"] < 1e-4


ADAPTIVE_KL = {
    "algorithm__kl_coefficient": 0.1,
    "algorithm__kl_estimator": "k1",
    "algorithm__kl_in": "reward",
    "algorithm__kl_target": 0.5,
    "algorithm__kl_horizon": 16,
}


def test_an_adapted_kl_coefficient_goes_on_where_the_run_stopped(tiny_run: TinyRun, tmp_path: Path) -> None:
    whole = copy_tiny_run(tiny_run, tmp_path / "whole")
    first, second = train_two_steps(whole, **ADAPTIVE_KL)
    assert first["actor/kl_coef"] == pytest.approx(0.1)
    assert first["actor/reference_kl"] == pytest.approx(0.0, abs=1e-4)  # the policy still equals the reference
    assert second["actor/kl_coef"] == pytest.approx(0.08)  # 16 trajectories far below the target lower it by 20 %
    parts = copy_tiny_run(tiny_run, tmp_path / "parts")
    for steps, words in ((1, []), (2, ["--resume"])):
        assert train_here(parts, *words, trainer__steps=steps, trainer__validate_first=False, **ADAPTIVE_KL) == 0
    resumed = read_metrics(parts.run_folder / "metrics.jsonl")[-1].metrics
    for name in ("actor/kl_coef", "actor/reference_kl", "actor/pg_loss", "critic/rewards/mean"):
        assert resumed[name] == pytest.approx(second[name], rel=1e-6), name


def test_components_of_the_rewards_parts_reach_gdpo_and_acc_stays_the_main_metric(run: TinyRun) -> None:
    reward = run.folder / "two_parts.py"
    reward.write_text(
        "def reward(given):\n"
        "    length = sum(given.response_ids.tolist())\n"
        "    return {'reward': float(length % 2), 'acc': float(length % 2), 'length': 0.01 * length}\n"
        "def penalty(given):\n"
        "    return -10.0\n"
    )
    first, last = train_two_steps(
        run,
        reward__function="",
        reward__parts=f"[{{function='{reward}:reward', name='task'}}, {{function='{reward}:penalty'}}]",
        algorithm__advantage="gdpo",
        algorithm__weights="{acc = 1.0, 'task/length' = 2.0}",
    )
    assert first["critic/advantages/max"] > 0 > first["critic/advantages/min"]
    assert first["reward/task/length/mean"] > 0 > first["reward/penalty/mean"]
    assert first["critic/rewards/mean"] == pytest.approx(first["reward/acc/mean"] - 10)
    summary = json.loads((run.run_folder / "summary.json").read_text())
    assert last["val-aux/arithmetic/reward/mean@1"] < -5 < 0 <= last["val-core/arithmetic/acc/mean@1"]
    assert summary["validation_accuracy_last"] == last["val-core/arithmetic/acc/mean@1"]
    assert summary["test_accuracy_last"] == last["test/accuracy"] >= 0


def test_a_component_that_the_reward_does_not_give_is_named(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    status = train_here(run, algorithm__advantage="gdpo", algorithm__weights="{style = 1.0}", trainer__steps=1)
    assert status == 2
    assert "names the component 'style', but the reward function returned" in capsys.readouterr().err


def test_a_rejection_that_leaves_nothing_is_said(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    status = train_here(run, **RECOMPUTED, correction__reject="{seq_sum_k2 = 1e-30}", trainer__steps=1)
    assert status == 2
    assert "rejected every token of 16 trajectories. Widen its bounds" in capsys.readouterr().err


def test_one_update_on_recomputed_logprobs_is_the_update_on_the_engines(tiny_run: TinyRun, tmp_path: Path) -> None:
    metrics = []
    for name, settings in (("engine", {}), ("recomputed", RECOMPUTED)):
        metrics.append(train_two_steps(copy_tiny_run(tiny_run, tmp_path / name), **settings)[0])
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-3, abs=1e-6), name


def test_groups_of_one_micro_batch_or_many_learn_the_same(tiny_run: TinyRun, tmp_path: Path) -> None:
    losses = []
    for tokens in (1, 64, 100_000):
        run = copy_tiny_run(tiny_run, tmp_path / str(tokens))
        losses.append(train_two_steps(run, optimizer__micro_batch_tokens=tokens)[0])
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        values = [metrics[name] for metrics in losses]
        assert values == pytest.approx([values[0]] * 3, rel=1e-4, abs=1e-7), name


def test_the_same_weights_validate_as_they_did_in_the_run(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here(run) == 0
    row = read_metrics(run.run_folder / "metrics.jsonl")[-1]
    assert main(["export", str(run.run_folder), str(run.folder / "exported")]) == 0
    words = ["validate", str(run.settings_file), "--metrics.console=off", f"--json={run.folder}/found.json"]
    assert main([*words, *(f"--policy={policy}" for policy in (run.run_folder, run.folder / "exported"))]) == 0
    name = "val-core/arithmetic/reward/mean@1"
    for found in json.loads((run.folder / "found.json").read_text())["policies"].values():
        assert found["validation"]["sources"][name] == pytest.approx(row.metrics[name], abs=1e-6)
        assert found["test"]["sources"][name] == pytest.approx(row.metrics["test/mean_reward"], abs=1e-6)
    assert "B is better on 0 of 2 sets, A on 0 " in capsys.readouterr().out


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused_at_once(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    from rl_async_trainer.main import main as async_main

    file = run.folder / "policy" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 10}))
    words = run.train_words("--metrics.console=off")
    for trainer, wanted in (
        (main, [*words, "--dry-run"]),
        (main, words),
        (main, ["validate", *words[1:]]),
        (async_main, [*words, "--dry-run"]),
        (async_main, words),
    ):
        assert trainer(wanted) == 2, wanted
        said = capsys.readouterr().err
        assert f"policy.path: {file} has vocab_size = 10, but the tokenizer in {file.parent} has token ids" in said
        assert "up to 17" in said
    assert not run.run_folder.exists()


def test_a_dry_run_starts_nothing_and_writes_nothing(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here(run, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "4 prompts x 4 sessions = 16 trajectories" in said
    assert "32 to train on, 4 to test at the start and the end" in said
    assert not (run.folder / "runs").exists()


def test_a_dry_run_says_what_the_prompts_are(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    file = run.folder / "text.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+3="}) + "\n" for n in range(10, 14)))
    assert train_here(run, "--dry-run", prompts__train=file) == 2
    assert "or set prompts.requires_ground_truth = false to allow such rows." in capsys.readouterr().err
    settings = {"prompts__train": file, "prompts__requires_ground_truth": False}
    assert train_here(run, "--dry-run", **settings) == 0
    said = capsys.readouterr().out
    assert "prompts    plain text, unchanged; the longest has 5 tokens" in said
    assert said.count("note: the prompts are plain text") == 1
    assert 'prompts.plain_prompts = "chat" turns each into a user message' in said
    assert train_here(run, "--dry-run", prompts__plain_prompts="chat", **settings) == 0
    said = capsys.readouterr().out
    assert "prompts    messages, formatted by the chat template; the longest has 6 tokens" in said
    assert "note: the prompts" not in said
    assert "responses end at token 1\n" in said


def test_a_model_without_an_end_token_is_told_of(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (run.folder / "policy" / "config.json", run.folder / "policy" / "generation_config.json"):
        if file.exists():
            file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": None}))
    assert train_here(run, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "responses end at token none\n" in said
    assert (
        f"note: {run.folder / 'policy'} names no end token, so every response continues until it is truncated" in said
    )


def test_settings_for_a_gpu_are_warned_of_in_a_dry_run_and_refused_in_a_run_here(
    run: TinyRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    problem = 'optimizer.kernels = "fused" needs a GPU, and this machine has none. Set optimizer.kernels = "auto"'
    assert train_here(run, "--dry-run", optimizer__kernels="fused") == 0
    assert f"warning: a run on this machine would be refused: {problem}" in capsys.readouterr().out
    assert train_here(run, optimizer__kernels="fused") == 2
    assert problem in capsys.readouterr().err
    assert not run.run_folder.exists()


def test_an_engine_that_starts_too_slowly_is_given_up(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    slowly = ["--rollout.start_deadline_s=1e-6", "--metrics.console=off", "--rollout.placement=process"]
    assert main(["validate", str(run.settings_file), *slowly]) == 1
    assert capsys.readouterr().err.startswith("error: DeadlineError: ")
    assert train_here(run, rollout__start_deadline_s=1e-6, rollout__placement="process") == 1
    assert "error: DeadlineError: " in capsys.readouterr().err
