"""Check the launch files of examples/launch without a cluster: scripts, images, sbatch directives and manifests.

`python tooling/launch.py [FOLDER]` runs ShellCheck and Hadolint, whose wheels contain the programs, and validates
RayJobs: their pods with the schema of Kubernetes, the other fields with `RAY_JOB`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "launch"
KUBERNETES = "1.34"
TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
FLAGS = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(required: str, **properties: Any) -> dict[str, Any]:
    """Return a JSON schema of an object with exactly these fields; `required` names the required ones."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


GROUP = {"rayStartParams": FLAGS, "template": {"type": "object", "required": ["spec"]}}
RAY_JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata={"type": "object"},
    spec=fields(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]},
        backoffLimit=COUNT,
        activeDeadlineSeconds={"type": "integer", "minimum": 1},
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        suspend={"type": "boolean"},
        rayClusterSpec=fields(
            "headGroupSpec",
            rayVersion=TEXT,
            authOptions=fields("mode", mode={"enum": ["token", "disabled"]}),
            headGroupSpec=fields("rayStartParams template", **GROUP),
            workerGroupSpecs={
                "type": "array",
                "items": fields(
                    "groupName rayStartParams template",
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    numOfHosts={"type": "integer", "minimum": 1},
                    **GROUP,
                ),
            },
        ),
    ),
)
"""The fields of a RayJob that a launch file may use, as KubeRay 1.5.1 defines them."""


NUMBER = r"[1-9]\d*"
SBATCH = {
    "job-name": r"[\w.-]+",
    "nodes": rf"{NUMBER}(-{NUMBER})?",
    "ntasks-per-node": NUMBER,
    "gpus-per-node": rf"(\w+:)?{NUMBER}",
    "cpus-per-task": NUMBER,
    "mem": r"\d+[KMGT]?",
    "time": r"(\d+-)?\d{1,2}(:\d\d){0,2}",
    "signal": rf"([RB]+:)?[A-Z\d]+(@{NUMBER})?",
    "output": r"[\w%./-]+",
    "open-mode": "append|truncate",
    "partition": r"[\w,.-]+",
    "account": r"[\w.-]+",
    "exclusive": "",
    "no-kill": "",
    "requeue": "",
}
"""Options of sbatch that a launch file may use, with the form of each value; empty for an option without one."""


def sbatch_problems(script: str) -> Iterator[str]:
    """Yield problems of directives that sbatch would refuse or ignore."""
    is_header = True
    for number, line in enumerate(script.splitlines(), start=1):
        if match := re.match(r"(?:#+\s*SBATCH|#sbatch)\b(.*)", line):
            name, _, value = match[1].strip().removeprefix("--").partition("=")
            if not line.startswith("#SBATCH --"):
                yield f"line {number}: expected `#SBATCH --option`; found {line!r}, which sbatch ignores."
            elif not is_header:
                yield f"line {number}: sbatch ignores {line!r}, because it follows the first command."
            elif name not in SBATCH:
                yield f"line {number}: expected one of {', '.join(SBATCH)}; found {name!r}."
            elif not re.fullmatch(SBATCH[name], value):
                yield f"line {number}: --{name} must match {SBATCH[name]!r}; found {value!r}."
        elif line.strip() and not line.startswith("#"):
            is_header = False


def ray_job_problems(job: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems of RayJob fields outside its pods that KubeRay would refuse or drop."""
    for error in jsonschema.Draft202012Validator(RAY_JOB).iter_errors(job):
        yield f"{error.json_path}: {error.message}"


def pod_problems(job: Mapping[str, Any]) -> Iterator[str]:
    """Yield the first problem of each pod that Kubernetes would refuse or drop."""
    import kubernetes_validate  # only in the environment of `lint`

    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        try:
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"pod of {group.get('groupName', 'the head')}: {error.json_path}: {error.message}"


def problems(folder: Path) -> Iterator[str]:
    """Yield the problems of the launch files in a folder, except those that ShellCheck and Hadolint print."""
    for script in sorted(folder.glob("*.sh")):
        yield from (f"{script.name}: {problem}" for problem in sbatch_problems(script.read_text()))
    for manifest in sorted(folder.glob("*.yaml")):
        job = yaml.safe_load(manifest.read_text())
        found = list(ray_job_problems(job)) or list(pod_problems(job))
        yield from (f"{manifest.name}: {problem}" for problem in found)


def main(folder: Path) -> None:
    """Run every check, and exit with 1 if one fails."""
    programs = Path(sys.executable).parent
    scripts = [*folder.glob("*.sh"), *(ROOT / "tests" / "support" / "slurm").iterdir()]
    shellcheck = subprocess.run([programs / "shellcheck", *scripts], check=False)
    images = sorted(folder.glob("Dockerfile.*"))
    hadolint = subprocess.run([programs / "hadolint", "--config", ROOT / ".hadolint.yaml", *images], check=False)
    found = list(problems(folder))
    for problem in found:
        print(problem)
    if found or shellcheck.returncode or hadolint.returncode:
        raise SystemExit("A launch file has a problem.")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
