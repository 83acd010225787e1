"""Suggest the setting that an unknown name means."""

import difflib
from collections.abc import Iterable

MAX_SUGGESTIONS = 3
FLAGS = ("dry-run", "replay", "resume")
"""Options of `train` that are not settings."""

OF_ASYNC = ("schedule", "roles")
"""Sections that only rl-async-trainer has."""

OF_ROUTERS = ("aux_loss", "z_loss", "bias_update")
"""Parts of the names that Megatron and others give to a mixture's router losses and bias updates."""

MIN_LIKENESS = 0.7
"""Minimum similarity of the last parts of two names, or of two sections."""

OTHER_NAMES = {
    "adv_estimator": "algorithm.advantage",
    "apply_chat_template_kwargs": "prompts.template_options",
    "batch_size": "rollout.prompts_per_step",
    "beta": "algorithm.kl_coefficient",
    "chat_template_kwargs": "prompts.template_options",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "cliprange_value": "critic.value_clip",
    "context_parallel_size": "parallel.context",
    "critic_warmup": "critic.head_start_steps",
    "custom_reward_function.path": "reward.function",
    "enable_gradient_checkpointing": "learner.recompute",
    "entropy_coeff": "algorithm.entropy_coefficient",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "trainer.validate_every",
    "experiment_name": "run.name",
    "expert_model_parallel_size": "parallel.expert",
    "filter_groups.enable": "refill.filter",
    "filter_overlong_prompts": "prompts.overlong",
    "free_cache_engine": "rollout.sleep",
    "fsdp_size": "parallel.ranks",
    "generation_batch_size": "rollout.prompts_per_step",
    "grad_clip": "learner.clip_grad",
    "gradient_checkpointing": "learner.recompute",
    "kl_coef": "algorithm.kl_coefficient",
    "kl_loss_coef": "algorithm.kl_coefficient",
    "kl_loss_type": "algorithm.kl_estimator",
    "kl_penalty": "algorithm.kl_estimator",
    "lora_alpha": "lora.alpha",
    "lora_rank": "lora.rank",
    "loss_agg_mode": "algorithm.aggregation",
    "loss_mode": "algorithm.policy_loss",
    "lr": "learner.learning_rate",
    "lr_warmup_steps": "learner.warmup_steps",
    "max_completion_length": "rollout.max_response_tokens",
    "max_grad_norm": "learner.clip_grad",
    "max_num_gen_batches": "refill.max_rounds",
    "max_prompt_length": "prompts.max_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_steps": "trainer.steps",
    "megatron.tensor_model_parallel_size": "parallel.tensor",
    "model": "policy.path",
    "model.path": "policy.path",
    "model_path": "policy.path",
    "n": "rollout.group_size",
    "n_gpus_per_node": "parallel.ranks",
    "num_generations": "rollout.group_size",
    "num_iterations": "trainer.epochs",
    "num_train_epochs": "trainer.steps",
    "optimizer_offload": "learner.offload_optimizer",
    "output_dir": "run.directory",
    "param_offload": "trainer.offload",
    "per_device_train_batch_size": "learner.micro_batch_tokens",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "ppo_epochs": "trainer.epochs",
    "ppo_max_token_len_per_gpu": "learner.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "learner.micro_batch_tokens",
    "ppo_mini_batch_size": "trainer.minibatches",
    "project_name": "metrics.wandb_project",
    "report_to": "metrics.trackers",
    "reward_funcs": "reward.function",
    "reward_weights": "reward.parts",
    "rollout.name": "rollout.engine",
    "rollout_is": "correction.weights",
    "save_freq": "trainer.checkpoint_every",
    "save_steps": "trainer.checkpoint_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "strategy": "policy.learner",
    "target_kl": "algorithm.kl_target",
    "tensor_model_parallel_size": "engine.tensor_parallel_size",
    "test_freq": "trainer.validate_every",
    "total_epochs": "trainer.steps",
    "total_training_steps": "trainer.steps",
    "train_batch_size": "rollout.prompts_per_step",
    "train_files": "prompts.train",
    "ulysses_sequence_parallel_size": "parallel.context",
    "use_kl_in_reward": "algorithm.kl_in",
    "use_kl_loss": "algorithm.kl_in",
    "val_before_train": "trainer.validate_first",
    "val_files": "prompts.validation",
    "val_kwargs.n": "prompts.validation_samples",
    "val_kwargs.temperature": "prompts.validation_temperature",
    "vllm_enable_sleep_mode": "rollout.sleep",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "engine.tensor_parallel_size",
}
"""Names of settings in verl and TRL, by their last part, or by their last two."""


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint such as " Did you mean 'trainer.steps' or 'skip.steps'?"; empty if nothing is similar.

    Names of verl and TRL come from a table. Others are compared by their last part, then by section;
    ties keep the order of use.

    Args:
        name: The unknown name.
        known: Names of all settings, in the order of use.
    """
    names = list(known)
    section, _, ending = name.rpartition(".")
    flags = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.8)
    if flags:
        return f" Did you mean --{flags[0]}?"
    if section in OF_ASYNC and not any(one.startswith(f"{section}.") for one in names):
        return f" [{section}] is a section of rl-async-trainer."
    if any(part in ending for part in OF_ROUTERS):
        return " The learners add no router loss and do not change the router's bias. Leave it out."
    if ending.startswith("resume_"):
        return " Did you mean --resume?"
    if found_elsewhere := _of_other_libraries(name, names):
        return f" Did you mean {found_elsewhere!r}?"
    likeness = {one: _likeness(ending, one.rpartition(".")[2]) for one in names}
    best = max(likeness.values(), default=0.0)
    found = [one for one in names if likeness[one] == best] if best >= MIN_LIKENESS else []
    if best < 1:  # the name may be a section
        found = [one for one in names if one.startswith(f"{name}.")] or found
    if section:
        near = [one for one in found if _likeness(section, one.rpartition(".")[0]) >= MIN_LIKENESS]
        own = [one for one in names if one.rpartition(".")[0] == section and likeness[one] >= MIN_LIKENESS]
        found = near or [*sorted(own, key=lambda one: -likeness[one]), *found]
        found.sort(key=lambda one: -_likeness(section, one.rpartition(".")[0]))  # stable: the most used first
    found = found or difflib.get_close_matches(name, names, n=1)
    shown = [repr(one) for one in found[:MAX_SUGGESTIONS]]
    last = shown.pop() if shown else ""
    return f" Did you mean {', '.join(shown)}{' or ' if shown else ''}{last}?" if last else ""


def _of_other_libraries(name: str, names: list[str]) -> str | None:
    """The setting for a name of verl or TRL, whatever its section; a critic's name leads to the critic's setting."""
    section, _, ending = name.rpartition(".")
    tail = ".".join(name.split(".")[-2:])
    if tail in names:  # the end of a longer name, such as actor_rollout_ref.rollout.temperature
        return tail
    if any(_likeness(section, one.rpartition(".")[0]) >= MIN_LIKENESS for one in names if one.endswith(f".{ending}")):
        return None  # one of our own sections, misspelled
    meant = OTHER_NAMES.get(tail) or OTHER_NAMES.get(ending)
    own = f"critic.{meant.rpartition('.')[2]}" if meant and section.split(".")[0] == "critic" else ""
    return own if own in names else meant


def _likeness(name: str, other: str) -> float:
    """Similarity from 0 to 1."""
    return difflib.SequenceMatcher(None, name, other).ratio()
