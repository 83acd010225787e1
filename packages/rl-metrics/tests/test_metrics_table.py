import json
import re
from pathlib import Path

import pytest

from rl_core import InProcessQueue, TaskSpec
from rl_core.testing import make_prompts
from rl_metrics.cli import main
from rl_metrics.definitions.table import DEFINITIONS, FAMILIES, chapter_of

DOCS_PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"

EMITTED = [
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/kl_loss",
    "actor/kl_coef",
    "actor/grad_norm",
    "actor/lr",
    "actor/loss",
    "critic/score/mean",
    "critic/score/max",
    "critic/score/min",
    "critic/rewards/mean",
    "critic/advantages/mean",
    "critic/advantages/min",
    "response_length/mean",
    "response_length/max",
    "response_length/min",
    "response_length/clip_ratio",
    "prompt_length/mean",
    "prompt_length/max",
    "prompt_length/min",
    "prompt_length/clip_ratio",
    "response/aborted_ratio",
    "training/global_step",
    "training/policy_version",
    "training/epoch",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_std",
    "training/rollout_actor_probs_pearson_corr",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/training_ppl",
    "rollout_corr/rollout_ppl",
    "rollout_corr/ppl_ratio",
    "rollout_corr/chi2_token",
    "rollout_corr/chi2_seq",
    "rollout_corr/rollout_is_mean",
    "weights/canary_max_diff",
    "weights/probe_max_diff",
    "weights/num_tensors",
    "timing_s/gen",
    "timing_s/reward",
    "timing_s/old_log_prob",
    "timing_s/ref",
    "timing_s/adv",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "timing_s/step",
    "timing_s/testing",
    "timing_s/save_checkpoint",
    "timing_per_token_ms/gen",
    "timing_per_token_ms/ref",
    "timing_per_token_ms/values",
    "timing_per_token_ms/adv",
    "timing_per_token_ms/update_critic",
    "timing_per_token_ms/update_actor",
    "perf/mfu/actor",
    "perf/mfu/critic",
    "perf/mfu/actor_infer",
    "num_turns/mean",
    "num_turns/max",
    "num_turns/min",
    "perf/total_num_tokens",
    "perf/time_per_step",
    "perf/throughput",
    "perf/cpu_memory_used_gb",
    "perf/max_memory_allocated_gb",
    "agent_loop/generate_sequences/min",
    "agent_loop/compute_score/mean",
    "agent_loop/tool_calls/max",
    "agent_loop/num_preempted/max",
    "val-core/arithmetic/acc/mean@1",
    "val-aux/openai/gsm8k/reward/std@8",
    "val-aux/openai/gsm8k/reward/worst@4/std",
    "val-core/openai/gsm8k/acc/best@8/mean",
    "val-core/openai/gsm8k/acc/maj@8/ci_high",
    "val-core/openai/gsm8k/acc/pass@8",
    "sft/loss",
    "rollout/groups_without_spread_ratio",
    "rollout/failed_sessions",
    "nonfinite/actor/entropy",
    "distribution/reward",
    "distribution/advantage",
    "distribution/response_length",
    "distribution/entropy",
    "distribution/log_ratio",
    "distribution/logprob",
    "distribution/group_reward_std",
    "distribution/generate_s",
    "queue/groups/leased",
    "actor/distillation/loss",
    "actor/distillation/student_mass",
    "actor/distillation/teacher_mass",
    "actor/distillation/overlap_ratio",
    "actor/distillation/tail_mass",
    "actor/distillation/clamped_fraction",
    "actor/distillation/agreement",
    "actor/distillation/aligned_fraction",
    "actor/distillation/math-7b/loss",
    "teacher/math-7b/score_s",
    "teacher/math-7b/idle_share",
    "teacher/math-7b/trajectories",
    "teacher/math-7b/tokens_per_s",
    "teacher/math-7b/restarts",
    "teacher/math-7b/cache_hits",
    "timing_s/teacher",
    "fully_async/trainer/idle_ratio",
    "fully_async/rollouter/idle_ratio",
    "fully_async/count/stale_trajectory_processed",
    "fully_async/count/current_param_version",
    "fully_async/count/total_generated_samples",
    "fully_async/count/dropped_stale_samples",
    "fully_async/count/staleness_samples",
    "fully_async/count/dropped/stale",
    "fully_async/count/dropped/failed",
    "fully_async/count/dropped/refused",
    "fully_async/count/dropped/lost",
    "fully_async/partial/total_partial_num",
    "fully_async/partial/partial_ratio",
    "fully_async/partial/max_partial_span",
    "fully_async/partial/mean_partial_span",
    "fully_async/processing_time/avg",
    "fully_async/processing_time/max",
    "fully_async/processing_time/min",
    "fully_async/processing_time/tp50",
    "fully_async/processing_time/tp95",
    "fully_async/processing_time/tp99",
    "fully_async/staleness/mean",
    "fully_async/staleness/max",
    "fully_async/staleness/p50",
    "fully_async/staleness/p95",
    "fully_async/queue/ready_groups",
    "fully_async/queue/inflight_groups",
    "fully_async/queue/issued_groups",
    "fully_async/queue/rows",
    "fully_async/queue/bytes",
    "fully_async/weight_update/stall_s",
    "fully_async/weight_update/pack_s",
    "fully_async/weight_update/update_s",
    "fully_async/weight_update/proof_s",
    "fully_async/weight_update/drain_s",
    "fully_async/restarts/engines",
    "fully_async/engines/serving",
    "fully_async/engines/total",
    "perf/rollouter_tokens_per_s",
    "perf/trainer_tokens_per_s",
    "perf/teacher_tokens_per_s",
    "timing_s/wait_rollouts",
    "validation/policy_version/min",
    "validation/policy_version/max",
]


