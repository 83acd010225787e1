"""Policies with random weights for benchmarks/gpu.py: what fits on a GPU, and their folders. Does not need torch."""

import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from _gpu_plan import GIB
from _learner_workload import Rows

from rl_core.files.locked_folders import locked_folder, remove_unlocked_folders
from rl_core.weights import SHARED_MEMORY
from rl_distill import kept_activations
from rl_distill.architecture.policy_config import parse_policy_config
from rl_distill.architecture.tensor_shapes import count_parameters, forward_flops, tensor_shapes
from rl_distill.options import LearnerOptions, ParallelOptions

TRAINED_BYTES = 20
"""Bytes per parameter in transformers: bfloat16 weight and gradient, float32 weight, gradient and two moments."""
OUR_TRAINED_BYTES = 18
"""Bytes per trained parameter in our learner, which has no bfloat16 gradient."""
RESERVE_BYTES = 9 * GIB
"""Bytes for the CUDA context, chunks of logits, and activations with full recomputation."""
USABLE = 0.96
"""Share of a GPU's memory that torch can use."""
PLACES = (SHARED_MEMORY, Path(tempfile.gettempdir()))
"""Places for folders of weights, the best first."""
PREFIX = "rl-gpu-"
_ONE = 0x3F80
"""The bits of 1.0 in bfloat16."""
_TILE = 2**24 + 43
"""Number of random values that are repeated; no two rows of a matrix start at the same one."""


def fitted(config: Mapping[str, Any], *, memory_bytes: int | None) -> dict[str, Any]:
    """Return the shape with as many layers as can be trained on a GPU.

    Args:
        config: The policy's config.json.
        memory_bytes: Memory of the GPU; None for a CPU, which keeps all layers.
    """
    found = dict(config)
    while memory_bytes is not None and found["num_hidden_layers"] > 1:
        if TRAINED_BYTES * num_parameters(found) + RESERVE_BYTES <= USABLE * memory_bytes:
            break
        found["num_hidden_layers"] -= 1
    return found


def num_parameters(config: Mapping[str, Any]) -> int:
    """Return the number of a policy's parameters; a tied head counts once."""
    return count_parameters(parse_policy_config(dict(config))).total


def step_flops(config: Mapping[str, Any], rows: Rows) -> float:
    """Return the FLOPs of a step, three times those of its forward pass; a shared prompt counts once."""
    policy = parse_policy_config(dict(config))
    _, firsts = np.unique(rows.prompts, return_index=True)
    repeated = np.delete(rows.prompt_lengths, firsts)
    return 3 * (forward_flops(policy, rows.lengths.tolist()) - forward_flops(policy, repeated.tolist()))


def free_for_activations(config: Mapping[str, Any], *, memory_bytes: int, trained_bytes: int = TRAINED_BYTES) -> float:
    """Return the bytes of a GPU that a policy in training leaves free, given the bytes per parameter."""
    return USABLE * memory_bytes - trained_bytes * num_parameters(config) - RESERVE_BYTES / 2


def recomputed_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Activations that our learner recomputes in selective mode: the largest ones."""
    return ("layernorm", "moe" if "num_experts" in config else "mlp")


def our_activation_bytes(config: Mapping[str, Any], num_tokens: int, *, is_selective: bool) -> float:
    """Return the bytes that a micro-batch of our learner keeps for its backward pass."""
    found = dict(config)
    if is_selective and "num_experts" in config:  # without its experts a layer keeps what a dense one does
        found |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    options = LearnerOptions(
        dtype="bfloat16",
        micro_batch_tokens=num_tokens,
        recompute="selective" if is_selective else "none",
        recompute_modules=("layernorm", "mlp"),
    )
    (kept,) = kept_activations(parse_policy_config(found), ParallelOptions(), options)
    return kept


def activation_bytes(config: Mapping[str, Any], num_tokens: int) -> float:
    """Estimate the bytes that a micro-batch of megatron keeps without recomputation, in bfloat16.

    The estimate only selects what to try first.
    """
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    per_token = 8 * hidden + 4 * (queries + 2 * keys)
    if "num_experts" in config:
        per_token += config["num_experts_per_tok"] * (3 * hidden + 4 * config["moe_intermediate_size"])
    else:
        per_token += 4 * config["intermediate_size"]
    return 2.0 * num_tokens * float(per_token * config["num_hidden_layers"])


def write_policy(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json and random bfloat16 weights, as fast as the disk or shared memory allows."""
    shapes = tensor_shapes(parse_policy_config(dict(config)))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    values = np.random.default_rng(0).standard_normal(_TILE, dtype=np.float32) * config["initializer_range"]
    tile = (values.view(np.uint32) >> 16).astype(np.uint16)
    place = 0
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            left = math.prod(shape)
            if len(shape) == 1:
                file.write(np.full(left, _ONE, dtype=np.uint16).tobytes())
                continue
            while left:
                part = tile[place : place + left]
                file.write(memoryview(part))
                left, place = left - len(part), (place + len(part)) % _TILE


class Policies:
    """Folders of policies, kept until `close`; folders of a killed process are removed by the next one."""

    def __init__(self) -> None:
        """Write none yet."""
        self._folders: dict[str, Path] = {}
        self._made = ExitStack()
        for place in PLACES:
            remove_unlocked_folders(place.glob(f"{PREFIX}*"))

    def folder(self, config: Mapping[str, Any]) -> Path:
        """Return a policy's folder, in shared memory if there is space, else in the temporary folder.

        Raises:
            OSError: There is not enough space.
        """
        key = json.dumps(dict(config), sort_keys=True)
        if key not in self._folders:
            place = _place(2 * num_parameters(config))
            made = self._made.enter_context(locked_folder(place, PREFIX, mode=0o700))
            write_policy(made / "policy", config)
            self._folders[key] = made / "policy"
        return self._folders[key]

    def close(self) -> None:
        """Remove all folders."""
        self._made.close()


def _place(num_bytes: int) -> Path:
    for place in PLACES:
        if place.is_dir() and shutil.disk_usage(place).free > 1.2 * num_bytes:
            return place
    wanted = " or ".join(map(str, PLACES))
    raise OSError(f"a policy of {num_bytes / 1e9:.1f} GB needs space in {wanted}. Set TMPDIR to a larger folder.")
