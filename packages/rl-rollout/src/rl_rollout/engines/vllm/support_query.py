"""A script for a child process that prints the features of the installed vLLM as a line of JSON. It loads no model."""

import json
import sys
from typing import Any, get_args

from rl_rollout.engines.options import DType
from rl_rollout.engines.vllm.environment import prepare_environment

LARGEST_HEAD = 512


def main() -> None:
    """Print the fields of `VLLMSupport`."""
    prepare_environment()
    from vllm import ModelRegistry, __version__
    from vllm.platforms import current_platform

    is_cpu = current_platform.is_cpu()
    found: dict[str, Any] = {
        "name": f"vLLM {__version__} on {current_platform.device_type}",
        "num_devices": None if is_cpu else current_platform.device_count(),
    }
    try:
        backends = {dtype: _backends(dtype) for dtype in get_args(DType)}
        found["head_sizes"] = {dtype: list(sizes) for dtype, sizes in backends.items()}
        if is_cpu:  # CPUs have one backend
            found["block_sizes"] = _block_sizes(next(iter(backends["float32"].values())))
        found["architectures"] = sorted(ModelRegistry.get_supported_archs())
    except (AttributeError, TypeError) as error:  # an untested vLLM version; problems appear when it starts
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def _backends(dtype: str) -> dict[int, Any]:
    """Return the attention backend that vLLM chooses for each head size; None if it supports none."""
    import torch
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.selector import AttentionSelectorConfig

    kind = getattr(torch, dtype)
    found = {}
    for size in range(1, LARGEST_HEAD + 1):
        asked = AttentionSelectorConfig(head_size=size, dtype=kind, kv_cache_dtype="auto", block_size=None)
        try:
            backend = resolve_obj_by_qualname(current_platform.get_attn_backend_cls(None, asked, num_heads=1))
        except (ValueError, ImportError, NotImplementedError):
            continue
        if backend.supports_head_size(size) and backend.supports_dtype(kind):
            found[size] = backend
    return found


def _block_sizes(backend: Any) -> list[int]:
    """Return the sizes that a block's size must be a multiple of."""
    return [getattr(size, "base", size) for size in backend.get_supported_kernel_block_sizes()]


if __name__ == "__main__":
    main()
