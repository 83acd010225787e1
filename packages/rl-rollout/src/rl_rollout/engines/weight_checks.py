"""Reads a model's tensors, and checks that an update has all of them and that an engine has loaded the folder's."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path

import numpy as np
import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from rl_core.data import FloatArray
from rl_core.errors import EngineError, WeightProofError, WeightsGoneError
from rl_core.files import locked_folder, read_json_object, read_safetensors_header, require_plain
from rl_core.record_fields import record
from rl_core.weights import (
    BFLOAT16_TOLERANCES,
    FOLDER_PREFIX,
    LORA_A,
    LORA_B,
    PEFT_PREFIX,
    SHARED_MEMORY,
    InFile,
    InProcess,
    ProofTolerances,
    WeightUpdate,
    probe_tensor,
    write_safetensors,
)
from rl_rollout.engines.protocol import BASE, EngineTraits

log = structlog.get_logger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor by Hugging Face name."""


def update_tensors(update: WeightUpdate) -> Mapping[str, torch.Tensor]:
    """Return the tensors of an update, from this process or from its file.

    Raises:
        EngineError: The update has neither tensors nor a file.
        WeightsGoneError: The file is missing or truncated.
    """
    if isinstance(update.location, InProcess):
        return update.location.tensors
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
    if not isinstance(update.location, InFile):
        raise EngineError(f"weight update {update.version} has neither tensors nor a file. Pack it with a transport.")
    file = update.location.file
    require_plain(file, error=WeightsGoneError)
    try:
        yield file
    except (OSError, SafetensorError) as error:
        raise WeightsGoneError(
            f"the file of weight update {update.version} cannot be read: {error}. Keep its transport open until every "
            "engine has loaded it."
        ) from error


def place_in_layers(name: str) -> str:
    """Return the name of a language layer's module or tensor from its layer on; all of any other name.

    A class with images may name its modules otherwise than its folder does.
    """
    return name if "vis" in name else name.rpartition(".layers.")[2]


def update_shapes(update: WeightUpdate) -> dict[str, torch.Tensor]:
    """Return an empty tensor with the shape of each tensor in the update.

    Raises:
        EngineError: The update has no tensors.
        WeightsGoneError: Its file is missing or truncated.
    """
    if update.is_sent:
        return announced_tensors(update)
    if isinstance(update.location, InProcess):
        return {name: tensor.to("meta") for name, tensor in update.location.tensors.items()}
    with update_file(update) as file, safe_open(file, framework="pt") as tensors:
        return {
            name: torch.empty(tensors.get_slice(name).get_shape(), device="meta")
            for name in tensors.keys()  # noqa: SIM118 - not a mapping
        }


@contextmanager
def workers_source(location: InProcess | InFile, *, is_shared: bool) -> Iterator[Mapping[str, torch.Tensor] | Path]:
    """Return the tensors or the file from which workers read an update.

    Args:
        location: Location of the update.
        is_shared: Whether the workers are other processes. This process's tensors are then written to shared memory.
    """
    if isinstance(location, InFile) or not is_shared:
        yield location.file if isinstance(location, InFile) else location.tensors
        return
    with locked_folder(SHARED_MEMORY, FOLDER_PREFIX, mode=0o700) as folder:
        file = folder / "weights.safetensors"
        write_safetensors({name: one.detach().contiguous().cpu() for name, one in location.tensors.items()}, file)
        yield file


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
    shapes = {
        name: tuple(tensor.shape) for name, tensor in each_expert(stored, model_type=config.get("model_type")).items()
    }
    return {name: shape for name, shape in shapes.items() if _layer(name) < num_layers}


def _layer(name: str) -> int:
    """Return the layer index of a tensor; -1 if it belongs to no layer."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


SEPARATE_EXPERTS = ("qwen3_moe", "glm4_moe")
"""Architectures whose folders may join a layer's experts, while learners publish each one."""


