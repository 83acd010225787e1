"""Roles on Ray: the conformance suite, and what is its own."""

import pytest

from rl_core.cluster import ClusterOptions
from rl_core.ray_session import RayOptions, start_ray, stop_ray
from rl_core.testing import ClusterConformance


@pytest.fixture(scope="module", autouse=True)
def ray():
    yield start_ray(RayOptions(num_cpus=2, object_store_bytes=300 << 20))
    stop_ray()


class TestRay(ClusterConformance):
    @classmethod
    def make_options(cls, **changes):
        return ClusterOptions(kind="ray", **changes)
