"""Settings that may differ on resume, because they do not change what the run learns."""

CHANGEABLE_BY_SECTION = {
    "run": ("if_exists", "readable_by"),
    "trainer": (
        *("steps", "validate_every", "validate_first", "checkpoint_every", "keep_checkpoints"),
        *("keep_best", "target", "target.metric", "target.value", "target.stop", "target.lower_is_better"),
        *("stop_when_no_better", "background_checkpoints", "proof_tolerance"),
    ),
    "prompts": ("validation_limit", "validation_samples", "validation_temperature"),
    "reward": ("timeout_s", "max_concurrency", "max_calls_per_s", "retries", "backoff_s", "retry_on"),
    "rollout": (
        *("audit_share", "rescored_share", "placement", "offload_engine", "offload_keeps_weights"),
        *("deadline_s", "start_deadline_s"),
    ),
    "rollout_cache": (
        *("enabled", "directory", "steps", "action", "on_mismatch", "on_broken", "rewards", "max_bytes", "compress"),
        "validation",
    ),
    "weights": ("transport", "host", "bucket_mib", "deadline_s"),
    "replicas": ("count", "cpus", "gpus", "restarts"),
    "cluster": ("ray_address", "cpus_per_rank", "start_deadline_s", "call_deadline_s"),
    "vllm": ("max_num_seqs", "max_num_batched_tokens", "kv_cache_gib", "gpu_memory_utilization", "num_threads"),
    "optimizer": ("num_threads",),
    "lora": ("serving",),
    "metrics": (
        *("console", "strict", "log_val_generations", "log_rollouts", "log_rollout_tokens", "probes", "probe_tokens"),
        *("peak_tflops", "details_every", "replay_rows", "report", "report_every", "trace_memory", "trackers"),
        *("wandb_project", "mlflow_uri", "mlflow_experiment"),
    ),
    "health": ("enabled", "every", "pause_on", "thresholds", "off"),
    "distillation": ("cache", "deadline_s", "start_deadline_s"),
    "distillation.teachers.NAME": (
        *("replicas", "resources.cpus", "resources.gpus", "placement", "max_model_len", "tensor"),
        *("max_batch_tokens", "num_threads", "kv_cache_gib", "gpu_memory_utilization", "sleep", "restarts"),
    ),
}
