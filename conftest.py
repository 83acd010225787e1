"""Shared test setup: variables, seeds, Hypothesis profiles, Ray's token, warm starts, groups of tests, and Ctrl-C."""

import os

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # two processes with two threads each would starve each other on two cores
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_MODE": "offline",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables for every call of pytest, whether nox, an editor or a shell makes it. NumPy and torch read them once."""
os.environ.update(ENVIRONMENT)

import signal
from pathlib import Path
from typing import Any

import pytest
import warm_start
from hypothesis import settings

from rl_core.cluster.ray.session import RayOptions, prepare_environment

pytest_plugins = ["run_summary"]

SHARED = {
    "vLLM": (
        "test_engines_vllm",
        "test_gateway_vllm",
        "test_vllm_and",
        "test_mixture_example",
        "test_distillation_run",
        "test_teachers_agree",
    ),
    "Ray": ("test_ray_", "test_async_ray"),
    "browser": ("test_report_", "test_docs_site"),
}
"""Prefixes of the test files that share one import of vLLM, one Ray cluster or one browser."""

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("RAY_AUTH_TOKEN", None)  # a token per worker distinguishes their processes
prepare_environment(RayOptions())  # before Ray is imported, which reads it

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job, children would ignore Ctrl-C too
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("short", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("soak", deadline=None, max_examples=2000)
settings.load_profile("short")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --seed."""
    parser.addoption("--seed", type=int, default=0, help="seed of fuzz and soak tests (the fixture `seed`)")


def pytest_configure() -> None:
    """Start trainers and roles warm, and let them receive SIGHUP even if the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    warm_start.install()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, run the tests of one file, or of files that share something (`SHARED`), on one worker."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.partition("::")[0]).stem
            return next((shared for shared, names in SHARED.items() if name.startswith(names)), name)

    return Files(config, log)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Seed of a fuzz or soak test: 0, or N with `nox -s soak -- --seed N`."""
    chosen: int = request.config.getoption("--seed")
    return chosen
