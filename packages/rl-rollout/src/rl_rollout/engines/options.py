"""Options of the engines. Importing this module loads no engine."""

from pathlib import Path
from typing import Any, Literal

from rl_core.record_fields import NonNegativeInt, PositiveFloat, PositiveInt, settings_record
from rl_core.registry import Registry

DType = Literal["float32", "bfloat16", "float16"]


@settings_record
class VLLMOptions:
    """How vLLM runs.

    Attributes:
        dtype: Computation dtype. float32 matches a float32 learner to 1e-5; bfloat16 is usual on GPUs.
        tensor_parallel_size: Processes that share the model, each with a part of every layer (and its own GPU). Must
            divide the model's number of attention heads. 1 starts no extra process.
        max_model_len: Maximum length of prompt and response in tokens; none uses the model's maximum.
        max_num_seqs: Maximum number of sequences decoded at once.
        max_num_batched_tokens: Maximum tokens per engine step; limits the memory of a step.
        kv_cache_gib: Size of the KV cache in GiB. none uses 1 on CPUs, and on GPUs whatever gpu_memory_utilization
            leaves.
        gpu_memory_utilization: Share of the GPU's memory that the engine may use, including weights.
        block_size: Tokens per KV cache block, the unit of prefix caching. none uses 32 on CPUs, and vLLM's choice on
            GPUs.
        enable_prefix_caching: Compute a prompt once for all its samples: whole blocks on GPUs, the entire prompt on
            CPUs.
        enforce_eager: Run the model without compiling it. false compiles; on CPUs that takes minutes and gains nothing.
        can_sleep: Allow the engine to free GPU memory for a learner that trains on the same GPU; uses vLLM's own memory
            pool. Has no effect on CPUs.
        max_top_k: Maximum number of top logprobs per scored token, up to the vocabulary size.
        capture_experts: Record which experts each token used in a mixture, so that the Megatron learner can replay the
            routing. Needs enforce_eager on GPUs; has no effect on dense models.
        max_lora_rank: Maximum rank of an adapter that the engine can serve; 0 serves no adapter. Trainers set it from
            [lora].
        max_adapters: Maximum number of adapters that the engine serves at once, by name. Each takes the memory of one
            of max_lora_rank.
        lora_target_modules: Modules that an adapter may change, by the last part of their Hugging Face name, such as
            "q_proj". If vLLM fuses modules, naming one covers all of them.
        num_threads: CPU threads of the engine, over all its processes; none uses torch's number at the start.
        seed: Seed for requests without their own.
        image_folder: Folder with the images of requests (`rl_core.images`); none accepts no images. Trainers set it.
    """

    dtype: DType = "float32"
    tensor_parallel_size: PositiveInt = 1
    max_model_len: PositiveInt | None = None
    max_num_seqs: PositiveInt = 512
    max_num_batched_tokens: PositiveInt = 8192
    kv_cache_gib: PositiveFloat | None = None
    gpu_memory_utilization: PositiveFloat = 0.8
    block_size: PositiveInt | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = True
    can_sleep: bool = False
    max_top_k: NonNegativeInt = 20
    capture_experts: bool = True
    max_lora_rank: NonNegativeInt = 0
    max_adapters: PositiveInt = 1
    lora_target_modules: tuple[str, ...] = ()
    num_threads: PositiveInt | None = None
    seed: int = 0
    image_folder: Path | None = None


@settings_record
class TransformersOptions:
    """How the transformers engine runs.

    Attributes:
        dtype: Computation dtype.
        device: torch device, such as "cpu" or "cuda"; "auto" uses the GPU that the engine's process sees, if any.
        max_model_len: Maximum length of prompt and response in tokens; none uses the model's maximum.
        max_num_seqs: Maximum number of sequences in a batch; others wait until it is finished.
        max_lora_rank: As in `VLLMOptions`; needs peft.
        max_adapters: As in `VLLMOptions`.
        lora_target_modules: As in `VLLMOptions`; empty allows every linear layer but the head.
        seed: Seed for requests without their own.
        image_folder: As in `VLLMOptions`.
    """

    dtype: DType = "float32"
    device: str = "auto"
    max_model_len: PositiveInt | None = None
    max_num_seqs: PositiveInt = 512
    max_lora_rank: NonNegativeInt = 0
    max_adapters: PositiveInt = 1
    lora_target_modules: tuple[str, ...] = ()
    seed: int = 0
    image_folder: Path | None = None


_ENGINES: Registry[Any] = Registry(
    "engine",
    {
        "vllm": "rl_rollout.engines.vllm:VLLMEngine",
        "transformers": "rl_rollout.engines.transformers:TransformersEngine",
        "scripted": "rl_rollout.engines.scripted:ScriptedEngine",
    },
    group="rl_rollout.engines",
)


def known_engines() -> list[str]:
    """Return all names, sorted."""
    return _ENGINES.names()


def engine_class(name: str) -> Any:
    """Import and return the engine class of this name. Most take a model folder and options.

    Raises:
        SettingsError: The name is unknown. The message lists the known names.
    """
    return _ENGINES.get(name)
