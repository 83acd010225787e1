"""Query GPUs in a child process, which a driver may crash; as a script, it prints the fields of `Cuda` as JSON."""

import importlib
import json
import sys
from typing import Any


def query_gpus() -> dict[str, Any]:
    """Return the GPUs visible to torch, and whether torchvision can be imported with this torch."""
    import torch

    cuda: Any = torch.cuda
    found: dict[str, Any] = {"built_for": torch.version.cuda}
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except Exception as error:  # a torchvision for another torch raises anything
        found["vision_error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    if torch.version.cuda is None:
        return found
    try:
        cuda.init()
    except (RuntimeError, AssertionError) as error:
        return {**found, "error": str(error).partition("\n")[0]}
    numbers = range(cuda.device_count())
    gpus = [(cuda.get_device_name(number), *cuda.mem_get_info(number)) for number in numbers]
    apart = [f"{a}-{b}" for a in numbers for b in numbers if a < b and not cuda.can_device_access_peer(a, b)]
    return {**found, "gpus": gpus, "apart": apart}


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(query_gpus())}\n")
