"""LoRA adapters in peft's format: `adapter_config.json` and `adapter_model.safetensors`.

A and B are stored without the factor that scales B @ A; the configuration determines it.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_core.errors import DataError
from rl_core.files import StoredTensor, current_umask, preview, read_json_object, read_safetensors_header
from rl_core.weights import LORA_A, LORA_B, PEFT_PREFIX, write_safetensors
from rl_distill.architecture.tensor_shapes import Shape
from rl_distill.checkpoints.hf_folder import STORED_DTYPES, write_json
from rl_distill.options import DTYPES, MAX_ALPHA, LoraOptions

CONFIG_FILE = "adapter_config.json"
BASE_FILE = "base.json"
"""Our addition to peft's files: dtype and digest of the base model."""
WEIGHTS_FILE = "adapter_model.safetensors"

_UNDERSTOOD = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "init_lora_weights", "target_modules"}
_WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying", "runtime_config"),
}
"""Fields without effect on an adapter whose tensors are stored. Any field not listed above must be empty."""

_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Accepted values of `init_lora_weights`; the others also modify the base model."""

_REMEDIES = {
    "modules_to_save": "Train again without fully trained modules.",
    "use_dora": "Train again without DoRA, or merge it with peft's merge_and_unload.",
    "bias": "Train again with bias = none.",
    "rank_pattern": "Train again with one rank for all modules.",
    "alpha_pattern": "Train again with one alpha for all modules.",
    "fan_in_fan_out": "Transpose its matrices: this package stores them as [out, in].",
}
_OTHER_REMEDY = "Merge it with peft's merge_and_unload, and continue from the merged model."


class AdapterFolder:
    """An adapter in peft's format, checked before any tensor is allocated.

    Attributes:
        folder: Folder of the adapter.
        options: Rank, alpha, rsLoRA and dropout; `target_modules` are the full names of the adapted matrices.
        modules: Shape [out, in] of each adapted matrix by Hugging Face name, e.g. "model.layers.0.self_attn.q_proj".
        base: Base model as the adapter names it: a folder or a hub name; None if it names none.
        base_digest: (dtype, `fingerprint_tensors` of the base model in that dtype), if the learner that trained the
            adapter recorded it; None in folders that peft wrote.
    """

    def __init__(self, folder: Path) -> None:
        """Read the configuration and the header of the tensors.

        Raises:
            DataError: A file is missing, torn or not a regular file, or the adapter is not supported; the message names
                the field or tensor, and the remedy.
        """
        self.folder = folder
        self._file = folder / WEIGHTS_FILE
        config = read_json_object(folder / CONFIG_FILE)
        _refuse_others(folder / CONFIG_FILE, config)
        stored = read_safetensors_header(self._file)
        self.modules = _modules(self._file, stored, rank=config["r"])
        _check_targets(folder / CONFIG_FILE, config, self.modules)
        base = config.get("base_model_name_or_path")
        self.base = base if isinstance(base, str) and base else None
        self.base_digest = _base_digest(folder / BASE_FILE)
        self.options = LoraOptions(
            rank=config["r"],
            alpha=float(config["lora_alpha"]),
            rslora=bool(config.get("use_rslora")),
            dropout=float(config.get("lora_dropout") or 0.0),
            target_modules=tuple(self.modules),
        )

    def read(self, module: str) -> tuple[Tensor, Tensor]:
        """Read A [rank, in] and B [out, rank] of a matrix in float32, without scaling.

        Raises:
            DataError: They cannot be read, or have values that are not finite.
        """
        try:
            with safe_open(self._file, framework="pt") as file:
                a, b = (file.get_tensor(PEFT_PREFIX + module + kind) for kind in (LORA_A, LORA_B))
        except (SafetensorError, OSError) as cause:
            raise DataError(f"{self._file}: the adapter of {module} cannot be read: {cause}") from cause
        if not (a.isfinite().all() and b.isfinite().all()):
            raise DataError(
                f"{self._file}: the adapter of {module} has values that are not finite. Use an earlier adapter."
            )
        return a.to(torch.float32), b.to(torch.float32)

    def merged(self, module: str, weight: Tensor) -> Tensor:
        """Return weight + scaling * B @ A, computed in float32, in the dtype of `weight` [out, in].

        Raises:
            DataError: The adapter cannot be read.
        """
        a, b = self.read(module)
        return torch.addmm(weight.to(torch.float32), b, a, alpha=self.options.scaling).to(weight.dtype)


def read_adapter(folder: Path, options: LoraOptions, modules: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Read the A and B from which a learner starts, in float32, without scaling.

    Args:
        folder: Folder of the adapter, in peft's format.
        options: The learner's LoRA options.
        modules: Shape [out, in] of each matrix that the learner adapts, by Hugging Face name.

    Returns:
        Tensors by Hugging Face name plus "lora_A.weight" or "lora_B.weight", without peft's prefix.

    Raises:
        DataError: The adapter cannot be read, or its rank, alpha, shapes or modules differ from the learner's.
    """
    found = opened_adapter(folder, options, modules)
    tensors: dict[str, Tensor] = {}
    for name in modules:
        tensors[name + LORA_A], tensors[name + LORA_B] = found.read(name)
    return tensors


