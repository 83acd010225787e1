"""Reads a model's tensor shapes, and checks that an update has all tensors."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rl_core.errors import EngineError, WeightsGoneError
from rl_core.files import read_json_object, read_safetensors_header, require_plain
from rl_core.weights import LORA_A, LORA_B, PEFT_PREFIX, WeightUpdate
from rl_rollout.engines.protocol import EngineTraits

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor by Hugging Face name."""


def update_tensors(update: WeightUpdate) -> Mapping[str, torch.Tensor]:
    """Return the tensors of an update, from this process or from its file.

    Raises:
        EngineError: The update has neither tensors nor a file.
        WeightsGoneError: The file is missing or truncated.
    """
    if update.tensors is not None:
        return update.tensors
    with update_file(update) as file:
        tensors: Mapping[str, torch.Tensor] = load_file(file)
    return tensors


def announced_tensors(update: WeightUpdate) -> dict[str, torch.Tensor]:
    """Return an empty tensor for each tensor of an update, with the shape in its digest."""
    return {name: torch.empty(digest.shape, device="meta") for name, digest in update.digests.items()}


@contextmanager
def update_file(update: WeightUpdate) -> Iterator[Path]:
    """Open the file of an update for reading.

    Raises:
        EngineError: The update has neither tensors nor a file.
        WeightsGoneError: The file is missing or truncated.
    """
    if update.file is None:
        raise EngineError(f"weight update {update.version} has neither tensors nor a file. Pack it with a transport.")
    require_plain(update.file, error=WeightsGoneError)
    try:
        yield update.file
    except (OSError, SafetensorError) as error:
        raise WeightsGoneError(
            f"the file of weight update {update.version} cannot be read: {error}. Keep its transport open until every "
            "engine has loaded it."
        ) from error


def tensor_shapes(model_dir: Path) -> Shapes:
    """Return the shapes of the folder's tensors, from the file headers. Joined experts are listed separately.

    Layers after the last, with which GLM and other models predict further tokens, are skipped because engines do not
    load them.
    """
    config = read_json_object(model_dir / "config.json", error=EngineError)
    num_layers = config.get("text_config", config).get("num_hidden_layers", math.inf)
    files = sorted(model_dir.glob("*.safetensors"))
    headers = [read_safetensors_header(file, error=EngineError) for file in files]
    stored = {n: torch.empty(tensor.shape, device="meta") for header in headers for n, tensor in header.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in each_expert(stored).items()}
    return {name: shape for name, shape in shapes.items() if _layer(name) < num_layers}


def _layer(name: str) -> int:
    """Return the layer index of a tensor; -1 if it belongs to no layer."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def each_expert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by the names that learners publish. Joined experts become one view per expert.

    transformers 5 computes with [experts, 2 * ffn, hidden] `gate_up_proj` and [experts, hidden, ffn] `down_proj`.
    """
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, joined = name.rpartition(".experts.")
        if joined not in ("gate_up_proj", "down_proj"):
            apart[name] = tensor
            continue
        names = ("gate_proj", "up_proj") if joined == "gate_up_proj" else ("down_proj",)
        for index, expert in enumerate(tensor):
            for own, part in zip(names, expert.chunk(len(names)), strict=True):
                apart[f"{layer}.experts.{index}.{own}.weight"] = part
    return apart


def base_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model under a peft adapter, by their names without the adapter."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in tensors.items()
        if ".lora_A." not in name and ".lora_B." not in name
    }


def module_of(name: str) -> str:
    """Return the Hugging Face module that an adapter's tensor changes, or the name itself for other tensors."""
    return name.removeprefix(PEFT_PREFIX).removesuffix(LORA_A).removesuffix(LORA_B)


def check_update(update: WeightUpdate, tensors: Mapping[str, torch.Tensor], expected: Shapes) -> None:
    """Refuse an update that would replace only part of the model, before anything changes.

    Args:
        update: The published update.
        tensors: The tensors that arrived; each has a `shape`.
        expected: The model's tensors. The update may omit tied names.

    Raises:
        EngineError: A tensor is missing, unknown, or has another shape.
    """
    _check_whole({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected, update.tied)


def check_adapter(
    update: WeightUpdate, tensors: Mapping[str, torch.Tensor], expected: Shapes, traits: EngineTraits
) -> None:
    """Refuse an adapter that is incomplete or does not fit its base, before anything changes.

    Args:
        update: The published update, with its adapter.
        tensors: The tensors that arrived; each has a `shape`.
        expected: The model's tensors. The adapter's base may omit tied names.
        traits: The engine's traits.

    Raises:
        EngineError: The engine has no adapter support; an A or B is missing, matches no matrix of the model, or has
            another shape; or its base has other tensors than the model.
    """
    adapter = update.adapter
    if adapter is None or not 1 <= adapter.rank <= traits.max_lora_rank:
        raise EngineError(
            f"{traits.name} accepts adapters of rank 1 to its max_lora_rank = {traits.max_lora_rank}; found rank "
            f"{adapter and adapter.rank}. Start it with a larger max_lora_rank, or publish all weights with the "
            'adapter merged ([lora] serving = "merged").'
        )
    matrices = {}
    for name in tensors:
        module = module_of(name)
        shape = expected.get(f"{module}.weight", ())
        if len(shape) != 2:
            raise EngineError(f"an adapter must change matrices of the model; found {name!r}. Remove it.")
        matrices[f"{PEFT_PREFIX}{module}{LORA_A}"] = adapter.rank, shape[1]
        matrices[f"{PEFT_PREFIX}{module}{LORA_B}"] = shape[0], adapter.rank
    if not matrices:
        raise EngineError("an adapter must have at least one A and B; found none. Check the learner's target_modules.")
    _check_whole({name: tuple(tensor.shape) for name, tensor in tensors.items()}, matrices, of="the adapter")
    _check_whole({name: digest.shape for name, digest in adapter.base.items()}, expected, update.tied)


def _check_whole(found: Shapes, expected: Shapes, tied: Iterable[str] = (), *, of: str = "the model") -> None:
    missing = set(expected) - set(found) - set(tied)
    if missing:
        raise EngineError(f"a weight update must contain every tensor of {of}; missing: {_some(missing)}.")
    unknown = set(found) - set(expected) - set(tied)
    if unknown:
        raise EngineError(f"a weight update must contain only tensors of {of}; found {_some(unknown)} in addition.")
    for name, shape in found.items():
        if name in expected and shape != expected[name]:
            raise EngineError(f"tensor {name!r} must have {of}'s shape {list(expected[name])}; found {list(shape)}.")


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first!r}" + (f" and {len(others)} more" if others else "")
