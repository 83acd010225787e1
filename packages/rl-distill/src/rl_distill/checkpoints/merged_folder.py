"""Merge a LoRA adapter into a Hugging Face folder of its base model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from rl_core.errors import DataError
from rl_core.files import preview, temporary_folder
from rl_core.record_fields import converts_arguments
from rl_distill.architecture.lora_targets import adapted_tensor
from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.architecture.tensor_shapes import Shape, tensor_shapes
from rl_distill.checkpoints.checkpoint import DTYPES, fingerprint_tensors
from rl_distill.checkpoints.hf_folder import PolicyTensors, write_policy_folder
from rl_distill.checkpoints.peft_folder import AdapterFolder, opened_adapter
from rl_distill.options import LoraOptions


@converts_arguments
def merge_adapter(adapter_dir: Path, target: Path, *, base: Path | None = None) -> None:
    """Write base + scaling * B @ A one tensor at a time, computed in float32 and stored in the base's dtype.

    Args:
        adapter_dir: Adapter in peft's format. If its `base.json` has a digest, `base` must match it.
        target: Hugging Face folder to write; created if missing. It must not contain weights.
        base: Hugging Face folder of the base model; None for the one that the adapter names.

    Raises:
        DataError: The adapter or the base cannot be used, or the adapter belongs to another base.
        SettingsError: The base's architecture is not supported.
    """
    adapter = AdapterFolder(adapter_dir)
    folder = base if base is not None else _named_base(adapter)
    config_json = read_policy_config(folder)
    config = parse_policy_config(config_json)
    shapes = tensor_shapes(config)
    modules = {adapted_tensor(module, config): module for module in adapter.modules}
    for module, shape in adapter.modules.items():
        found = shapes.get(adapted_tensor(module, config))
        if found != shape:
            raise DataError(
                f"{adapter_dir} adapts {preview(module, most=200)} of shape {list(shape)}; the base model {folder} "
                f"{'has no such matrix' if found is None else f'has shape {list(found)}'}. Name the adapter's own base."
            )
    tensors = PolicyTensors(folder, config)
    _check_base(adapter, folder, tensors)
    write_policy_folder(target, config_json, _merged(tensors, adapter, modules), source_dir=folder)


@contextmanager
@converts_arguments
def merged_policy(adapter_dir: Path, *, base: Path | None) -> Iterator[Path]:
    """Merge an adapter into a temporary Hugging Face folder, which is deleted at the end.

    Args:
        adapter_dir: As in `merge_adapter`.
        base: As in `merge_adapter`.

    Raises:
        DataError: The adapter or its base cannot be used.
        SettingsError: The base's architecture is not supported.
    """
    with temporary_folder("rl-merged-policy-") as folder:
        merge_adapter(adapter_dir, folder / "policy", base=base)
        yield folder / "policy"


@converts_arguments
def check_adapter(folder: Path, options: LoraOptions, modules: Mapping[str, Shape]) -> None:
    """Raise an error if a learner cannot start from an adapter; its tensors are not read.

    Args:
        folder: Folder of the adapter, in peft's format.
        options: The learner's LoRA options.
        modules: Shape [out, in] of each matrix that the learner adapts, by Hugging Face name.

    Raises:
        DataError: The adapter does not match the learner; the message names both values.
    """
    opened_adapter(folder, options, modules)


def _named_base(adapter: AdapterFolder) -> Path:
    if adapter.base is None or not Path(adapter.base).is_dir():
        raise DataError(
            f"{adapter.folder} names {preview(adapter.base, most=200)} as its base model, which is not a folder on "
            "this machine. Pass the folder of that model as `base` (`export --base FOLDER`)."
        )
    return Path(adapter.base)


def _check_base(adapter: AdapterFolder, folder: Path, tensors: PolicyTensors) -> None:
    """Raise an error if the adapter records the digest of its base model and this one differs."""
    if adapter.base_digest is None:
        return
    dtype, digest = adapter.base_digest
    if fingerprint_tensors(tensors.whole(DTYPES[dtype])) != digest:
        raise DataError(
            f"{folder} has different weights from the base model of {adapter.folder}. Name the folder it was trained "
            "on."
        )


def _merged(tensors: PolicyTensors, adapter: AdapterFolder, modules: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.whole(None):
        yield name, adapter.merged(modules[name], tensor) if name in modules else tensor