def each_expert(tensors: Mapping[str, torch.Tensor], *, model_type: object) -> dict[str, torch.Tensor]:
    """Return a folder's tensors by the names that learners publish. Joined experts become one view per expert.

    Args:
        tensors: By the folder's names: [experts, 2 * ffn, hidden] `gate_up_proj` and [experts, hidden, ffn]
            `down_proj`.
        model_type: The architecture, from config.json.
    """
    if model_type not in SEPARATE_EXPERTS:
        return dict(tensors)
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
    update: WeightUpdate,
    tensors: Mapping[str, torch.Tensor],
    expected: Shapes,
    traits: EngineTraits,
    served: Collection[str],
) -> None:
    """Refuse an adapter that is incomplete or does not fit its base, before anything changes.

    Args:
        update: The published update, with its adapter.
        tensors: The tensors that arrived; each has a `shape`.
        expected: The model's tensors. The adapter's base may omit tied names.
        traits: The engine's traits.
        served: Names of the adapters that the engine serves.

    Raises:
        EngineError: The engine has no adapter support, or no room for another one; an A or B is missing, matches no
            matrix of the model, or has another shape; or its base has other tensors than the model.
    """
    adapter = update.adapter
    if adapter is None or not 1 <= adapter.rank <= traits.max_lora_rank:
        raise EngineError(
            f"{traits.name} accepts adapters of rank 1 to its max_lora_rank = {traits.max_lora_rank}; found rank "
            f"{adapter and adapter.rank}. Start it with a larger max_lora_rank, or publish all weights with the "
            'adapter merged ([lora] serving = "merged").'
        )
    if not adapter.name or adapter.name == BASE:
        raise EngineError(f"an adapter's name must be neither empty nor {BASE!r}; found {adapter.name!r}.")
    if adapter.name not in served and len(served) >= traits.max_adapters:
        raise EngineError(
            f"{traits.name} has no slot for the adapter {adapter.name!r}: it serves max_adapters = "
            f"{traits.max_adapters}, {', '.join(map(repr, sorted(served)))}. Drop one, or start it with a larger "
            "max_adapters."
        )
    matrices = {}
    of_layers = {place_in_layers(name): shape for name, shape in expected.items()}
    for name in tensors:
        module = module_of(name)
        shape = expected.get(f"{module}.weight", of_layers.get(place_in_layers(f"{module}.weight"), ()))
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


