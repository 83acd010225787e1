"""Run as a script in a child process: joins a Ray cluster as a run does, prints its resources as JSON, leaves it."""

import json
import sys
from typing import Any

from rl_core.cluster import RayOptions, start_ray, stop_ray
from rl_core.errors import RLError


def main() -> None:
    """Print the fields of `RayCluster`; the address is the first argument."""
    found: dict[str, Any] = {}
    try:
        ray = start_ray(RayOptions(address=sys.argv[1]))
        there = ray.cluster_resources()
        found = {"nodes": sum(node["Alive"] for node in ray.nodes())}
        found |= {name: there.get(resource, 0.0) for name, resource in (("cpus", "CPU"), ("gpus", "GPU"))}
    except RLError as error:
        found = {"error": str(error)}
    finally:
        stop_ray()
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