def opened_adapter(folder: Path, options: LoraOptions, modules: Mapping[str, Shape]) -> AdapterFolder:
    """Open the folder of `read_adapter`, and check that it matches the learner; its tensors are not read yet.

    Raises:
        DataError: The adapter cannot be read, or its rank, alpha, shapes or modules differ from the learner's.
    """
    found = AdapterFolder(folder)
    differences = adapter_differences(found.options, found.modules, options, modules)
    differences += [
        f"{name} is {list(found.modules[name])}, this policy's {list(shape)}"
        for name, shape in modules.items()
        if found.modules.get(name, shape) != tuple(shape)
    ]
    if differences:
        raise DataError(
            f"{folder} has a different adapter: {'; '.join(differences[:8])}. Set [lora] to match the adapter, or "
            "omit lora.path."
        )
    return found


def adapter_differences(
    found: LoraOptions, found_modules: Iterable[str], own: LoraOptions, own_modules: Iterable[str]
) -> list[str]:
    """Describe how a saved adapter differs from a learner's, e.g. "rank is 8, this learner's 16"."""
    names = (("rank", "rank"), ("alpha", "alpha_in_use"), ("rslora", "rslora"))
    pairs = [(name, getattr(found, field), getattr(own, field)) for name, field in names]
    differences = [
        f"{name} is {of_found}, this learner's {of_own}" for name, of_found, of_own in pairs if of_found != of_own
    ]
    more, less = sorted(set(found_modules) - set(own_modules)), sorted(set(own_modules) - set(found_modules))
    for how, modules in (("also adapts", more), ("does not adapt", less)):
        if modules:
            rest = f" and {len(modules) - 1} others" if len(modules) > 1 else ""
            differences.append(f"it {how} {preview(modules[0], most=120)}{rest}")
    return differences


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    options: LoraOptions,
    matrices: Iterable[str],
    base: Path | None,
    base_digest: tuple[str, str] | None = None,
) -> None:
    """Write an adapter that peft and transformers load.

    Args:
        folder: Target folder; created if missing. It must not contain an adapter.
        tensors: A and B of each module by Hugging Face name plus "lora_A.weight" or "lora_B.weight", without scaling.
        options: Rank, alpha, rsLoRA and dropout.
        matrices: Names of all tensors of the policy. Target modules are shortened to their last part if that is
            unambiguous.
        base: Folder of the base model; None for random weights.
        base_digest: See `AdapterFolder.base_digest`.

    Raises:
        DataError: The folder already has an adapter.
        DiskError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any((folder / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE)):
        raise DataError(f"{folder} already has an adapter; choose a new folder, or remove it.")
    named = {PEFT_PREFIX + name: tensor.detach().contiguous() for name, tensor in dict(tensors).items()}
    write_safetensors(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o666 & ~current_umask())  # safetensors creates it with mode 0600
    modules = [name.removeprefix(PEFT_PREFIX).removesuffix(LORA_A) for name in named if name.endswith(LORA_A)]
    alpha = options.alpha_in_use
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base.absolute()),
        "inference_mode": True,
        "r": options.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": options.rslora,
        "lora_dropout": options.dropout,
        "bias": "none",
        "target_modules": _target_names(modules, matrices),
    }
    if base_digest is not None:
        write_json(folder / BASE_FILE, dict(zip(("dtype", "digest"), base_digest, strict=True)))
    write_json(folder / CONFIG_FILE, config)


def _base_digest(file: Path) -> tuple[str, str] | None:
    if not file.exists():
        return None
    said = read_json_object(file)
    dtype, digest = said.get("dtype"), said.get("digest")
    if dtype not in DTYPES or not isinstance(digest, str):
        raise DataError(f"{file} must have dtype and digest of the base model; remove the file to accept any base.")
    return dtype, digest


def _target_names(modules: Iterable[str], matrices: Iterable[str]) -> list[str]:
    """Shorten the modules' names to their last parts, unless these match other matrices too."""
    chosen = set(modules)
    ends = {name.rpartition(".")[2] for name in chosen}
    meant = {name.removesuffix(".weight") for name in matrices if name.endswith(".weight")}
    return sorted(ends if {name for name in meant if name.rpartition(".")[2] in ends} == chosen else chosen)