def folder_tensors(model_dir: Path, shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the folder's tensors one by one, by the names that learners publish.

    Args:
        model_dir: The model's folder.
        shapes: Its tensors; see `tensor_shapes`.
    """
    config = read_json_object(model_dir / "config.json", error=EngineError)
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 - not a mapping
                found = {stored: tensors.get_tensor(stored)}
                apart = each_expert(found, model_type=config.get("model_type"))
                yield from ((name, tensor) for name, tensor in apart.items() if name in shapes)


def folder_probes(model_dir: Path, shapes: Shapes) -> dict[str, FloatArray]:
    """Return the probe of each tensor that an engine must serve after it has loaded the folder.

    Args:
        model_dir: The model's folder.
        shapes: Its tensors; see `tensor_shapes`.

    Returns:
        [out] float32 by Hugging Face name. A head that is tied, or missing, has the embedding's probe.
    """
    config = read_json_object(model_dir / "config.json", error=EngineError)
    probes = {name: probe_tensor(tensor) for name, tensor in folder_tensors(model_dir, shapes)}
    is_tied = config.get("tie_word_embeddings")
    if EMBEDDING in probes and (is_tied or HEAD not in probes):
        probes[HEAD] = probes[EMBEDDING]
    return probes


@record
class LiveNames:
    """How an engine's live layers are found among a folder's tensors.

    Attributes:
        renamed: The tensor that a live layer serves unchanged under another name, by the layer's name.
        unnamed: Tensors that no live layer has as they are: joined, split, transposed or converted by the engine, or
            not served.
        unexplained: Live layers that have no tensor of the folder as it is.
        by_round_trip: Tensors without a live layer of their own that a round trip has proven.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    unnamed: tuple[str, ...] = ()
    unexplained: tuple[str, ...] = ()
    by_round_trip: tuple[str, ...] = ()


def check_first_weights(
    probes: Mapping[str, FloatArray],
    live: Mapping[str, FloatArray],
    *,
    model_dir: Path,
    dtype: str,
) -> LiveNames:
    """Compare an engine's live layers with the folder that it loaded.

    A tensor that the engine serves under another name is found by its values. What has another layout in the engine
    (transposed, or with its rows in another order) is returned as unnamed, like what it joins or converts.

    Args:
        probes: Result of `folder_probes`.
        live: The engine's probe of each live tensor, by Hugging Face name.
        model_dir: The folder, from which tensors that differ are read again.
        dtype: The engine's dtype.

    Raises:
        WeightProofError: A live tensor differs (the message names it), or the engine serves none of them.
    """
    tolerances = ProofTolerances() if dtype == "float32" else BFLOAT16_TOLERANCES

    def are_equal(expected: FloatArray, found: FloatArray) -> bool:
        return _difference(expected, found) <= tolerances.probe

    differing = {name for name in live.keys() & probes.keys() if not are_equal(probes[name], live[name])}
    reordered = {
        name
        for name, tensor in folder_tensors(model_dir, dict.fromkeys(differing, ()))
        if are_equal(np.sort(probes[name]), np.sort(live[name]))
        or (tensor.ndim == 2 and are_equal(probe_tensor(tensor.T), live[name]))
    }
    for name in sorted(differing - reordered):
        raise WeightProofError(
            f"the engine loaded {model_dir}, but serves something else as tensor {name!r}: its probe differs by "
            f"{_difference(probes[name], live[name]):.2g} of its largest value (allowed {tolerances.probe:g}). "
            f"{_cause(name)}",
            tensor=name,
        )
    if not live:
        raise WeightProofError(
            f"the engine serves no tensor of {model_dir} that can be read back, so nothing is proven."
        )
    renamed, unexplained = dict[str, str](), set(reordered)
    for name in sorted(live.keys() - probes.keys()):
        # names of one tensor share its probe; the first is the tensor's own
        equal = {id(probe): one for one, probe in reversed([*probes.items()]) if are_equal(probe, live[name])}
        if len(equal) == 1 and np.any(live[name]):  # zeros belong to no tensor
            renamed[name] = next(iter(equal.values()))
        else:
            unexplained.add(name)
    unnamed = (probes.keys() - live.keys() - {HEAD} - {*renamed.values()}) | reordered
    return LiveNames(renamed=renamed, unnamed=tuple(sorted(unnamed)), unexplained=tuple(sorted(unexplained)))


def require_explained(found: LiveNames, model_dir: Path) -> LiveNames:
    """Refuse live layers that come from no tensor of the folder, and log tensors that the engine does not serve.

    Returns:
        The same names.

    Raises:
        WeightProofError: A live layer has no tensor of the folder.
    """
    if found.unexplained:
        name = found.unexplained[0]
        raise WeightProofError(
            f"the engine serves tensor {name!r}, which {model_dir} does not have, under this or another name, so its "
            "values may be random. Write the folder again with save_pretrained, correct the setting of config.json "
            "that asks for it, or use the transformers engine.",
            tensor=name,
        )
    if found.unnamed:
        first, *_ = found.unnamed
        log.warning("first_weights_not_proven", folder=str(model_dir), tensors=len(found.unnamed), first=first)
    return found


def _difference(expected: FloatArray, live: FloatArray) -> float:
    """Return the largest difference, relative to the largest expected value; inf for another shape."""
    if expected.shape != live.shape:
        return float("inf")
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0
    with np.errstate(invalid="ignore", over="ignore"):  # values that nobody initialized
        return float(np.abs(expected - live).max(initial=0.0)) / scale


def _cause(name: str) -> str:
    if name == HEAD:
        return (
            "The engine's implementation of this architecture may not tie its head to the embedding: save the folder "
            "with tie_word_embeddings = false and its own lm_head.weight, or use the transformers engine."
        )
    return "Its implementation of this architecture loads the tensor incorrectly; use the transformers engine."
