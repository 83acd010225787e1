"""A learner's checkpoint: safetensors under Hugging Face names, and JSON.

`policy/` is a Hugging Face folder; `optimizer/` has Adam's moments, and `master.safetensors` the float32
weights of a bfloat16 policy. All names are Hugging Face's, so that a checkpoint loads into any learner and any
parallel layout. Nothing in it can run code.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_core.errors import CheckpointError
from rl_distill.hf_folder import read_policy_tensors, read_tensors, tensor_shapes, write_policy_folder, write_tensors
from rl_distill.options import LearnerOptions
from rl_distill.policy_config import PolicyConfig

FORMAT_VERSION = 1
LEARNER_FILE = "learner.json"
POLICY_FOLDER = "policy"
MASTER_FILE = "master.safetensors"
MOMENT_FILES = {"exp_avg": "optimizer/exp_avg.safetensors", "exp_avg_sq": "optimizer/exp_avg_sq.safetensors"}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """Everything that a learner continues from; tensors by Hugging Face name.

    Attributes:
        step: Optimizer steps done.
        weights: In the policy's dtype.
        exp_avg: Adam's first moments, float32.
        exp_avg_sq: Adam's second moments, float32.
        master: float32 weights of a bfloat16 policy, else None.
    """

    step: int
    weights: Mapping[str, Tensor]
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]
    master: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySource:
    """Where a policy came from.

    Attributes:
        config_json: Its config.json.
        config: What that says.
        policy_dir: Its Hugging Face folder, None for a random one.
    """

    config_json: Mapping[str, Any]
    config: PolicyConfig
    policy_dir: Path | None


def write_checkpoint(directory: Path, state: LearnerState, *, source: PolicySource, options: LearnerOptions) -> None:
    """Write a learner's state.

    Args:
        directory: Is made where it does not exist, and must be empty.
        state: What to write.
        source: The policy's configuration and tokenizer.
        options: Recorded for the reader.

    Raises:
        CheckpointError: The directory has files in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise CheckpointError(f"{directory} must be empty to save into it; give a new directory.")
    policy_dir = directory / POLICY_FOLDER
    write_policy_folder(policy_dir, source.config_json, state.weights, source_dir=source.policy_dir)
    for name, file in MOMENT_FILES.items():
        write_tensors(directory / file, getattr(state, name))
    if state.master is not None:
        write_tensors(directory / MASTER_FILE, state.master)
    header = {
        "format_version": FORMAT_VERSION,
        "step": state.step,
        "config_digest": source.config.digest,
        "options": asdict(options),
    }
    # Last, so that a folder that was cut short has no learner.json.
    (directory / LEARNER_FILE).write_text(json.dumps(header, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_checkpoint(directory: Path, *, config: PolicyConfig, dtype: str) -> LearnerState:
    """Read what `write_checkpoint` wrote.

    Args:
        directory: The checkpoint.
        config: The policy that continues.
        dtype: Its dtype, "float32" or "bfloat16".

    Raises:
        CheckpointError: Missing, torn, of another policy or dtype; names file and tensor.
    """
    header = _read_header(directory / LEARNER_FILE)
    if header["config_digest"] != config.digest:
        raise CheckpointError(
            f"{directory} is a checkpoint of another model: its configuration has digest {header['config_digest']}, "
            f"this policy {config.digest}. Load it with the policy that it was saved from."
        )
    if header["dtype"] != dtype:
        raise CheckpointError(
            f"{directory} was saved with dtype = {header['dtype']!r}; this learner has {dtype!r}. "
            f"Set dtype = {header['dtype']!r}, or start a new run from {directory / POLICY_FOLDER}."
        )
    shapes = tensor_shapes(config)
    weights = read_policy_tensors(directory / POLICY_FOLDER, config, dtype=DTYPES[dtype], error=CheckpointError)
    moments = {name: read_tensors(directory / file, shapes, dtype=torch.float32) for name, file in MOMENT_FILES.items()}
    master = None
    if dtype != "float32":
        master = read_tensors(directory / MASTER_FILE, shapes, dtype=torch.float32)
    return LearnerState(step=header["step"], weights=weights, master=master, **moments)


def _read_header(path: Path) -> dict[str, Any]:
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; {path.parent} is no complete checkpoint.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is torn: {error}.") from error
    try:
        version, step = header["format_version"], header["step"]
        header["dtype"] = header["options"]["dtype"]
        is_valid = isinstance(step, int) and step >= 0 and isinstance(header["config_digest"], str)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} lacks {error}; it was not written by a learner.") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format_version {version}; this release reads {FORMAT_VERSION}.")
    if not is_valid:
        raise CheckpointError(f"{path} must have a step >= 0 and a config_digest; found step {step!r}.")
    return dict(header)