VERL = {
    "critic/score/": "mean max min",
    "critic/rewards/": "mean max min",
    "critic/advantages/": "mean max min",
    "critic/returns/": "mean max min",
    "critic/values/": "mean max min",
    "actor/": "pg_loss pg_clipfrac ppo_kl entropy kl_loss kl_coef grad_norm lr",
    "response_length/": "mean max min clip_ratio",
    "prompt_length/": "mean max min clip_ratio",
    "response/": "aborted_ratio",
    "num_turns/": "mean max min",
    "timing_s/": "gen reward old_log_prob ref values adv update_critic update_actor update_weights step testing "
    "save_checkpoint dump_rollout_generations",
    "timing_per_token_ms/": "gen ref values adv update_critic update_actor",
    "perf/": "total_num_tokens time_per_step throughput max_memory_allocated_gb cpu_memory_used_gb",
    "perf/mfu/": "actor critic",
    "training/": "rollout_probs_diff_mean rollout_probs_diff_max rollout_probs_diff_std "
    "rollout_actor_probs_pearson_corr",
    "rollout_corr/": "kl k3_kl training_ppl rollout_ppl ppl_ratio chi2_token chi2_seq rollout_rs_masked_fraction",
    "rollout_corr/rollout_is_": "mean std max min eff_sample_size",
    "fully_async/": "trainer/idle_ratio rollouter/idle_ratio",
    "fully_async/count/": "stale_trajectory_processed current_param_version total_generated_samples "
    "dropped_stale_samples staleness_samples",
    "fully_async/partial/": "total_partial_num partial_ratio max_partial_span",
    "fully_async/processing_time/": "avg max min tp50 tp95 tp99",
    "actor/distillation/": "loss abs_loss loss_min loss_max student_mass teacher_mass overlap_ratio",
    "agent_loop/generate_sequences/": "mean max min",
    "agent_loop/tool_calls/": "mean max min",
    "agent_loop/compute_score/": "mean max min",
    "agent_loop/num_preempted/": "mean max min",
    "agent_loop/slowest/": "generate_sequences tool_calls compute_score num_preempted prompt_length response_length",
    "val-core/gsm8k/acc/": "mean@8 best@8/mean best@8/std maj@8/mean maj@8/std",
    "val-aux/gsm8k/acc/": "mean@8 std@8 best@4/mean best@4/std worst@8/mean worst@8/std maj@2/mean maj@2/std",
}
"""verl's names with the same meaning here, by their prefix."""


@pytest.mark.parametrize("name", [stem + end for stem, ends in VERL.items() for end in ends.split()])
def test_a_name_of_verl_is_defined(name):
    assert DEFINITIONS.lookup(name).name == name


