"""Another value of every setting, with the settings beside which it acts. The walk over settings reads this table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Other:
    """Another value of a setting.

    Attributes:
        value: The value.
        beside: Settings of both runs that are compared.
        says: What a refusal says in place of the setting's name.
        found: What both find: "run" (another run in their folder), "cache" (a stored step) or "broken" (a damaged one).
        is_supervised: Both run as from a shell, with children that are killed at once.
    """

    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)
    says: str = ""
    found: Literal["nothing", "run", "cache", "broken"] = "nothing"
    is_supervised: bool = False


CRITIC = {"algorithm.advantage": "gae"}
KL = {"algorithm.kl_coefficient": 0.1}
PROCESS = {"rollout.placement": "process"}
RANKS = {"cluster.placement": "process"}
TWO_RANKS = {**RANKS, "parallel.ranks": 2}
FOUR_RANKS = {**RANKS, "parallel.ranks": 4, "parallel.pipeline": 2, "parallel.tensor": 2}
TENSOR = {**TWO_RANKS, "parallel.tensor": 2}
RAY_RANKS = {"cluster.placement": "ray"}
NETWORK = {**PROCESS, "weights.transport": "tcp"}
LORA = {"lora.rank": 2}
SKIP = {"rollout_cache.enabled": True, "rollout_cache.directory": "{folder}/runs/cache"}
REFILL = {"dynamic_sampling.filter": "reward_spread"}
DATED = {
    "prompts.plain_prompts": "chat",
    "prompts.max_tokens": 32,
    "prompts.template_options": '{ stamp = "%d" }',
    "prompts.date": "2020-01-02",
}
RETRY = {"reward.on_failure": "retry"}
CORRECTED = {"algorithm.old_logprobs": "recompute", "correction.weights": "token"}
TEACHER = {"distillation.teachers.t.model": "{folder}/teacher", "distillation.top_k": 4}
TEACHERS = {
    **TEACHER,
    "distillation.default_teacher": "t",
    "distillation.teachers.u.model": "{folder}/teacher",
    "distillation.teachers.u.data_sources": ["of_0"],
}
TWO_TEACHERS = {
    **TEACHER,
    "distillation.default_teacher": "u",
    "distillation.teachers.t.data_sources": ["of_0"],
    "distillation.teachers.u.model": "{folder}/policy",
}
SELF = {
    "distillation.self_teacher.model": "policy",
    "distillation.self_teacher.prompts": '["{best_response}", "{prompt}{prompt}"]',
    "distillation.top_k": 4,
}
MEGATRON = {**TEACHER, "distillation.teachers.t.engine": "megatron"}
ROLES = {"roles.placement": "process"}
ROLES_OF_TEACHERS = {**ROLES, **TEACHER}
MIXTURE = {"policy.path": "{folder}/mixture"}
TWO_STEPS = {"trainer.steps": 2}
TARGET = {"trainer.target.value": 0.9}
CONSTANT = {"reward.function": "{folder}/reward.py:constant", "trainer.steps": 7, "health.every": 1}
PARTS = '[{ function = "{folder}/reward.py:reward", weight = 1.0 }]'


def other(value: Any, *contexts: Mapping[str, Any], **beside: Any) -> Other:
    """Return another value; `trainer__steps=2` is a setting of both runs."""
    chosen = {name: one for context in contexts for name, one in context.items()}
    return Other(value=value, beside=chosen | {name.replace("__", "."): one for name, one in beside.items()})


ALTERNATIVES: Mapping[str, Other] = {
    "run.name": other("another"),
    "run.directory": other("{folder}/runs/below"),
    "run.seed": other(1),
    "run.if_exists": Other(value="archive", found="run"),
    "run.readable_by": other("group"),
    "policy.path": other("{folder}/teacher"),
    "policy.backend": other("transformers"),
    "prompts.train": other("{folder}/test.jsonl"),
    "prompts.validation": other("{folder}/test.jsonl"),
    "prompts.test": other("{folder}/validation.jsonl"),
    "prompts.max_tokens": other(3),
    "prompts.overlong": other("drop", prompts__train="{folder}/uneven.jsonl"),
    "prompts.plain_prompts": other("chat", prompts__max_tokens=32),
    "prompts.requires_ground_truth": other(False, prompts__train="{folder}/unanswered.jsonl"),
    "prompts.max_images": other(3),
    "prompts.image_folders": other(["{folder}"]),
    "prompts.image_urls": other(["https://images.example.org/"]),
    "prompts.template_options": other('{ suffix = "+" }', prompts__plain_prompts="chat", prompts__max_tokens=32),
    "prompts.date": other("2021-03-04", DATED),
    "prompts.validation_limit": other(1),
    "prompts.validation_samples": other(2, prompts__validation_temperature=0.7),
    "prompts.validation_temperature": other(0.5),
    "reward.function": other("exact_match"),
    "reward.options": other("{ scale = 0.5 }", reward__function="{folder}/reward.py:scaled"),
    "reward.parts": other(PARTS.replace("1.0", "0.5"), reward__function="", reward__parts=PARTS),
    "reward.timeout_s": other(5.0),
    "reward.max_concurrency": other(3),
    "reward.max_calls_per_s": other(1000.0),
    "reward.on_failure": other("zero"),
    "reward.retries": other(3, RETRY),
    "reward.backoff_s": other(0.25, RETRY),
    "reward.retry_on": other('["raised"]', RETRY),
    "rollout.engine": other("transformers"),
    "rollout.placement": other("process"),
    "rollout.loop": other("tools"),
    "rollout.loop_options": other("{ x = 1 }"),
    "rollout.audit_share": other(0.0),
    "rollout.rescored_share": other(1.0),
    "rollout.offload_engine": other(True),
    "rollout.offload_keeps_weights": Other(
        value=False, beside={"rollout.offload_engine": True}, says="rollout.offload_engine and"
    ),
    "rollout.prompts_per_step": other(1),
    "rollout.group_size": other(3),
    "rollout.max_response_tokens": other(2),
    "rollout.mask_truncated": other(True, rollout__max_response_tokens=2),
    "rollout.temperature": other(0.5),
    "rollout.top_p": other(0.5, rollout__top_k=8),
    "rollout.top_k": other(3),
    "rollout.deadline_s": other(1800.0),
    "rollout.start_deadline_s": other(450.0),
    "trainer.steps": other(2),
    "trainer.minibatches": other(2),
    "trainer.epochs": other(2),
    "trainer.max_skipped_updates": other(4),
    "trainer.offload_learner": other(True),
    "trainer.validate_every": other(2, TWO_STEPS),
    "trainer.validate_first": other(False),
    "trainer.checkpoint_every": other(2, TWO_STEPS, trainer__keep_best=False),
    "trainer.keep_checkpoints": other(1, TWO_STEPS),
    "trainer.background_checkpoints": other(False),
    "trainer.canary_prompts": other(1),
    "trainer.proof_tolerance": other(0.5),
    "trainer.keep_best": other(False, trainer__steps=3, trainer__keep_checkpoints=1, trainer__checkpoint_every=2),
    "trainer.target": other("{ value = 0.9 }"),
    "trainer.target.metric": other("val-core/of_1/reward/mean@1", TARGET),
    "trainer.target.value": other(0.1, TARGET),
    "trainer.target.stop": other(True, TWO_STEPS, TARGET, trainer__target__value=0.1),
    "trainer.target.lower_is_better": other(True, TARGET),
    "trainer.stop_when_no_better": other(1, TWO_STEPS),
    "optimizer.algorithm": other("muon"),
    "optimizer.learning_rate": other(2e-6),
    "optimizer.warmup_steps": other(1),
    "optimizer.decay_steps": other(5),
    "optimizer.decay": other("cosine", optimizer__decay_steps=5),
    "optimizer.min_learning_rate": other(1e-7, optimizer__decay_steps=5),
    "optimizer.betas": other([0.8, 0.9]),
    "optimizer.eps": other(1e-7),
    "optimizer.weight_decay": other(0.1),
    "optimizer.clip_grad": other(0.5),
    "optimizer.micro_batch_tokens": other(64),
    "optimizer.shared_prefix_tokens": other(0),
    "optimizer.products": other("onednn", optimizer__products="torch"),  # "auto" measures which is faster
    "optimizer.dtype": other("bfloat16"),
    "optimizer.recompute": other("full"),
    "optimizer.recompute_modules": other(["mlp"], optimizer__recompute="selective"),
    "optimizer.kernels": other("plain"),
    "optimizer.overlap_grad_reduce": other(True, TWO_RANKS),
    "optimizer.overlap_param_gather": other(
        True, TWO_RANKS, optimizer__overlap_grad_reduce=True, parallel__distributed_optimizer=True
    ),
    "optimizer.offload_optimizer": other(True),
    "optimizer.num_threads": other(1),
    "optimizer.image_folder": other("{folder}"),  # refused, as is the next
    "optimizer.trains_vision": other(True),
    "optimizer.seed": other(1),
    "lora.rank": other(2),
    "lora.alpha": other(3.0, LORA),
    "lora.rslora": other(True, LORA),
    "lora.dropout": other(0.5, LORA),
    "lora.target_modules": other(["q_proj"], LORA),
    "lora.serving": other("merged", LORA),
    "lora.path": other("{folder}/policy", LORA),
    "algorithm.name": other("cispo"),
    "algorithm.advantage": other("rloo", rollout__group_size=4),
    "algorithm.session_rule": other("last_only", rollout__loop="two_parts"),
    "algorithm.policy_loss": other("cispo"),
    "algorithm.clip_low": other(0.1),
    "algorithm.clip_high": other(0.1),
    "algorithm.aggregation": other("seq-mean-token-mean"),
    "algorithm.kl_in": other("reward", KL),
    "algorithm.kl_coefficient": other(0.1),
    "algorithm.kl_estimator": other("k1", KL),
    "algorithm.kl_target": other(0.01, KL, TWO_STEPS),
    "algorithm.kl_horizon": other(10, KL, TWO_STEPS, algorithm__kl_target=0.01),
    "algorithm.entropy_coefficient": other(0.1),
    "algorithm.old_logprobs": other("recompute"),
    "vllm.dtype": other("bfloat16"),
    "vllm.tensor_parallel_size": other(2),
    "vllm.max_model_len": other(32),
    "vllm.max_num_seqs": other(4),
    "vllm.max_num_batched_tokens": other(64),
    "vllm.kv_cache_gib": other(0.5),
    "vllm.gpu_memory_utilization": other(0.5),
    "vllm.block_size": other(16),
    "vllm.enable_prefix_caching": other(False),
    "vllm.enforce_eager": other(False),
    "vllm.can_sleep": other(True),
    "vllm.max_top_k": other(5),
    "vllm.capture_experts": other(False),
    "vllm.max_lora_rank": other(2),
    "vllm.max_adapters": other(2),
    "vllm.lora_target_modules": other(["q_proj"]),
    "vllm.image_folder": other("{folder}"),
    "vllm.num_threads": other(1),
    "vllm.seed": other(1),
    "metrics.console": other("json"),
    "metrics.strict": Other(value=True, says="'actor/made_up' is not defined"),
    "metrics.log_val_generations": other(1),
    "metrics.log_rollouts": other(1),
    "metrics.log_rollout_tokens": other(1),
    "metrics.probe_tokens": other(["1"]),
    "metrics.probes": other(1),
    "metrics.details_every": other(0),
    "metrics.replay_rows": other(0, MIXTURE),
    "metrics.report": other(False),
    "metrics.report_every": other(1),
    "metrics.trace_memory": other(True),
    "metrics.peak_tflops": other(1.0),
    "metrics.trackers": other(["tensorboard"]),
    "metrics.wandb_project": other("mine", {"metrics.trackers": ["wandb"]}),
    "metrics.mlflow_uri": other("sqlite:///x.db", {"metrics.trackers": ["mlflow"]}),
    "metrics.mlflow_experiment": other("mine", {"metrics.trackers": ["mlflow"]}),
    "health.enabled": other(False),
    "health.every": other(5, {**CONSTANT, "health.every": 7}, health__thresholds="{ 'reward_zero.max' = 2.0 }"),
    "health.pause_on": other(["critical"], CONSTANT, health__thresholds="{ 'reward_zero.max' = 2.0 }"),
    "health.thresholds": other("{ 'reward_zero.max' = 2.0 }", CONSTANT),
    "health.off": other(["reward_zero"], CONSTANT, health__thresholds="{ 'reward_zero.max' = 2.0 }"),
    "critic.path": other("{folder}/teacher", CRITIC),
    "critic.learning_rate": other(1e-4, CRITIC),
    "critic.warmup_steps": other(1, CRITIC),
    "critic.clip_grad": other(0.5, CRITIC),
    "critic.value_clip": other(0.1, CRITIC),
    "critic.head_start_steps": other(1, CRITIC),
    "correction.weights": other("token", algorithm__old_logprobs="recompute"),
    "correction.cap": other(1.0001, CORRECTED),
    "correction.floor": other(0.9999, CORRECTED),
    "correction.reject": other("{ token_k1 = [0.99, 1.01] }", algorithm__old_logprobs="recompute"),
    "distillation.teachers": other("{}", TEACHER),
    "distillation.self_teacher": other('{ model = "average" }', distillation__loss="k1"),
    "distillation.self_teacher.model": other("reference", SELF),
    "distillation.self_teacher.prompts": other('["{prompt}{prompt}"]', SELF),
    "distillation.self_teacher.min_reward": other(2.0, SELF),
    "distillation.self_teacher.average_decay": other(0.5, SELF, {"distillation.self_teacher.model": "average"}),
    "distillation.default_teacher": other("u", TEACHERS),
    "distillation.route_by": other("level", TEACHERS),
    "distillation.loss": other("reverse_kl", TEACHER),
    "distillation.distribution": other("full", MEGATRON),
    "distillation.top_k": other(3, TEACHER),
    "distillation.tail": other("drop", TEACHER),
    "distillation.beta": other(0.25, TEACHER, distillation__loss="js"),
    "distillation.used_as": other("reward", TEACHER, distillation__loss="k1"),
    "distillation.coefficient": other(0.5, TEACHER),
    "distillation.use_task_rewards": other(True, TEACHER),
    "distillation.temperature": other(0.5, MEGATRON),
    "distillation.max_loss": other(0.5, TEACHER),
    "distillation.min_logprob": other(-2.0, TEACHER),
    "distillation.other_tokenizer": other("align", TEACHER, {"distillation.teachers.t.model": "{folder}/stranger"}),
    "distillation.texts": other("text", distillation__loss="nll", distillation__texts="kind"),
    "distillation.cache": other("{folder}/runs/scores", TEACHER),
    "distillation.deadline_s": other(1800.0, TEACHER),
    "distillation.start_deadline_s": other(450.0, TEACHER),
    "dynamic_sampling.filter": other("reward_spread"),
    "dynamic_sampling.max_rounds": other(1, REFILL, reward__function="{folder}/reward.py:constant"),
    "rollout_cache.enabled": other(True, rollout_cache__directory="{folder}/runs/cache"),
    "rollout_cache.directory": other("{folder}/runs/other-cache", SKIP),
    "rollout_cache.steps": other("2", SKIP, TWO_STEPS),
    "rollout_cache.action": other("repeat", SKIP, TWO_STEPS, rollout_cache__steps="1"),
    "rollout_cache.on_mismatch": Other(value="regenerate", beside=SKIP | {"run.seed": 1}, found="cache"),
    "rollout_cache.on_broken": Other(value="error", beside=SKIP, found="broken", says=".zarr.zip: "),
    "rollout_cache.rewards": Other(
        value="again",
        beside=SKIP | {"reward.function": "{folder}/reward.py:constant", "rollout_cache.on_mismatch": "accept"},
        found="cache",
    ),
    "rollout_cache.max_bytes": other(1, SKIP),
    "rollout_cache.compress": other(False, SKIP),
    "rollout_cache.validation": other(True, SKIP),
    "replicas.count": other(2, PROCESS),
    "replicas.cpus": other(0.5, PROCESS),
    "replicas.gpus": other(1.0, PROCESS),
    "replicas.restarts": other(4, PROCESS),
    "parallel.ranks": other(2, RANKS),
    "parallel.tensor": other(2, TWO_RANKS),
    "parallel.pipeline": other(2, TWO_RANKS),
    "parallel.virtual_pipeline": other(2, TWO_RANKS, parallel__pipeline=2, policy__path="{folder}/deep"),
    "parallel.context": other(2, TWO_RANKS),
    "parallel.expert": other(2, TWO_RANKS, MIXTURE),
    "parallel.expert_tensor": other(1, TENSOR, MIXTURE, parallel__sequence=True),
    "parallel.sequence": other(True, TENSOR),
    "parallel.distributed_optimizer": other(True, TWO_RANKS),
    "parallel.shard_weights": other(True, TWO_RANKS, policy__backend="transformers"),
    "cluster.placement": other("process"),
    "cluster.cpus_per_rank": other(0.5, RANKS),
    "cluster.gpus_per_rank": other(1.0, RANKS),
    "cluster.ray_address": other("host:6379", RAY_RANKS, cluster__gpus_per_rank=0),
    "cluster.start_deadline_s": other(300.0, RANKS),
    "cluster.call_deadline_s": other(300.0, RANKS),
    "sft.columns": other(["prompt", "answer"]),
    "sft.batch_size": other(3),
    "sft.epochs": other(2),
    "sft.shuffle": other(False),
    "weights.transport": other("tcp", PROCESS),
    "weights.host": other("127.0.0.2", NETWORK),
    "weights.bucket_mib": other(16, NETWORK),
    "weights.deadline_s": other(30.0, NETWORK),
    "schedule.max_staleness": other(1),
    "schedule.sync_every": other(2, TWO_STEPS),
    "schedule.partial_rollout": other(False, TWO_STEPS),
    "schedule.max_inflight_groups": other(2),
    "schedule.validate_on": other("learner"),
    "schedule.validation_batch": other(1),
    "roles.placement": other("process"),
    "roles.rollouter_restarts": other(6, ROLES),
    "roles.learner_restarts": other(6, ROLES),
    "roles.controller_restarts": Other(value=1, beside=ROLES, is_supervised=True),
    "roles.teacher_restarts": other(6, ROLES_OF_TEACHERS),
    "roles.start_deadline_s": other(450.0),
    "roles.heartbeat_deadline_s": other(150.0, ROLES),
    "roles.hang_deadline_s": other(1000.0),
    "roles.on_hang": Other(
        value="report",
        beside={"reward.function": "{folder}/reward.py:hanging", "roles.hang_deadline_s": 0.3},
        says="no progress for",
    ),
    "distillation.teachers.NAME.resources.gpus": Other(value=1.0, beside=TEACHER, says="reserves 1 x 0 CPUs and 1 GPU"),
    **{
        f"distillation.teachers.NAME.{name}": other(value, context)
        for name, value, context in (
            ("model", "{folder}/policy", TEACHER),
            ("engine", "megatron", TEACHER),
            ("replicas", 2, TEACHER),
            ("resources", "{ cpus = 0.5 }", TEACHER),
            ("resources.cpus", 0.5, TEACHER),
            ("data_sources", ["of_1"], TWO_TEACHERS),
            ("placement", "ray", TEACHER),
            ("dtype", "bfloat16", TEACHER),
            ("max_model_len", 40, TEACHER),
            ("tensor", 2, MEGATRON),
            ("max_batch_tokens", 64, TEACHER),
            ("num_threads", 1, TEACHER),
            ("kv_cache_gib", 0.5, TEACHER),
            ("gpu_memory_utilization", 0.5, TEACHER),
            ("sleep", False, TEACHER),
            ("restarts", 4, TEACHER),
        )
    },
}

OF_SFT: Mapping[str, Other] = {
    "trainer.target.stop": other(True, TWO_STEPS, trainer__target__value=100.0),
}
"""Rows in place of these for supervised training."""
