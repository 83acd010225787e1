"""The adapter record in a checkpoint's `learner.json`: LoRA settings, adapted modules and the base model."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from rl_core.errors import CheckpointError
from rl_core.weights import tensor_crc32c
from rl_distill.checkpoints.peft_folder import adapter_differences
from rl_distill.options import LoraOptions

LEARNER_FILE = "learner.json"
ADAPTER_FOLDER = "adapter"
ADAPTER = "adapter"
DIGEST_BYTES = 16


def fingerprint_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hexadecimal digest of tensors, whatever their order, from names, shapes, dtypes and bytes."""
    content = [[name, [list(tensor.shape), str(tensor.dtype), tensor_crc32c(tensor)]] for name, tensor in tensors]
    return hashlib.blake2b(json.dumps(sorted(content)).encode(), digest_size=DIGEST_BYTES).hexdigest()


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


def check_same_adapter(directory: Path, saved: TrainedAdapter | None, own: TrainedAdapter | None) -> None:
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
