"""A learner's checkpoint: `policy/` (a Hugging Face folder), `state/` (see `pieces`) and `learner.json`.

An adapter's checkpoint has `adapter/`, in peft's format, instead of `policy/`, and does not store the base model:
`learner.json` has its digest, beside LoRA settings and adapted modules. All names are Hugging Face's, so a checkpoint
loads into any learner and any parallel layout. No file in it can run code.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rl_core.errors import CheckpointError, DataError, SettingsError
from rl_core.files import read_record
from rl_core.weights import tensor_crc32c
from rl_distill.architecture.lora_targets import all_matrices
from rl_distill.architecture.policy_config import PolicyConfig, parse_policy_config, read_policy_config
from rl_distill.architecture.tensor_shapes import Shape, is_trained, keeps_float32, output_name, tensor_shapes
from rl_distill.checkpoints.hf_folder import write_json, write_policy_folder
from rl_distill.checkpoints.peft_folder import adapter_differences, write_adapter
from rl_distill.checkpoints.pieces import Piece, StoredPiece, TensorFolder, write_index
from rl_distill.options import Algorithm, LearnerOptions, LoraOptions

FORMAT_VERSION = 3
LEARNER_FILE = "learner.json"
ADAPTER_FOLDER = "adapter"
POLICY_FOLDER = "policy"
STATE_FOLDER = "state"
STATE_KINDS = ("weights", "exp_avg", "exp_avg_sq")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySource:
    """Origin of a policy.

    Attributes:
        config_json: Content of its config.json.
        config: The parsed config.json.
        policy_dir: Its Hugging Face folder; None for random weights.
    """

    config_json: Mapping[str, Any]
    config: PolicyConfig
    policy_dir: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedAdapter:
    """An adapter that a learner trains.

    Attributes:
        options: LoRA settings: rank, alpha, rsLoRA.
        modules: Names of the adapted matrices in Hugging Face's scheme.
        base: Folder of the base model when training started; None for random weights.
        base_digest: `fingerprint_tensors` of the base model in the learner's dtype.
    """

    options: LoraOptions
    modules: tuple[str, ...]
    base: Path | None
    base_digest: str

    def record(self) -> dict[str, Any]:
        """Return the adapter's entry in `learner.json`."""
        return {
            "rank": self.options.rank,
            "alpha": self.options.alpha_in_use,
            "rslora": self.options.rslora,
            "modules": list(self.modules),
            "base": {"path": None if self.base is None else str(self.base.absolute()), "digest": self.base_digest},
        }


class SavedBase(msgspec.Struct):
    """The base model of a `SavedAdapter`."""

    path: str | None
    digest: str


class SavedAdapter(msgspec.Struct):
    """The adapter's entry in `learner.json`."""

    rank: int
    alpha: float
    rslora: bool
    modules: tuple[str, ...]
    base: SavedBase

    def trained(self) -> TrainedAdapter:
        """Return the adapter whose `record` this is."""
        options = LoraOptions(rank=self.rank, alpha=self.alpha, rslora=self.rslora)
        base = None if self.base.path is None else Path(self.base.path)
        return TrainedAdapter(options=options, modules=self.modules, base=base, base_digest=self.base.digest)


def fingerprint_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hexadecimal digest of tensors, whatever their order, from names, shapes, dtypes and bytes."""
    content = [[name, [list(tensor.shape), str(tensor.dtype), tensor_crc32c(tensor)]] for name, tensor in tensors]
    return hashlib.blake2b(json.dumps(sorted(content)).encode(), digest_size=16).hexdigest()


def critic_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a critic by Hugging Face name: a token classifier with one label."""
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if name != output_name(config)}
    return {**shapes, "score.weight": (1, config.hidden_size), "score.bias": (1,)}


