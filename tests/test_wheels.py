"""Required contents of every distribution; `nox -s wheels` also runs this on the installed wheels."""

import importlib.metadata
import importlib.util
import re
import sysconfig
from pathlib import Path

import pytest

DISTRIBUTIONS = [
    "rl-core",
    "rl-rollout",
    "rl-distill",
    "rl-metrics",
    "rl-trainer-parts",
    "rl-sync-trainer",
    "rl-async-trainer",
    "rl-service",
]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_package_is_typed(name: str):
    spec = importlib.util.find_spec(name.replace("-", "_"))
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).with_name("py.typed").is_file()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_metadata_is_whole(name: str):
    metadata = importlib.metadata.metadata(name)
    assert re.fullmatch(r"\d+\.\d+\.\d+", metadata["Version"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Summary"]
    licences = [path for path in importlib.metadata.files(name) or [] if path.name == "LICENSE"]
    assert licences, f"{name} carries no licence"
    assert "Apache License" in licences[0].read_text()


def test_rl_core_needs_no_torch():
    always = [line for line in importlib.metadata.requires("rl-core") or [] if "extra ==" not in line]
    assert sorted(re.split(r"[<>=]", line)[0] for line in always) == ["annotated-types", "crc32c", "msgspec", "numpy"]


def test_everything_installed_is_ours_or_locked():
    locks = Path(__file__).resolve().parents[1] / "locks"
    locked = {line for name in ("cpu.txt", "dev.txt") for line in (locks / name).read_text().split()}
    folders = [sysconfig.get_path(name) for name in ("purelib", "platlib")]  # sys.path may have setuptools' packages
    found = importlib.metadata.distributions(path=folders)
    installed = {re.sub(r"[-_.]+", "-", one.name.lower()): one for one in found}
    others = {f"{name}=={one.version}" for name, one in installed.items() if name not in (*DISTRIBUTIONS, "pip")}
    if "torch==2.13.0" in others:  # an interpreter without a CPU build has the GPU build with its libraries
        others = {other for other in others if not other.startswith(("torch==", "nvidia-", "cuda-", "triton=="))}
    assert others - locked == set()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_entry_points_load(name: str):
    entries = importlib.metadata.distribution(name).entry_points
    assert [f"{entry.group}: {entry.name}" for entry in entries if not callable(entry.load())] == []


def test_rl_metrics_carries_its_page():
    spec = importlib.util.find_spec("rl_metrics.report")
    assert spec is not None
    assert spec.origin is not None
    names = {path.name for path in Path(spec.origin).with_name("assets").iterdir()}
    assert {"page.html", "main.js", "base.css", "uPlot.iife.min.js", "uPlot.LICENSE"} <= names
