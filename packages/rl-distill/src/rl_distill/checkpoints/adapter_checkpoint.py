"""What the checkpoint of an adapter's learner says of the adapter and its base, in `learner.json`."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_core.errors import CheckpointError
from rl_core.weights import tensor_crc32c
from rl_distill.checkpoints.peft_folder import adapter_differences, is_alpha
from rl_distill.options import DTYPES, LoraOptions

LEARNER_FILE = "learner.json"
ADAPTER_FOLDER = "adapter"
ADAPTER = "adapter"
DIGEST_BYTES = 16


class TensorFingerprint:
    """One digest of many tensors, given in any order: the same names, shapes, dtypes and bytes have the same."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]] = ()) -> None:
        """Begin with these."""
        self._content: dict[str, list[Any]] = {}
        for name, tensor in tensors:
            self.add(name, tensor)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one; nothing of it is kept."""
        self._content[name] = [list(tensor.shape), str(tensor.dtype), tensor_crc32c(tensor)]

    @property
    def digest(self) -> str:
        """Of all that came so far, in hexadecimal digits."""
        text = json.dumps(sorted(self._content.items()))
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedAdapter:
    """An adapter that a learner trains.

    Attributes:
        options: Its rank, alpha and so on.
        modules: Hugging Face's names of the matrices that it adapts.
        base_digest: `TensorFingerprint` of the base as the learner holds it, in the learner's dtype.
    """

    options: LoraOptions
    modules: tuple[str, ...]
    base_digest: str

    def record(self, base: Path | None) -> dict[str, Any]:
        """What `learner.json` says of it.

        Args:
            base: Folder of the base model.
        """
        return {
            "rank": self.options.rank,
            "alpha": self.options.alpha_in_use,
            "rslora": self.options.rslora,
            "modules": list(self.modules),
            "base": {"path": None if base is None else str(base.absolute()), "digest": self.base_digest},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """The adapter of a checkpoint.

    Attributes:
        trained: As its learner had it.
        base: Folder of the base model at that time; None for random weights.
    """

    trained: TrainedAdapter
    base: Path | None


def saved_adapter(file: Path, header: Mapping[str, Any]) -> SavedAdapter | None:
    """The adapter in the content of a `learner.json`; None where all weights trained.

    Raises:
        CheckpointError: It is not what a learner writes.
    """
    if ADAPTER not in header:
        return None
    try:
        record, dtype = header[ADAPTER], header["options"]["dtype"]
        rank, alpha, rslora, modules = (record[name] for name in ("rank", "alpha", "rslora", "modules"))
        path, digest = record["base"]["path"], record["base"]["digest"]
    except (KeyError, TypeError):
        path = digest = dtype = rank = alpha = rslora = modules = None
    is_of_one = type(rank) is int and rank >= 1 and is_alpha(alpha) and type(rslora) is bool
    is_text = isinstance(modules, list) and all(isinstance(text, str) for text in (*modules, digest))
    if not is_of_one or not is_text or not isinstance(path, str | None) or dtype not in DTYPES:
        raise CheckpointError(
            f"{file} must say rank, alpha, rslora and modules of its adapter, and path and digest of the base; it was "
            "not written by a learner."
        )
    options = LoraOptions(rank=rank, alpha=float(alpha), rslora=rslora)
    trained = TrainedAdapter(options=options, modules=tuple(modules), base_digest=digest)
    return SavedAdapter(trained=trained, base=None if path is None else Path(path))


def check_same_adapter(directory: Path, saved: SavedAdapter | None, own: TrainedAdapter | None) -> None:
    """Refuse to continue one adapter as another, or as full training, or the reverse.

    Args:
        directory: The checkpoint.
        saved: What it says.
        own: What the learner trains; None for all weights.

    Raises:
        CheckpointError: Says how they differ, and what to do.
    """
    if saved is None and own is None:
        return
    if saved is None or own is None:
        found, wanted = ("all weights", "an adapter") if saved is None else ("an adapter", "all weights")
        rank = 0 if saved is None else saved.trained.options.rank
        raise CheckpointError(
            f"{directory} is a checkpoint of a learner that trained {found}; this one trains {wanted}. Set lora.rank = "
            f"{rank}, or start a new run from its policy."
        )
    differences = adapter_differences(saved.trained.options, saved.trained.modules, own.options, own.modules)
    if differences:
        raise CheckpointError(
            f"{directory} is a checkpoint of another adapter: {'; '.join(differences)}. Set [lora] as it was, or start "
            "a new run."
        )
    if saved.trained.base_digest != own.base_digest:
        was = "random weights" if saved.base is None else f"the model that was in {saved.base}"
        raise CheckpointError(
            f"{directory} is a checkpoint of an adapter of another base: it was trained on {was}, whose weights are "
            "not this policy's. Load it with the policy that it was trained on."
        )