def state_shapes(shapes: Mapping[str, Shape], config: PolicyConfig, *, also: Sequence[str] = ()) -> dict[str, Shape]:
    """Shape of every tensor in `state/`, given the model's: all weights, and the moments of the trained ones.

    Args:
        shapes: Shape of every tensor of the model.
        config: The policy's configuration.
        also: Further kinds of state of the trained tensors, such as "average".
    """
    return {
        f"{kind}/{name}": shape
        for kind in (*STATE_KINDS, *also)
        for name, shape in shapes.items()
        if kind == "weights" or is_trained(name, config)
    }


def require_empty(directory: Path) -> None:
    """Create a directory to save into, or check that it is empty.

    Raises:
        CheckpointError: The directory has files, or cannot be created.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = not any(directory.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot save into {directory}: {error}. Choose a writable directory.") from None
    if not is_empty:
        raise CheckpointError(f"{directory} must be empty to save into it; choose a new directory.")


def finish_checkpoint(
    directory: Path,
    written: Sequence[Sequence[StoredPiece]],
    *,
    source: PolicySource,
    names: Sequence[str],
    options: LearnerOptions,
    step: int,
    adapter: TrainedAdapter | None = None,
) -> None:
    """Complete a checkpoint after every rank has written its state.

    Args:
        directory: Folder of the checkpoint.
        written: Result of `write_pieces` on each rank.
        source: The policy's configuration and tokenizer.
        names: Names of the tensors in `policy/`; the names of a critic's head make it a token classifier. For an
            adapter, the names of its A and B matrices in `adapter/`.
        options: The learner's options; the policy is stored in their dtype.
        step: Optimizer steps taken so far.
        adapter: The trained adapter; None if all weights are trained.
    """
    write_index(directory / STATE_FOLDER, written)
    tensors = _saved_weights(directory, names, dtype=DTYPES[options.dtype], config=source.config)
    header = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "config_digest": source.config.digest,
        "options": asdict(replace(options, image_folder=None)),
    }
    if adapter is None:
        config_json = dict(source.config_json)
        if "score.weight" in names:
            architecture = source.config.architecture.replace("ForCausalLM", "ForTokenClassification")
            config_json |= {"architectures": [architecture], "num_labels": 1}
        write_policy_folder(directory / POLICY_FOLDER, config_json, tensors, source_dir=source.policy_dir)
    else:
        header["adapter"] = adapter.record()
        write_adapter(
            directory / ADAPTER_FOLDER,
            tensors,
            options=adapter.options,
            matrices=all_matrices(source.config),
            base=adapter.base,
            base_digest=(options.dtype, adapter.base_digest),
        )
    write_json(directory / LEARNER_FILE, header)  # last, so that an incomplete folder has none


def _saved_weights(
    directory: Path, names: Sequence[str], *, dtype: torch.dtype, config: PolicyConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the float32 weights of `state/` one by one, in the policy's dtype."""
    folder = TensorFolder(directory / STATE_FOLDER)
    shapes = folder.shapes()
    for name in names:
        shape = shapes[f"weights/{name}"]
        whole = Piece(name=f"weights/{name}", shape=shape, offsets=(0,) * len(shape), tensor=torch.empty(shape))
        folder.read([whole])
        yield name, whole.tensor if keeps_float32(name, config) else whole.tensor.to(dtype)


def read_header(
    directory: Path,
    *,
    config: PolicyConfig,
    dtype: str,
    algorithm: Algorithm = "adam",
    adapter: TrainedAdapter | None = None,
) -> int:
    """Return the step of a checkpoint, after checking that it belongs to this policy.

    Args:
        directory: Folder of the checkpoint.
        config: Configuration of the policy to resume.
        dtype: The policy's dtype, "float32" or "bfloat16".
        algorithm: The optimizer's.
        adapter: The adapter that the learner trains; None if it trains all weights.

    Raises:
        CheckpointError: The checkpoint is missing, torn, or of another policy, dtype, optimizer, adapter or base model.
    """
    header = _read_header(directory / LEARNER_FILE)
    saved = None if header.adapter is None else header.adapter.trained()
    if header.config_digest != config.digest:
        folder = directory / POLICY_FOLDER if saved is None else saved.base
        raise CheckpointError(
            f"{directory} is a checkpoint of another model: {_differences(folder, config)}. Load it "
            "with the policy it was saved from."
        )
    for name, own in {"dtype": dtype, "algorithm": algorithm}.items():
        if (found := getattr(header.options, name)) != own:
            raise CheckpointError(
                f"{directory} was saved with {name} = {found!r}; this learner has {own!r}. "
                f"Set {name} = {found!r}, or start a new run from {_policy_of(directory)}."
            )
    _check_same_adapter(directory, saved, adapter)
    return header.step


