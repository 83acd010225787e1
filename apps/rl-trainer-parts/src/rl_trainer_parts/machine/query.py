"""Query GPUs or a Ray cluster in a child process, which a driver may crash and Ray may block.

As a script, it prints one line of JSON. `query.py gpus` prints the fields of `Cuda`; `query.py ray HOST:PORT` joins a
Ray cluster as a run does.
"""

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


def query_ray(address: str) -> dict[str, Any]:
    """Return the cluster's nodes and resources as text, or an error."""
    from rl_core.cluster import RayOptions, describe_shares, start_ray, stop_ray
    from rl_core.errors import RLError

    try:
        ray = start_ray(RayOptions(address=address))
        there = ray.cluster_resources()
        shares = describe_shares(there.get("CPU", 0.0), there.get("GPU", 0.0))
        alive = sum(node["Alive"] for node in ray.nodes())
        return {"found": f"{alive} node{'' if alive == 1 else 's'} with {shares}"}
    except RLError as error:
        return {"error": str(error)}
    finally:
        stop_ray()


if __name__ == "__main__":
    answer = query_gpus() if sys.argv[1] == "gpus" else query_ray(sys.argv[2])
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
