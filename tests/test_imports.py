"""Importing a package loads no optional backend.

`nox -s wheels` also runs this on the installed wheels, without the workspace.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

PACKAGES = ["rl_core", "rl_rollout", "rl_distill", "rl_metrics"]
BACKENDS = {
    "ray",
    "vllm",
    "megatron",
    "transformers",
    "wandb",
    "datasets",
    "math_verify",
    "zarr",
    "matplotlib",
    "mlflow",
}


def modules_after(statement: str) -> set[str]:
    """Return the top-level modules that a statement loads in a fresh interpreter."""
    code = f"import sys, json; {statement}; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("package", PACKAGES)
def test_import_loads_no_backend(package: str):
    loaded = modules_after(f"import {package}")
    assert package in loaded
    assert loaded & BACKENDS == set()


@pytest.mark.parametrize("package", ["rl_core", "rl_rollout", "rl_metrics"])
def test_import_loads_no_torch(package: str):
    assert "torch" not in modules_after(f"import {package}")


@pytest.mark.skipif("WITHOUT_TORCH" not in os.environ, reason="set by `nox -s wheels` where torch must be absent")
def test_rl_core_and_rl_rollout_bring_no_torch():
    assert importlib.util.find_spec("torch") is None
    assert modules_after("import rl_core, rl_rollout") & BACKENDS == set()
