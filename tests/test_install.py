"""Documented `pip install` commands take our packages from the checkout, and others locked or as in `UNLOCKED`."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
OURS = {
    path.parent.name: path.parent for kind in ("packages", "apps") for path in ROOT.glob(f"{kind}/*/pyproject.toml")
}
DOCUMENTS = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("locks/*.md"), *ROOT.glob("examples/*/*.md")}
    | {path / "README.md" for path in OURS.values()}
)
UNLOCKED = {"vllm": "0.32.0", "verifiers": "0.4.0"}
"""Documented packages that locks/cpu.txt cannot include: vLLM for GPUs, and packages that conflict with vLLM."""


def blocks(document: Path) -> list[tuple[str, ...]]:
    """Return the `pip install` arguments in each bash block or inline code that names our packages."""
    fences = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)
    text = document.read_text()
    found = [block for language, block in fences.findall(text) if language == "bash"]
    found += re.findall(r"`([^`]+)`", fences.sub("", text))
    ours = [block.replace("\\\n", " ") for block in found if re.search(r"rl-|packages/|apps/|dist/", block)]
    return [commands for block in ours if (commands := tuple(re.findall(r"pip install ([^&;#\n]+)", block)))]


BLOCKS = {commands: str(path.relative_to(ROOT)) for path in DOCUMENTS for commands in blocks(path)}


def empty_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel that contains only its metadata."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def run_pip(*words: str, folder: Path) -> str:
    """Run pip in bash without the machine's pip settings; return its standard error."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHONPATH"))}
    command = f"{sys.executable} -m pip {' '.join(words)}"
    env["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stderr


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package index with all locked packages, and newer packages of a stranger under our names."""
    folder = tmp_path_factory.mktemp("index")
    pins = (ROOT / "locks/cpu.txt").read_text().split() + (ROOT / "locks/dev.txt").read_text().split()
    for name, version in [*(pin.split("==") for pin in pins), *UNLOCKED.items(), *((name, "0.1.99") for name in OURS)]:
        empty_wheel(folder, name, version)
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with our wheels in dist/, as after `nox -s wheels`."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("packages", "apps", "locks"):
        (folder / name).symlink_to(ROOT / name)
    run_pip("wheel --quiet --no-deps --no-build-isolation --wheel-dir dist packages/* apps/*", folder=folder)
    return folder


def unmet(installed: list[dict[str, Any]]) -> list[str]:
    """Return the requirements of our packages that are not installed."""
    names = {canonicalize_name(item["metadata"]["name"]) for item in installed}
    needs = [
        Requirement(line)
        for item in installed
        if item["metadata"]["name"] in OURS
        for line in item["metadata"]["requires_dist"]
        if any(
            (marker := Requirement(line).marker) is None or marker.evaluate({"extra": extra})
            for extra in ("", *item.get("requested_extras", ()))
        )
    ]
    return sorted({str(need) for need in needs if canonicalize_name(need.name) not in names})


@pytest.mark.parametrize("commands", BLOCKS, ids=[f"{name}-{i}" for i, name in enumerate(BLOCKS.values())])
def test_what_documents_install_is_ours_or_locked(commands: tuple[str, ...], checkout: Path, index: Path):
    report, said, installed = checkout / "report.json", "", []
    for command in commands:
        options = f"--quiet --dry-run --ignore-installed --no-build-isolation --no-index --find-links {index}"
        said += run_pip("install", command, options, f"--report {report}", folder=checkout)
        installed += json.loads(report.read_text())["install"]
    foreign = [
        item["download_info"]["url"]
        for item in installed
        if item["metadata"]["name"] in OURS and not item["download_info"]["url"].startswith(checkout.as_uri())
    ]
    assert foreign == []
    assert unmet(installed) == []
    assert not re.findall(r"rl-\S+ \S+ does not provide the extra .*", said)


def test_documents_say_how_to_install_the_apps():
    named = set(BLOCKS.values())
    assert {"README.md", "locks/README.md", "examples/gsm8k/README.md"} <= named


def test_errors_send_nobody_to_an_index_for_ours():
    wrong = [
        str(path.relative_to(ROOT))
        for project in OURS.values()
        for path in project.glob("src/**/*.py")
        if re.search(r"pip install\W+rl-", path.read_text())
    ]
    assert wrong == []
