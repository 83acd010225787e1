"""What all tests share: seeds, hypothesis' profiles, Ray's token, warm starts, groups of tests, and Ctrl-C."""

import signal
from pathlib import Path

import pytest
import warm_start
from hypothesis import settings

from rl_core.ray_session import RayOptions, prepare_environment

pytest_plugins = ["run_summary"]

prepare_environment(RayOptions())  # before a test imports what imports Ray, which reads it then

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: children would ignore Ctrl-C too
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("short", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("soak", deadline=None, max_examples=2000)
settings.load_profile("short")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --seed."""
    parser.addoption("--seed", type=int, default=0, help="seed of fuzz and soak tests (the fixture `seed`)")


def pytest_configure() -> None:
    """Let trainers and roles start warm."""
    warm_start.install()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, keep the tests of a file on one worker, where they share fixtures, unless a mark names their group."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(Path(item.path).stem))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Seed of a fuzz or soak test: 0, or what `nox -s soak -- --seed N` says."""
    chosen: int = request.config.getoption("--seed")
    return chosen
