"""Settings that this machine does not support, although another machine may."""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from rl_core.cluster import visible_gpus
from rl_core.errors import DataError, SettingsError
from rl_core.terminal_text import bytes_text
from rl_trainer_parts.machine.needs import shared_memory_bytes
from rl_trainer_parts.machine.readings import SHARED_MEMORY
from rl_trainer_parts.settings.schema import Settings

ON_CPUS = {"ipc": "file", "nccl": "tcp"}
"""The transport that works without a GPU, by the transport that needs one."""


def machine_problems(settings: Settings) -> Iterator[str]:
    """Problems of settings that this machine does not support.

    A run that joins a Ray cluster trains on other machines, which are not checked here.
    """
    if settings.cluster.ray_address is not None:
        return
    kernels, transport = settings.optimizer.kernels, settings.weights.transport
    if settings.policy.backend == "megatron" and kernels in ("fused", "transformer_engine"):
        yield from _without_gpu("optimizer.kernels", kernels, instead="auto")
        if kernels == "transformer_engine" and find_spec("transformer_engine") is None:
            yield (
                'optimizer.kernels = "transformer_engine" needs the module transformer_engine, which is not installed '
                "here. Install `transformer-engine[pytorch]` for this machine's torch and CUDA, or set "
                'optimizer.kernels = "auto".'
            )
    if transport in ON_CPUS:
        yield from _without_gpu("weights.transport", transport, instead=ON_CPUS[transport])
    yield from _shared_memory(settings)


def _shared_memory(settings: Settings) -> Iterator[str]:
    """Problems of a shared memory in which the policy's weights do not fit, such as Docker's 64 MB."""
    try:
        needed = shared_memory_bytes(settings)
    except (SettingsError, DataError):  # another check reports a broken policy
        return
    free = shutil.disk_usage(SHARED_MEMORY).free if needed and SHARED_MEMORY.is_dir() else needed
    if needed > free:
        yield (
            f"shared memory ({SHARED_MEMORY}) must hold {bytes_text(needed)} of weights for the engines; found "
            f"{bytes_text(free)} free. In Docker, use --shm-size=16g or --ipc=host; in Kubernetes, mount an emptyDir "
            'with medium: Memory on /dev/shm. Or set weights.transport = "tcp", with engines in separate processes.'
        )


def _without_gpu(setting: str, value: str, *, instead: str) -> Iterator[str]:
    """The problem of a setting that needs a GPU, if this machine has none."""
    import torch  # finds GPUs without a device file, such as AMD's

    if not visible_gpus() and not torch.cuda.is_available():
        text = f'{setting} = "{value}" needs a GPU, and this machine has none.'
        yield f'{text} Set {setting} = "{instead}" to train here.'
