"""The launch files pass their checker, which finds mistakes, and the trainer accepts the arguments they pass."""

import copy
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_async_trainer.settings import AsyncSettings
from rl_trainer_parts.commands.command_line import read_settings

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "examples" / "launch"
ASYNC = ROOT / "examples" / "arithmetic" / "async.toml"


@pytest.fixture(scope="module")
def launch() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("tooling_launch", ROOT / "tooling" / "launch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def job() -> Any:
    return copy.deepcopy(yaml.safe_load((LAUNCH / "rayjob.yaml").read_text()))


def test_the_files_pass(launch: types.ModuleType, job: Any):
    assert list(launch.sbatch_problems((LAUNCH / "slurm.sh").read_text())) == []
    assert list(launch.ray_job_problems(job)) == []


def test_a_job_submitted_from_another_folder_says_what_to_do(tmp_path: Path):
    words = ["bash", str(LAUNCH / "slurm.sh"), "settings.toml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"slurm.sh must be submitted from the checkout, where examples/launch/ray_node.sh exists; found {tmp_path}. "
        "Run `cd CHECKOUT`, then `sbatch examples/launch/slurm.sh SETTINGS.toml`.\n"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("#SBATCH --node=3", "expected one of .* found 'node'"),
        ("#SBATCH --nodes=three", "--nodes must match .* found 'three'"),
        ("#SBATCH --time=1 day", "--time must match"),
        ("#SBATCH --exclusive=yes", "--exclusive must match ''; found 'yes'"),
        ("#SBATCH -N 3", "expected `#SBATCH --option`"),
        ("# SBATCH --nodes=3", "which sbatch ignores"),
        ("set -e\n#SBATCH --nodes=3", "line 3: .* follows the first command"),
    ],
)
def test_a_wrong_directive_is_found(launch: types.ModuleType, line: str, said: str):
    (problem,) = launch.sbatch_problems(f"#!/bin/bash\n{line}\n")
    assert re.search(said, problem), problem


def test_a_wrong_field_of_a_ray_job_is_found(launch: types.ModuleType, job: Any):
    cluster = job["spec"]["rayClusterSpec"]
    cluster["workerGroupSpecs"][0]["replica"] = 2
    cluster["authOptions"]["mode"] = "tokens"
    del cluster["headGroupSpec"]["template"]
    job["spec"]["backoffLimit"] = "3"
    found = "\n".join(launch.ray_job_problems(job))
    assert found.count("\n") == 3, found
    for said in ("'replica' was unexpected", "'tokens' is not one of", "'template' is a required", "not of type 'int"):
        assert said in found


def test_the_trainer_takes_what_the_launch_files_pass(job: Any):
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["rl-async-trainer", "train"]
    script = re.search(r'^rl-async-trainer train "\$@" (.*) &$', (LAUNCH / "slurm.sh").read_text(), flags=re.MULTILINE)
    assert script is not None
    for options in (words[3:], shlex.split(script[1])):
        settings = read_settings([str(ASYNC), *options], AsyncSettings, command="train")
        assert settings.run.if_exists == "resume"
        assert settings.cluster.ray_address in ("auto", "$RAY_HEAD")


def test_the_images_have_the_ray_that_the_ray_job_names(job: Any):
    version = job["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"ray=={version}" in (ROOT / "locks" / "cpu.txt").read_text().split()
    assert f"'ray[default]=={version}'" in (LAUNCH / "Dockerfile.cuda").read_text()


def test_a_node_needs_a_role_and_a_token():
    script = str(LAUNCH / "ray_node.sh")
    variables = {"PATH": os.environ["PATH"], "RAY_HEAD": "127.0.0.2:1", "RAY_AUTH_TOKEN": "secret"}
    for words, missing, said in (
        (["other"], (), "usage: ray_node.sh head|worker; found other"),
        (["worker"], ("RAY_AUTH_TOKEN",), "RAY_AUTH_TOKEN: must be the same secret on every node"),
        (["head"], ("RAY_HEAD",), "RAY_HEAD: unbound variable"),
    ):
        environment = {name: value for name, value in variables.items() if name not in missing}
        done = subprocess.run(
            ["bash", script, *words], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode != 0
        assert said in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_images_are_built(image: str):
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker daemon answers")
    subprocess.run(
        [docker, "build", "--file", str(LAUNCH / f"Dockerfile.{image}"), "--tag", f"rl-{image}-test", str(ROOT)],
        check=True,
        timeout=7200,
    )
    command = [docker, "run", "--rm", f"rl-{image}-test", "rl-async-trainer", "train", "--help", "roles"]
    assert "heartbeat_deadline_s" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
