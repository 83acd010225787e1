"""Sends a weight update to vLLM's workers, and joins their answers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rl_core.data import FloatArray
from rl_core.errors import EngineError
from rl_core.files import locked_folder
from rl_core.weights import FOLDER_PREFIX, SHARED_MEMORY, WeightUpdate, write_safetensors
from rl_rollout.engines.weight_checks import announced_tensors, update_file

WeightSource = Mapping[str, torch.Tensor] | Path
"""The workers' source of tensors: this process, or a safetensors file."""


def update_shapes(update: WeightUpdate) -> dict[str, torch.Tensor]:
    """Return an empty tensor with the shape of each tensor in the update.

    Raises:
        EngineError: The update has no tensors.
        WeightsGoneError: Its file is missing or truncated.
    """
    if update.is_sent:
        return announced_tensors(update)
    if update.tensors is not None:
        return {name: tensor.to("meta") for name, tensor in update.tensors.items()}
    with update_file(update) as file, safe_open(file, framework="pt") as tensors:
        return {
            name: torch.empty(tensors.get_slice(name).get_shape(), device="meta")
            for name in tensors.keys()  # noqa: SIM118 - not a mapping
        }


@contextmanager
def workers_source(update: WeightUpdate, *, is_shared: bool) -> Iterator[WeightSource]:
    """Return the source from which workers read an update.

    Args:
        update: An update with tensors or a file.
        is_shared: Whether the workers are other processes. This process's tensors are then written to shared memory.
    """
    if update.tensors is None:
        if update.file is None:
            raise EngineError(f"weight update {update.version} has neither tensors nor a file.")
        yield update.file
    elif not is_shared:
        yield update.tensors
    else:
        with locked_folder(SHARED_MEMORY, FOLDER_PREFIX, mode=0o700) as folder:
            file = folder / "weights.safetensors"
            write_safetensors({name: one.detach().contiguous().cpu() for name, one in update.tensors.items()}, file)
            yield file


def expected_probes(update: WeightUpdate) -> dict[str, FloatArray]:
    """Return the probes that were sent, by name. A tied name has its source's probe."""
    probes = {name: digest.probe for name, digest in update.served.items()}
    tied = {name: probes[source] for name, source in update.tied.items() if source in probes}
    return probes | tied


def replacement(update: WeightUpdate) -> tuple[str, tuple[Any, ...]]:
    """Return the kind of weights that workers replace, and further arguments of the call."""
    if update.adapter is not None:
        return "adapter", (update.version,)
    return "all_weights", (list(update.tied), {name: digest.kind for name, digest in update.digests.items()})


def join_arrived(ranks: Sequence[Mapping[str, str]], update: WeightUpdate) -> dict[str, str]:
    """Return checksums of the tensors as they arrived. If ranks differ, return one that differs from the sent one."""
    sent = {name: digest.checksum for name, digest in update.digests.items()}
    return {
        name: next((rank[name] for rank in ranks if rank[name] != sent.get(name)), first)
        for name, first in ranks[0].items()
    }
