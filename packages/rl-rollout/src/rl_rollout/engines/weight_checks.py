"""Which tensors a model has, and whether an update holds them."""

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
    """The tensors of an update, from this process or from its file.

    Raises:
        EngineError: It has neither.
        WeightsGoneError: The file is gone or torn.
    """
    if update.tensors is not None:
        return update.tensors
    with update_file(update) as file:
        tensors: Mapping[str, torch.Tensor] = load_file(file)
    return tensors


def announced_tensors(update: WeightUpdate) -> dict[str, torch.Tensor]:
    """A tensor without content for each one of an update, as its digests say."""
    return {name: torch.empty(digest.shape, device="meta") for name, digest in update.digests.items()}


@contextmanager
def update_file(update: WeightUpdate) -> Iterator[Path]:
    """The file of an update, to be read within.

    Raises:
        EngineError: It has neither tensors nor a file.
        WeightsGoneError: The file is gone or torn.
    """
    if update.file is None:
        raise EngineError(f"weight update {update.version} has neither tensors nor a file; a transport packs one.")
    require_plain(update.file, error=WeightsGoneError)
    try:
        yield update.file
    except (OSError, SafetensorError) as error:
        raise WeightsGoneError(
            f"the file of weight update {update.version} cannot be read: {error}. Keep its transport open until every "
            "engine has taken it."
        ) from error


def tensor_shapes(model_dir: Path) -> Shapes:
    """Shapes of the folder's tensors, from the files' headers; of experts that it joins, each by itself.

    Layers after the last, with which GLM and others guess tokens, are left out: engines do not load them.
    """
    config = read_json_object(model_dir / "config.json", error=EngineError)
    num_layers = config.get("text_config", config).get("num_hidden_layers", math.inf)
    files = sorted(model_dir.glob("*.safetensors"))
    headers = [read_safetensors_header(file, error=EngineError) for file in files]
    stored = {n: torch.empty(tensor.shape, device="meta") for header in headers for n, tensor in header.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in each_expert(stored).items()}
    return {name: shape for name, shape in shapes.items() if _layer(name) < num_layers}


def _layer(name: str) -> int:
    """Index of the layer that a tensor is of; -1 of none."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def each_expert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by the names that learners publish: views of each expert's own, where a layer's are joined in two.

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
    """The tensors of a model under an adapter of peft's, by the names that they have without it."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in tensors.items()
        if ".lora_A." not in name and ".lora_B." not in name
    }


def module_of(name: str) -> str:
    """The Hugging Face module that a tensor of an adapter changes; the name itself where it is of no adapter."""
    return name.removeprefix(PEFT_PREFIX).removesuffix(LORA_A).removesuffix(LORA_B)


def check_update(update: WeightUpdate, tensors: Mapping[str, torch.Tensor], expected: Shapes) -> None:
    """Refuse an update that would leave the model half replaced, before anything is touched.

    Args:
        update: What was published.
        tensors: What arrived; each with a `shape`.
        expected: The model's tensors; tied names may be left out of the update.

    Raises:
        EngineError: A tensor is missing, unknown, or of another shape.
    """
    _check_whole({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected, update.tied)


def check_adapter(
    update: WeightUpdate, tensors: Mapping[str, torch.Tensor], expected: Shapes, traits: EngineTraits
) -> None:
    """Refuse an adapter that would not be served whole, or not on its base, before anything is touched.

    Args:
        update: What was published, with its adapter.
        tensors: What arrived; each with a `shape`.
        expected: The model's tensors; tied names may be left out of the adapter's base.
        traits: The engine's.

    Raises:
        EngineError: There is no room for it, an A or B is missing, of no matrix of the model, or of another shape, or
            its base has other tensors than the model.
    """
    adapter = update.adapter
    if adapter is None or not 1 <= adapter.rank <= traits.max_lora_rank:
        raise EngineError(
            f"{traits.name} takes adapters of rank 1 to its max_lora_rank = {traits.max_lora_rank}; found rank "
            f"{adapter and adapter.rank}. Start it with more, or publish all weights with the adapter in them "
            '([lora] serving = "merged").'
        )
    matrices = {}
    for name in tensors:
        module = module_of(name)
        shape = expected.get(f"{module}.weight", ())
        if len(shape) != 2:
            raise EngineError(f"an adapter must be of matrices of the model; found {name!r}. Leave it out.")
        matrices[f"{PEFT_PREFIX}{module}{LORA_A}"] = adapter.rank, shape[1]
        matrices[f"{PEFT_PREFIX}{module}{LORA_B}"] = shape[0], adapter.rank
    if not matrices:
        raise EngineError("an adapter must have at least one A and B; found none. Check the learner's target_modules.")
    _check_whole({name: tuple(tensor.shape) for name, tensor in tensors.items()}, matrices, of="the adapter")
    _check_whole({name: digest.shape for name, digest in adapter.base.items()}, expected, update.tied)


def _check_whole(found: Shapes, expected: Shapes, tied: Iterable[str] = (), *, of: str = "the model") -> None:
    missing = set(expected) - set(found) - set(tied)
    if missing:
        raise EngineError(f"a weight update must hold every tensor of {of}; {_some(missing)} missing.")
    unknown = set(found) - set(expected) - set(tied)
    if unknown:
        raise EngineError(f"a weight update must hold only tensors of {of}; found {_some(unknown)} beside them.")
    for name, shape in found.items():
        if name in expected and shape != expected[name]:
            raise EngineError(f"tensor {name!r} must have {of}'s shape {list(expected[name])}; found {list(shape)}.")


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first!r}" + (f" and {len(others)} more" if others else "")
