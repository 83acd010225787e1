"""Run as a script in a child process, which a driver may crash: prints the GPUs that torch sees, as a line of JSON."""

import importlib
import importlib.util
import json
import sys
from typing import Any


def main() -> None:
    """Print the fields of `Cuda`."""
    import torch

    cuda: Any = torch.cuda
    found: dict[str, Any] = {"built_for": torch.version.cuda, "vision_error": _vision_error()}
    if torch.version.cuda is not None:
        try:
            cuda.init()
            found |= _devices(cuda)
        except (RuntimeError, AssertionError) as error:
            found["error"] = str(error).partition("\n")[0]
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def _devices(cuda: Any) -> dict[str, Any]:
    numbers = range(cuda.device_count())
    apart = [f"{a}-{b}" for a in numbers for b in numbers if a < b and not cuda.can_device_access_peer(a, b)]
    gpus = []
    for number in numbers:
        free, total = cuda.mem_get_info(number)
        gpus.append({"name": cuda.get_device_name(number), "total_bytes": total, "free_bytes": free})
    return {"gpus": gpus, "apart": apart}


def _vision_error() -> str:
    """Why torchvision cannot be imported with this torch; empty if it can, or is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        return ""
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # of another torch: any kind
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


if __name__ == "__main__":
    main()