def _refuse_others(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse an adapter that is not LoRA, or does more than add `B @ A`."""
    if config.get("peft_type") != "LORA":
        raise DataError(f"{file} must have peft_type LORA; found {preview(config.get('peft_type'))}. {_OTHER_REMEDY}")
    for name, value in config.items():
        is_empty = value in (None, False, {}, [], "none")
        if name not in _UNDERSTOOD | _WITHOUT_EFFECT and not is_empty:
            remedy = _REMEDIES.get(name, _OTHER_REMEDY)
            raise DataError(f"{file} has {preview(name)} = {preview(value)}, which is not supported. {remedy}")
    start = config.get("init_lora_weights")
    if not isinstance(start, bool | str | None) or start not in _PLAIN_STARTS:
        raise DataError(
            f"{file} has init_lora_weights = {preview(start)}, which also modified the base model. Convert it with "
            "peft's save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    rank, alpha, dropout, rslora = (
        config.get(name, default)
        for name, default in (("r", None), ("lora_alpha", None), ("lora_dropout", 0), ("use_rslora", False))
    )
    is_possible = type(rank) is int and rank >= 1 and _is_alpha(alpha) and type(rslora) is bool
    if not is_possible or type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise DataError(
            f"{file} must have r >= 1, lora_alpha above 0 and below {MAX_ALPHA:g}, lora_dropout below 1 and use_rslora "
            f"true or false; found {preview(rank)}, {preview(alpha)}, {preview(dropout)} and {preview(rslora)}."
        )


def _is_alpha(value: object) -> bool:
    """Whether a value from a file is a valid alpha."""
    return isinstance(value, int | float) and type(value) is not bool and 0 < value < MAX_ALPHA


def _modules(file: Path, stored: Mapping[str, StoredTensor], *, rank: int) -> dict[str, Shape]:
    """Return the shape [out, in] of each adapted matrix by name."""
    names = dict.fromkeys(_module(file, name) for name in stored)
    if not names:
        raise DataError(f"{file} has no tensors; an adapter has an A and a B for each matrix it adapts.")
    return {name: _matrix(file, name, stored, rank=rank) for name in names}


def _module(file: Path, tensor: str) -> str:
    for kind in (LORA_A, LORA_B):
        if tensor.startswith(PEFT_PREFIX) and tensor.endswith(kind):
            return tensor.removeprefix(PEFT_PREFIX).removesuffix(kind)
    raise DataError(
        f"{file} has a tensor {preview(tensor, most=200)}, which is not an A or B of a matrix; expected names like "
        f"{PEFT_PREFIX}model.layers.0.self_attn.q_proj{LORA_A}. {_OTHER_REMEDY}"
    )


def _matrix(file: Path, module: str, stored: Mapping[str, StoredTensor], *, rank: int) -> Shape:
    """Check A and B of a matrix, and return its shape [out, in]."""
    sizes = []
    for kind, axis in ((LORA_A, 0), (LORA_B, 1)):
        tensor = PEFT_PREFIX + module + kind
        if tensor not in stored:
            raise DataError(
                f"{file} has no tensor {preview(tensor, most=200)}; an adapter has both A and B of a matrix."
            )
        found = stored[tensor]
        if len(found.shape) != 2 or found.shape[axis] != rank or 0 in found.shape:
            wanted = f"[{rank}, in]" if axis == 0 else f"[out, {rank}]"
            raise DataError(
                f"{file}: tensor {preview(tensor, most=200)} must have shape {wanted}, since r is {rank} in "
                f"{CONFIG_FILE}; found {list(found.shape)}."
            )
        if found.dtype not in STORED_DTYPES:
            raise DataError(
                f"{file}: tensor {preview(tensor, most=200)} must be stored as one of {', '.join(STORED_DTYPES)}; "
                f"found {found.dtype}."
            )
        sizes.append(found.shape[1 - axis])
    inputs, outputs = sizes
    return (outputs, inputs)


def _check_targets(file: Path, config: Mapping[str, Any], modules: Mapping[str, Shape]) -> None:
    """Check that `target_modules` names exactly the stored matrices; a pattern is left to peft."""
    targets = config.get("target_modules")
    if targets is None or isinstance(targets, str):
        return
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise DataError(f"{file} must have a list of names or a pattern as target_modules; found {preview(targets)}.")
    named = set(targets)
    met = {end for module in modules for end in _ends(module) if end in named}
    unnamed = next((module for module in modules if named.isdisjoint(_ends(module))), None)
    missing = min(named - met, default=None)
    if unnamed is not None:
        raise DataError(f"{file} does not list {preview(unnamed)} in target_modules, but {WEIGHTS_FILE} has it.")
    if missing is not None and not config.get("exclude_modules"):
        raise DataError(f"{file} lists {preview(missing)} in target_modules, but {WEIGHTS_FILE} has no such matrix.")


def _ends(module: str) -> Iterator[str]:
    """Yield a module's name, then what follows each of its dots."""
    while module:
        yield module
        module = module.partition(".")[2]
