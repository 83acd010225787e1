"""Options of the engines; importing this loads no engine."""

from typing import Literal

from rl_core.record_fields import settings_record

DType = Literal["float32", "bfloat16", "float16"]


@settings_record
class VLLMOptions:
    """How vLLM runs.

    Attributes:
        dtype: What it computes in; float32 matches a float32 learner to 1e-5, bfloat16 is usual on GPUs.
        tensor_parallel_size: Processes that share the model, each with a part of every layer, on GPUs each with its
            own; must divide the model's attention heads. 1 starts no process.
        max_model_len: Most tokens of prompt and response together; None takes what the model allows.
        max_num_seqs: Samples decoded at once.
        max_num_batched_tokens: Tokens of one engine step; bounds the memory of a step.
        kv_cache_gib: Memory of the KV cache; None takes 1 on CPUs, and on GPUs what gpu_memory_utilization leaves.
        gpu_memory_utilization: Share of the GPU's memory that the engine may use, weights included.
        block_size: Tokens of a KV cache block, and of what prefix caching shares; None takes 32 on CPUs, and what
            vLLM chooses on GPUs.
        enable_prefix_caching: Compute a prompt once for all samples that have it: whole blocks of it on GPUs, all of
            it on CPUs.
        enforce_eager: Run the model without compiling it; False compiles for minutes on CPUs, and gains nothing there.
        can_sleep: Let the engine free the GPU's memory for a learner on it while that trains; costs vLLM's own memory
            pool. Nothing on CPUs.
        max_top_k: Most likeliest tokens that it can give beside each scored token; up to the vocabulary.
        capture_experts: Report which experts of a mixture each token used, for the Megatron learner to replay them; on
            GPUs it needs enforce_eager. Nothing for dense models.
        max_lora_rank: Largest rank of an adapter that it can serve; 0 serves the model's weights alone. Trainers
            take [lora]'s.
        lora_target_modules: Modules that an adapter may change, by the last part of their Hugging Face name, such as
            "q_proj"; of those that vLLM joins, one stands for all.
        num_threads: CPU threads of the engine, of all its processes together; None takes torch's count at the start.
        seed: Of the draws of requests that have none.
    """

    dtype: DType = "float32"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 8192
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.8
    block_size: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = True
    can_sleep: bool = False
    max_top_k: int = 20
    capture_experts: bool = True
    max_lora_rank: int = 0
    lora_target_modules: tuple[str, ...] = ()
    num_threads: int | None = None
    seed: int = 0


@settings_record
class TransformersOptions:
    """How the transformers engine runs.

    Attributes:
        dtype: What it computes in.
        device: torch device, such as "cpu" or "cuda"; "auto" takes the GPU of the engine's process, where it sees one.
        max_model_len: Most tokens of prompt and response together; None takes what the model allows.
        max_num_seqs: Samples of one batch; more wait for it to finish.
        max_lora_rank: As `VLLMOptions`'s; needs peft.
        lora_target_modules: As `VLLMOptions`'s; none allows every linear layer but the head.
        seed: Of the draws of requests that have none.
    """

    dtype: DType = "float32"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 512
    max_lora_rank: int = 0
    lora_target_modules: tuple[str, ...] = ()
    seed: int = 0