def _check_same_adapter(directory: Path, saved: TrainedAdapter | None, own: TrainedAdapter | None) -> None:
    """Refuse to resume a checkpoint with a different adapter, or to switch between adapter and full training.

    Args:
        directory: Folder of the checkpoint.
        saved: The adapter in the checkpoint; None if all weights were trained.
        own: The adapter that the learner trains; None if it trains all weights.

    Raises:
        CheckpointError: The two differ; the message names the differences and the remedy.
    """
    if saved is None and own is None:
        return
    if saved is None or own is None:
        found, wanted = ("all weights", "an adapter") if saved is None else ("an adapter", "all weights")
        rank = 0 if saved is None else saved.options.rank
        raise CheckpointError(
            f"{directory} is a checkpoint of a learner that trained {found}; this learner trains {wanted}. Set "
            f"lora.rank = {rank}, or start a new run from its policy."
        )
    differences = adapter_differences(saved.options, saved.modules, own.options, own.modules)
    if differences:
        raise CheckpointError(
            f"{directory} is a checkpoint of another adapter: {'; '.join(differences)}. Restore its [lora] settings, "
            "or start a new run."
        )
    if saved.base_digest != own.base_digest:
        was = "random weights" if saved.base is None else f"the model that was in {saved.base}"
        raise CheckpointError(
            f"{directory} is a checkpoint of an adapter on another base model: it was trained on {was}, whose weights "
            "differ from this policy's. Load it with the policy it was trained on."
        )


def _policy_of(directory: Path) -> str:
    """Folder from which a new run can start when this checkpoint cannot be resumed."""
    return str(directory / (ADAPTER_FOLDER if (directory / ADAPTER_FOLDER).is_dir() else POLICY_FOLDER))


def _differences(folder: Path | None, config: PolicyConfig) -> str:
    """Describe how a saved policy's config.json differs, e.g. "num_layers is 4, this policy's 2"."""
    try:
        if folder is None:
            raise DataError("the checkpoint started from random weights.")
        config_json = read_policy_config(folder)
        named = config_json.get("architectures")
        names = [str(name) for name in named] if isinstance(named, list) else []
        config_json["architectures"] = [name.replace("ForTokenClassification", "ForCausalLM") for name in names]
        saved = asdict(parse_policy_config(config_json))
    except (SettingsError, DataError):
        return "its configuration cannot be read, and its digest is not this policy's"
    own = asdict(config)
    different = [name for name, value in own.items() if saved[name] != value and name != "initializer_range"]
    return "; ".join(f"{name} is {saved[name]}, this policy's {own[name]}" for name in different) or "digests differ"


class _Options(msgspec.Struct):
    dtype: str
    algorithm: str = "adam"


class _Format(msgspec.Struct):
    format_version: int


class _Header(_Format):
    """What a learner reads of `learner.json`."""

    step: int
    config_digest: str
    options: _Options
    adapter: SavedAdapter | None = None


def _read_header(path: Path) -> _Header:
    found = read_record(path, _Format, error=CheckpointError).format_version
    if found != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {found}; this release reads {FORMAT_VERSION}. Resume with the release that "
            f"wrote it, or start a new run from {_policy_of(path.parent)}."
        )
    return read_record(path, _Header, error=CheckpointError)
