"""Arguments for vLLM's engine."""

from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from rl_rollout.engines.model_folder import max_positions
from rl_rollout.engines.options import VLLMOptions
from rl_rollout.engines.vllm.support import LORA_RANKS, target_modules
from rl_rollout.engines.weight_checks import Shapes


def engine_arguments(model_dir: Path, options: VLLMOptions, shapes: Shapes) -> EngineArgs:
    """Return the arguments of vLLM's engine.

    Args:
        model_dir: A Hugging Face folder.
        options: The engine's options.
        shapes: The model's tensors.
    """
    is_cpu = current_platform.is_cpu()
    kv_cache_gib = 1.0 if options.kv_cache_gib is None and is_cpu else options.kv_cache_gib
    return EngineArgs(
        model=str(model_dir),
        skip_tokenizer_init=True,
        load_format="safetensors",
        use_tqdm_on_load=False,
        dtype=options.dtype,
        tensor_parallel_size=options.tensor_parallel_size,
        distributed_executor_backend="mp" if options.tensor_parallel_size > 1 else None,
        max_model_len=(options.max_model_len or max_positions(model_dir)) + 1,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_logprobs=options.max_top_k,
        kv_cache_memory_bytes=None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
        gpu_memory_utilization=options.gpu_memory_utilization,
        block_size=32 if options.block_size is None and is_cpu else options.block_size,
        enable_prefix_caching=options.enable_prefix_caching,
        enforce_eager=options.enforce_eager,
        seed=options.seed,
        enable_sleep_mode=options.can_sleep and not is_cpu,
        logprobs_mode="processed_logprobs",
        async_scheduling=False,
        disable_log_stats=True,
        worker_extension_cls="rl_rollout.engines.vllm.worker.WorkerExtension",
        kv_transfer_config=_prompt_sharing() if is_cpu and options.enable_prefix_caching else None,
        trust_remote_code=False,
        mm_device_do_normalize=False,  # our pixel values are normalized
        mm_processor_cache_gb=0,  # we keep them ourselves
        skip_mm_profiling=True,  # vLLM's processor would make its images
        **_lora_arguments(options, shapes),
    )


def _prompt_sharing() -> KVTransferConfig:
    module = "rl_rollout.engines.vllm.prompt_sharing"
    return KVTransferConfig(kv_connector="PromptSharing", kv_connector_module_path=module, kv_role="kv_consumer")


def _lora_arguments(options: VLLMOptions, shapes: Shapes) -> dict[str, Any]:
    if not options.max_lora_rank:
        return {}
    num_slots = options.max_adapters + 1  # the last one stays empty
    return {
        "enable_lora": True,
        "max_loras": num_slots,
        "max_cpu_loras": num_slots,
        "max_lora_rank": min(rank for rank in LORA_RANKS if rank >= options.max_lora_rank),
        "lora_target_modules": list(target_modules(options, shapes)),
    }
