import json

import pytest

from rl_metrics.cli import main
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.doctor.diagnosing import diagnose
from rl_metrics.health.judging import judge_run
from rl_metrics.importers import trl_names
from rl_metrics.importers.trl import import_trl
from rl_metrics.run_files.run_record import open_run


@pytest.mark.parametrize(
    "table",
    [trl_names.POLICY_GRADIENT, trl_names.ASYNC, trl_names.DISTILLATION, trl_names.PPO, trl_names.OTHERS],
)
def test_every_name_of_a_table_is_defined_here(table):
    names = [name.format(component="accuracy") for ours in table.values() for name in ours]
    assert names
    assert [name for name in names if name not in DEFINITIONS] == []


def imported_history(tmp_path, rows):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    import_trl([tmp_path], tmp_path / "run")
    return {name: list(values) for name, values in open_run(tmp_path / "run").history.values.items()}


def test_a_history_of_dpo_has_no_rewards_and_no_policy_loss(tmp_path):
    row = {"step": 10, "epoch": 0.1, "loss": 0.6931, "grad_norm": 6.4, "learning_rate": 5e-7, "rewards/chosen": 0.1}
    row |= {"rewards/rejected": -0.1, "rewards/margins": 0.2, "rewards/accuracies": 0.6, "logps/chosen": -250.0}
    with_scores = row | {"objective/rlhf_reward": 0.5, "objective/scores": 0.6}  # online DPO
    for one in (row, with_scores):
        kept = {name: [value] for name, value in one.items() if name not in ("step", "epoch", "learning_rate")}
        assert imported_history(tmp_path, [one]) == {
            "actor/lr": [5e-7],
            **{f"other/{name}": value for name, value in kept.items()},
        }


def test_a_history_of_sft_or_gkd_has_no_policy_loss(tmp_path):
    row = {"step": 10.0, "loss": 1.9, "grad_norm": 3.4, "learning_rate": 1e-5, "entropy": 0.9, "num_tokens": 9.0}
    ours = {"other/loss": [1.9], "other/grad_norm": [3.4], "actor/lr": [1e-5], "other/entropy": [0.9]}
    ours |= {"other/num_tokens": [9.0], "other/eval_loss": [1.8]}
    assert imported_history(tmp_path, [row, {"step": 10, "eval_loss": 1.8}]) == ours


def test_a_history_of_ppo_is_imported(tmp_path):
    row = {"eps": 1, "objective/kl": 5.0, "objective/entropy": 60.0, "objective/non_score_reward": -0.3}
    row |= {"objective/rlhf_reward": 0.2, "objective/scores": 0.5, "policy/approxkl_avg": 0.01}
    row |= {"policy/clipfrac_avg": 0.05, "loss/policy_avg": -0.01, "loss/value_avg": 0.1, "val/clipfrac_avg": 0.02}
    row |= {"policy/entropy_avg": 0.4, "val/ratio": 1.0, "val/ratio_var": 0.0, "val/num_eos_tokens": 10}
    row |= {"lr": 3e-6, "episode": 64, "epoch": 0.001, "step": 1}
    ours = {"critic/rewards/mean": [0.2], "critic/score/mean": [0.5], "actor/lr": [3e-6]}
    of_tokens = {"actor/pg_loss": [-0.01], "actor/pg_clipfrac": [0.05]}
    of_critic = {"critic/vf_loss": [0.1], "critic/vf_clipfrac": [0.02]}

    def named(history):
        return {name: values for name, values in history.items() if not name.startswith("other/")}

    assert named(imported_history(tmp_path, [row])) == ours | of_tokens | of_critic
    of_rloo = imported_history(tmp_path, [row | {"loss/value_avg": 0.0}])  # until 0.21, with ratios of whole responses
    assert named(of_rloo) == ours
    assert of_rloo["other/policy/clipfrac_avg"] == [0.05]


def test_a_history_of_grpo_says_no_largest_reward(tmp_path):
    row = {"step": 1, "reward": 0.2, "reward_std": 0.3, "rewards/chosen/mean": 0.2, "rewards/chosen/std": 0.4}
    ours = {"critic/score/mean": [0.2], "critic/rewards/mean": [0.2], "rollout/group_reward_std": [0.3]}
    ours |= {"reward/chosen/mean": [0.2], "other/rewards/chosen/std": [0.4], "actor/loss": [0.01]}
    assert imported_history(tmp_path, [row | {"loss": 0.01}]) == ours
    assert "reward/chosen/mean" in imported_history(tmp_path, [{"step": 1, "reward": 0.2, "rewards/chosen": 0.2}])


@pytest.mark.parametrize("log", ["dpo", "sft"])
def test_health_does_not_judge_the_loss_of_a_trainer_without_a_policy_gradient(tmp_path, capsys, log):
    of_log = {"dpo": {"rewards/chosen": 0.1, "rewards/margins": 0.2}, "sft": {"mean_token_accuracy": 0.7}}[log]
    rows = [{"step": step, "loss": 1.9, "grad_norm": 6.0, **of_log} for step in range(1, 101)]
    imported_history(tmp_path, rows)
    main(["check", str(tmp_path / "run"), "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert "1.9" not in json.dumps(findings)


def test_a_history_of_grpo_with_vllm_has_the_mismatch(tmp_path):
    row = {"step": 1, "reward": 0.2, "loss": 0.01, "policy_loss": 0.02, "cispo_clip_ratio": 0.03}
    row |= {"sampling/sampling_logp_difference/mean": 0.4, "sampling/sampling_logp_difference/max": 3.0}
    history = imported_history(tmp_path, [row | {"step": step} for step in range(1, 11)])
    assert history["training/rollout_logprobs_diff_mean"] == [0.4] * 10
    assert history["training/rollout_logprobs_diff_max"] == [3.0] * 10
    assert history["actor/pg_loss"] == [0.02] * 10
    assert history["actor/pg_clipfrac"] == [0.03] * 10
    verdict = judge_run(open_run(tmp_path / "run"))
    assert "engine_mismatch" in {finding.rule for finding in verdict.findings}
    assert diagnose(open_run(tmp_path / "run")).diagnoses[0].kind == "mismatch"


def test_a_history_of_asynchronous_grpo(tmp_path):
    row = {"step": 1, "reward": 0.2, "kl": 0.01, "sample/staleness_mean": 1.5, "sample/staleness_max": 3}
    ours = {"critic/score/mean": [0.2], "critic/rewards/mean": [0.2], "rollout_corr/k3_kl": [0.01]}
    ours |= {"training/staleness/mean": [1.5], "training/staleness/max": [3.0]}
    ours |= {"timing_s/step": [4.0], "perf/time_per_step": [4.0]}
    assert imported_history(tmp_path, [row | {"perf/step_s": 4.0}]) == ours


@pytest.mark.parametrize("loss", [{"loss": 1.9}, {"jsd": 1.9}, {"self_distillation/distillation_loss": 1.9}])
def test_a_history_of_distillation_is_judged_as_such(tmp_path, loss):
    row = {"grad_norm": 6.0, "entropy": 1.5, "completions/mean_length": 40.0, "completions/clipped_ratio": 0.0, **loss}
    history = imported_history(tmp_path, [{"step": step, **row} for step in range(1, 41)])
    assert history["actor/distillation/loss"] == [1.9] * 40
    assert history["response_length/clip_ratio"] == [0.0] * 40
    verdict = judge_run(open_run(tmp_path / "run"))
    assert verdict.findings == ()
    assert verdict.status == "ok"
