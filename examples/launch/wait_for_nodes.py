"""Wait until a Ray cluster has its nodes: `python wait_for_nodes.py IP:PORT NODES [SECONDS]`."""

import argparse
import time
from contextlib import suppress

from rl_core.cluster import RayOptions, start_ray, stop_ray
from rl_core.errors import RoleError

PAUSE_S = 0.5


def main(address: str, num_nodes: int, deadline_s: float) -> None:
    """Return once `num_nodes` nodes are alive.

    Raises:
        SystemExit: They are not alive within `deadline_s` seconds.
    """
    ends_at, found = time.monotonic() + deadline_s, 0
    while time.monotonic() < ends_at:
        with suppress(RoleError):  # the head does not answer yet
            ray = start_ray(RayOptions(address=address))
            while time.monotonic() < ends_at:
                found = sum(node["Alive"] for node in ray.nodes())
                if found >= num_nodes:
                    stop_ray()
                    return
                time.sleep(PAUSE_S)
        time.sleep(PAUSE_S)
    raise SystemExit(f"expected {num_nodes} Ray nodes at {address} within {deadline_s:g} s; found {found}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="IP:PORT", help="address of the cluster's head")
    parser.add_argument("nodes", type=int, help="number of nodes, including the head")
    parser.add_argument("seconds", type=float, nargs="?", default=300.0, help="maximum wait (default: 300)")
    options = parser.parse_args()
    main(options.address, options.nodes, options.seconds)
