"""Suggestions for unknown settings."""

import pytest

from rl_trainer_parts.settings.fields import setting_fields
from rl_trainer_parts.settings.suggestions import suggest

KNOWN = list(setting_fields())


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("steps", "'trainer.steps' or 'rollout_cache.steps'"),
        ("skip.step", "'rollout_cache.steps'"),
        ("trainer.stepps", "'trainer.steps'"),
        ("trainr.steps", "'trainer.steps'"),
        ("learner.sed", "'optimizer.seed'"),
        ("num_threads", "'optimizer.num_threads' or 'vllm.num_threads'"),
        ("name", "'run.name' or 'algorithm.name'"),
        ("trainer.learning_rate", "'optimizer.learning_rate'"),
        ("lerning_rate", "'optimizer.learning_rate' or 'critic.learning_rate'"),
        ("critic.lerning_rate", "'critic.learning_rate'"),
        ("rollout.group_sise", "'rollout.group_size'"),
        ("max_steps", "'trainer.steps'"),
        ("policy", "'policy.path' or 'policy.backend'"),
        ("reward", "'reward.function', 'reward.options' or 'reward.parts'"),
        ("engine", "'rollout.engine'"),
        ("optim.lr", "'optimizer.learning_rate' or 'critic.learning_rate'"),
        ("lora.ranks", "'lora.rank'"),
        ("learner.steps", "'trainer.steps'"),
        ("trainer.seed", "'run.seed'"),
        ("rollout.max_model_len", "'vllm.max_model_len'"),
        ("data.train_batch_size", "'rollout.prompts_per_step'"),
    ],
)
def test_the_last_part_counts_then_the_section_then_use(name: str, suggested: str) -> None:
    assert suggest(name, KNOWN) == f" Did you mean {suggested}?"


def test_flags_and_sections_of_the_other_trainer_are_known() -> None:
    assert suggest("dry_run", KNOWN) == suggest("dryrun", KNOWN) == " Did you mean --dry-run?"
    assert suggest("schedule.max_staleness", KNOWN) == " [schedule] is a section of rl-async-trainer."
    own = " [sft] is a section of `rl-sync-trainer sft`, which has settings of its own."
    assert suggest("sft.batch_size", KNOWN) == own
    assert suggest("sft.batchsize", [*KNOWN, "sft.batch_size"]) == " Did you mean 'sft.batch_size'?"
    assert "max_staleness" in suggest("schedule.max_stalness", [*KNOWN, "schedule.max_staleness"])


def test_an_entry_of_a_table_leads_to_its_own_settings_and_to_others() -> None:
    entry = ["distillation.teachers.large.model", "distillation.teachers.large.dtype"]
    assert suggest("distillation.teachers.large.model_path", entry) == f" Did you mean {entry[0]!r}?"
    assert suggest("distillation.teachers.large.topk", entry) == " Did you mean 'distillation.top_k'?"


@pytest.mark.parametrize("name", ["router_aux_loss_coef", "moe_z_loss_coeff", "moe_router_bias_update_rate"])
def test_losses_of_a_router_are_refused_with_the_reason(name: str) -> None:
    assert suggest(f"learner.{name}", KNOWN).startswith(" The learners add no router loss and do not change the")


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert suggest("zzz.qqq", KNOWN) == ""


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("rollout.n", "rollout.group_size"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "prompts.validation_samples"),
        ("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "vllm.tensor_parallel_size"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "parallel.tensor"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.learning_rate"),
        ("critic.optim.lr", "critic.learning_rate"),
        ("critic.model.path", "critic.path"),
        ("beta", "algorithm.kl_coefficient"),
        ("distilation.beta", "distillation.beta"),
        ("gpu_memory_utilization", "vllm.gpu_memory_utilization"),
    ],
)
def test_names_of_verl_and_trl_lead_to_ours_whatever_their_section(name: str, suggested: str) -> None:
    assert suggest(name, KNOWN).startswith(f" Did you mean '{suggested}'")


def test_resuming_is_an_option() -> None:
    assert suggest("trainer.resume_mode", KNOWN) == suggest("resume_from_checkpoint", KNOWN)