@pytest.mark.parametrize("name", EMITTED)
def test_a_name_that_trainers_emit_is_defined(name):
    assert DEFINITIONS.lookup(name).name == name


def test_what_is_said_of_all_teachers_is_said_of_each():
    of_all = {metric.name for metric in DEFINITIONS if re.fullmatch("actor/distillation/[a-z_]+", metric.name)}
    of_each = {name.replace("{teacher}/", "") for name in (m.name for m in DEFINITIONS) if "lation/{teacher}/" in name}
    assert len(of_all) == 11
    assert of_each == of_all - {"actor/distillation/aligned_fraction"}, "a token that no teacher scored is no teacher's"
    loss = DEFINITIONS.lookup("actor/distillation/math/loss")
    assert (loss.unit, loss.reduction, loss.weighted_by) == ("nats", "mean", "token")


def test_every_statistic_of_the_queue_is_defined():
    queue = InProcessQueue([TaskSpec(name="train", needs=frozenset({"reward"}))])
    queue.issue(make_prompts(2), num_sessions=1)
    queue.drop("p1", reason="stale")
    undefined = [key for key in queue.stats() if f"queue/{key}" not in DEFINITIONS]
    assert undefined == []


def test_every_definition_says_what_it_means():
    assert sum(len(metrics) for metrics in FAMILIES.values()) == len(DEFINITIONS)
    for metric in DEFINITIONS:
        assert metric.meaning.endswith("."), metric.name
        assert metric.unit, metric.name
        assert metric.healthy is None or metric.healthy.source, metric.name


def test_suffixes_agree_with_reductions():
    reductions = {metric.name: metric.reduction for metric in DEFINITIONS if metric.reduction != "histogram"}
    named = {name: re.search(r"(?<=[/_])(mean|min|max|_ratio)$", name) for name in reductions}
    suffixes = {name: found[0].replace("_ratio", "mean") for name, found in named.items() if found}
    assert len(suffixes) > 50
    assert {name: end for name, end in suffixes.items() if reductions[name] != end} == {}


@pytest.mark.skipif(not DOCS_PAGE.parent.is_dir(), reason="docs/ is in the checkout only")
def test_the_docs_page_is_up_to_date(capsys):
    main(["list", "--markdown"])
    assert DOCS_PAGE.read_text() == capsys.readouterr().out, (
        "docs/metrics.md is out of date; run `rl-metrics list --markdown > docs/metrics.md`"
    )


def test_the_json_list_holds_everything(capsys):
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [metric.name for metric in DEFINITIONS]
    entropy = next(row for row in rows if row["name"] == "actor/entropy")
    assert entropy["reduction"] == "mean"
    assert entropy["weighted_by"] == "token"
    clipfrac = next(row for row in rows if row["name"] == "actor/pg_clipfrac")
    assert clipfrac["healthy"] == {"low": None, "high": 0.2, "source": "rule of thumb"}


def test_the_terminal_list_shows_whole_names_in_a_pipe(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "val-core/{source}/{variable}/mean@{n}" in out
    assert f"{len(DEFINITIONS)} metrics and families" in out


def test_a_pattern_selects(capsys):
    assert main(["list", "ENTROPY", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert "actor/entropy" in names
    assert "actor/lr" not in names


def test_a_pattern_that_fits_nothing_exits_with_2(capsys):
    assert main(["list", "no-such-metric"]) == 2
    assert "no-such-metric" in capsys.readouterr().err


def test_a_missing_verb_exits_with_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "usage: rl-metrics" in capsys.readouterr().err


def test_chapters_of_families_and_plain_names():
    assert chapter_of("val-core/gsm8k/acc/mean@4") == "Validation"
    assert chapter_of("timing_s/gen") == "Time"
    assert chapter_of("reward/format/mean") == "Rewards and advantages"
    assert chapter_of("nobody/knows") == "Other"
    for chapter, metrics in FAMILIES.items():
        assert {chapter_of(metric.name) for metric in metrics if not metric.is_family} <= {chapter}


def test_the_list_takes_globs_of_names(capsys):
    assert main(["list", "actor/kl_*", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert {"actor/kl_loss", "actor/kl_coef"} <= set(names)
    assert all(name.startswith("actor/kl_") for name in names)
    assert main(["list", "kl_*"]) == 2
    assert "'kl_*'" in capsys.readouterr().err
