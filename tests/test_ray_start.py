"""A Ray that does not start in time is started once more."""

import subprocess
import sys

import pytest
import ray

from rl_core.cluster.processes.guard import is_running
from rl_core.cluster.ray.session import RayOptions, start_ray, stop_ray
from rl_core.errors import RoleError
from rl_core.testing import wait_until

SLEEPS = "import sys; sys.stdin.read()"
SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


class SlowRay:
    """Times out in the first `num_slow` starts; each start leaves a process behind, as Ray's does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, num_slow: int) -> None:
        self.left: list[subprocess.Popen[bytes]] = []
        self._num_slow = num_slow
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "init", self._init)

    def _init(self, *, _temp_dir: str, **_: object) -> None:
        words = [sys.executable, "-c", SLEEPS, f"--temp-dir={_temp_dir}"]
        self.left.append(subprocess.Popen(words, stdin=subprocess.PIPE))
        if len(self.left) <= self._num_slow:
            raise Exception(SLOW)  # the class that Ray raises


@pytest.fixture
def slow_ray(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    slow = SlowRay(monkeypatch, num_slow=request.param)
    yield slow
    stop_ray()
    for process in slow.left:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("slow_ray", [1], indirect=True)
def test_it_is_started_once_more_and_nothing_of_the_first_is_left(slow_ray: SlowRay):
    start_ray(RayOptions(num_cpus=1))
    first, second = slow_ray.left
    wait_until(lambda: first.poll() is not None, "the first start's process to end", deadline_s=60)
    assert is_running(second.pid)


@pytest.mark.parametrize("slow_ray", [9], indirect=True)
def test_the_second_time_it_is_an_error_that_says_what_to_do(slow_ray: SlowRay):
    said = r"^Ray on this machine did not start within its own limit of 30 s, 2 times: .* Run fewer other processes, or"
    with pytest.raises(RoleError, match=said):
        start_ray(RayOptions(num_cpus=1))
    for process in slow_ray.left:
        assert process.wait(30) < 0
