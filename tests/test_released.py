"""The current rl-rollout works with the last released rl-core, as its version bound promises."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version
from tooling.distributions import Surroundings, export
from tooling.projects import last_release, read_projects

ROOT = Path(__file__).resolve().parents[1]
ROLLOUT = ROOT / "packages" / "rl-rollout"
SUITES = ("loops_rollout", "gateway_exports", "engines_draining", "engines_stepped", "skip_cache")
"""Tests of rl-rollout's exchange through rl-core: trajectories, the queue, weights, and files."""
PROGRAM = """\
import importlib, json, sys
import pytest
import rl_core
site, names, words = json.load(sys.stdin)
assert rl_core.__file__.startswith(site), rl_core.__file__

def has(module, name):
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False

lacks = [f"{module}.{name}" for module, name in names if not has(module, name)]
sys.exit(f"the release lacks {', '.join(lacks)}" if lacks else pytest.main(words))
"""
"""Looks up all names and runs the tests in one process, because importing takes longer than the tests."""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the last released rl-core, installed from a wheel of its commit."""
    last = last_release("rl-core", ROOT)
    if last is None:
        pytest.skip("rl-core has no release yet")
    version, commit = last
    projects = read_projects(ROOT)
    (need,) = (need for need in projects["rl-rollout"].needs if need.name == "rl-core")
    if version not in need.specifier:
        pytest.skip(f"rl-rollout asks for {need}, which is not released yet; the last release is {version}")
    if not has_commit(commit):
        pytest.skip(f"this clone lacks commit {commit} of rl-core {version}; fetch the whole history")
    folder = tmp_path_factory.mktemp("released")
    export(projects["rl-core"], folder / "source", commit=commit, root=ROOT)
    Surroundings({}, umask=0o022).build("wheel", folder / "source" / projects["rl-core"].folder, folder)
    (wheel,) = folder.glob("*.whl")
    assert Version(wheel.name.split("-")[1]) == version
    site = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(install, check=True, timeout=120)
    return site


def has_commit(commit: str) -> bool:
    command = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def taken_names() -> list[tuple[str, str]]:
    """Return each name that rl-rollout imports from rl-core, with its module."""
    imports = [
        node
        for path in sorted((ROLLOUT / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    names = {(node.module or "", alias.name) for node in imports for alias in node.names}
    return sorted((module, name) for module, name in names if module.partition(".")[0] == "rl_core")


def test_rl_rollout_works_with_the_last_released_rl_core(released: Path):
    """If this fails, raise rl-rollout's lower bound of rl-core to the version that will have the missing parts."""
    names = taken_names()
    assert len(names) > 50
    options = ["-q", "-p", "no:cacheprovider", f"--confcutdir={ROLLOUT}", "--hypothesis-profile=ci"]
    words = [*options, *(str(ROLLOUT / "tests" / f"test_{suite}.py") for suite in SUITES)]
    path = os.pathsep.join(map(str, (released, ROLLOUT / "src", ROOT / "tests" / "support")))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        input=json.dumps([str(released), names, words]),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
