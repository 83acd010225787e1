"""What all tests share: the seed of fuzz and soak runs, hypothesis' profiles, Ray's token, and that Ctrl-C works."""

import signal

import pytest
from hypothesis import settings

from rl_core.ray_session import RayOptions, prepare_environment

prepare_environment(RayOptions())  # before a test imports what imports Ray, which reads it then

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: children would ignore Ctrl-C too
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("short", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("soak", deadline=None, max_examples=2000)
settings.load_profile("short")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --seed."""
    parser.addoption("--seed", type=int, default=0, help="seed of fuzz and soak tests (the fixture `seed`)")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Seed of a fuzz or soak test: 0, or what `nox -s soak -- --seed N` says."""
    chosen: int = request.config.getoption("--seed")
    return chosen
