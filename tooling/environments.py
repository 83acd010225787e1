"""Virtual environments below .nox, shared between nox sessions.

Each is created once from locks/, and again when its inputs change. An interrupted build is never used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import nox

from tooling.pythons import HERE, PYTHONS, Interpreter, find_python

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rl-core", "rl-rollout", "rl-distill", "rl-metrics")
APPS = ("rl-trainer-parts", "rl-sync-trainer", "rl-async-trainer")
PROJECTS = (*(f"packages/{name}" for name in PACKAGES), *(f"apps/{name}" for name in APPS))
UNIT_EXTRAS = {
    "rl-core": ("rl-core[torch,prometheus,zarr,gpu]",),
    "rl-rollout": ("rl-core[torch]", "rl-rollout[peft,images,math,datasets,tools,mcp,http,json-schema,skip,gateway]"),
    "rl-distill": ("rl-core[torch]", "rl-distill[megatron,cache]"),
    "rl-metrics": ("rl-core", "rl-metrics[tensorboard,wandb,mlflow,parquet]"),
}
TORCH = "torch==2.13.0+cpu"
CUDA_TORCH = TORCH.partition("+")[0]
"""The build that every index has. It also runs on CPUs, but cannot be imported without CUDA's libraries."""
CONSTRAINTS = ("-c", "locks/cpu.txt", "-c", "locks/dev.txt")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
BACKEND = ("hatchling", "pathspec", "trove-classifiers", "pluggy", "packaging")
STARTS = "RL_TEST_STARTS"
"""Variable with the file to which every Python process of an environment appends a byte when it starts."""
COUNT_STARTS = f"""\
import os, sys; name = None if hasattr(sys, "is_counted") else os.environ.get("{STARTS}"); sys.is_counted = True; \
file = os.open(name, os.O_WRONLY | os.O_APPEND) if name else None; name and (os.write(file, b"."), os.close(file))
"""
"""A line of a .pth file, which an interpreter may read twice."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
"""Names of the program; tests/support/chromium.py looks for any of them."""
APT_S = 600.0  # a stalled mirror or another apt-get must not block the tests


@dataclass(frozen=True)
class Environment:
    """A virtual environment: its name, cost, pip arguments by step, input files, and Python."""

    name: str
    cost: str
    steps: tuple[tuple[str, ...], ...]
    inputs: tuple[str, ...]
    base: Interpreter = HERE

    @property
    def folder(self) -> Path:
        """Folder of the environment."""
        return ROOT / ".nox" / self.name

    @property
    def python(self) -> str:
        """Path of its interpreter."""
        return str(self.folder / "bin" / "python")

    def on(self, base: Interpreter) -> Environment:
        """Return the same environment for another Python, in its own folder."""
        return self if base == HERE else replace(self, name=f"{self.name}-{base.minor}", base=base)

    def recipe(self) -> str:
        """Return a digest of all inputs."""
        made_of = [self.base.version, self.base.prefix, str(self.folder), self.steps, COUNT_STARTS]
        digest = hashlib.sha256(json.dumps(made_of).encode())
        for name in self.inputs:
            digest.update((ROOT / name).read_bytes())
        return digest.hexdigest()


def editable(*requirements: str) -> tuple[str, ...]:
    """Return pip arguments that install projects from their folders, with extras such as rl-core[torch]."""
    folders = {Path(project).name: project for project in PROJECTS}
    paths = [f"./{folders[r.partition('[')[0]]}{''.join(r.partition('[')[1:])}" for r in requirements]
    return ("--no-build-isolation", *(word for path in paths for word in ("-e", path)))


TOOLS = Environment(
    name="tools",
    cost="100 MB to download, 0.4 GB on disk, a minute",
    steps=(("--no-deps", "-r", "locks/dev.txt"),),
    inputs=("locks/dev.txt",),
)
WORKSPACE = Environment(
    name="workspace",
    cost="0.6 GB to download, 3.2 GB on disk, 2 to 4 minutes on two cores",
    steps=(
        ("--no-deps", TORCH),
        ("--no-deps", "-r", "locks/cpu.txt"),
        ("--no-deps", "-c", "locks/dev.txt", *BACKEND),
    ),
    inputs=("locks/cpu.txt", "locks/dev.txt"),
)
TRL = Environment(
    name="bench-trl",
    cost="0.4 GB to download, 1.5 GB on disk, 1 to 2 minutes",
    steps=(("--no-deps", TORCH), ("--no-deps", "-r", "locks/trl.txt")),
    inputs=("locks/trl.txt",),
)
TRANSFERQUEUE = Environment(
    name="bench-transferqueue",
    cost="0.3 GB to download, 1.2 GB on disk, about a minute",
    steps=(("--no-deps", TORCH), ("--no-deps", "-r", "locks/transferqueue.txt")),
    inputs=("locks/transferqueue.txt",),
)
VERL = Environment(
    name="bench-verl",
    cost="0.5 GB to download, 1.6 GB on disk, about a minute",
    steps=(("--no-deps", TORCH), ("--no-deps", "-r", "locks/verl.txt")),
    inputs=("locks/verl.txt",),
)

VERIFIERS = Environment(
    name="verifiers",
    cost="0.1 GB to download, 0.5 GB on disk, about a minute",
    steps=(
        ("--no-deps", "-r", "locks/verifiers.txt"),
        ("-c", "locks/dev.txt", *BACKEND),
        ("--no-deps", *editable("rl-core", "rl-rollout")),
    ),
    inputs=("locks/verifiers.txt", "locks/dev.txt"),
)
AGENTS = Environment(
    name="agents",
    cost="0.5 GB to download, 1.4 GB on disk, about two minutes",
    steps=(("--no-deps", "-r", "locks/agents.txt"),),
    inputs=("locks/agents.txt",),
)
AGENTS_OPENAI2 = Environment(
    name="agents-openai2",
    cost="0.5 GB to download, 1.5 GB on disk, about two minutes",
    steps=(("--no-deps", "-r", "locks/agents-openai2.txt"),),
    inputs=("locks/agents-openai2.txt",),
)
AGENTS_AIDER = Environment(
    name="agents-aider",
    cost="0.2 GB to download, 0.7 GB on disk, about a minute",
    steps=(("--no-deps", "-r", "locks/agents-aider.txt"),),
    inputs=("locks/agents-aider.txt",),
)
DOCS = Environment(
    name="docs",
    cost="50 MB to download, 15 s",
    steps=(("--no-deps", "-r", "locks/docs.txt"),),
    inputs=("locks/docs.txt",),
)


def unit_environment(package: str, *, without_torch: bool = False) -> Environment:
    """Return the environment of a package with its declared dependencies and the test runner, at locked versions.

    `without_torch` leaves out the extra `torch` of rl-core.
    """
    projects = UNIT_EXTRAS[package]
    if without_torch:
        projects = tuple(project.replace("[torch,", "[") for project in projects)
    needs_torch = any("torch" in r or "rl-distill" in r for r in projects)
    metadata = [f"packages/{r.partition('[')[0]}/pyproject.toml" for r in projects]
    return Environment(
        name=f"unit-{package}{'-without-torch' if projects != UNIT_EXTRAS[package] else ''}",
        cost="1 GB on disk, up to a minute" if needs_torch else "15 s",
        steps=(
            *(((*CONSTRAINTS, TORCH),) if needs_torch else ()),
            (*CONSTRAINTS, "pytest", "coverage", "hypothesis", *BACKEND),
            (*CONSTRAINTS, *editable(*projects)),
        ),
        inputs=(
            "locks/cpu.txt",
            "locks/dev.txt",
            *metadata,
        ),
    )


def wheels_environment(name: str, built: Mapping[str, str], projects: Sequence[str]) -> Environment:
    """Return an environment with wheels, their dependencies and the test runner; callers reinstall newer wheels."""
    torch = ((*CONSTRAINTS, TORCH),) if "rl-distill" in projects else ()
    return Environment(
        name=name,
        cost="1.5 GB on disk, half a minute" if torch else "15 s",
        steps=(*torch, (*CONSTRAINTS, "pytest", *(built[project] for project in projects))),
        inputs=("locks/cpu.txt", *(f"{project}/pyproject.toml" for project in PROJECTS)),
    )


def ensure(session: nox.Session, environment: Environment) -> str:
    """Create the environment unless it matches its recipe; return its interpreter."""
    if said := interpreter_mistake(environment):
        session.error(said)
    stamp = environment.folder / "made-from"
    with only_one(session, environment):
        recipe = environment.recipe()
        if stamp.is_file() and stamp.read_text() == recipe and Path(environment.python).exists():
            return environment.python
        started = time.monotonic()
        session.log(f"Creating the environment .nox/{environment.name}, once: {environment.cost}.")
        shutil.rmtree(environment.folder, ignore_errors=True)
        session.run(
            sys.executable,
            "-m",
            "virtualenv",
            "--quiet",
            f"--python={environment.base.program}",
            str(environment.folder),
        )
        for step in environment.steps:
            install(session, environment.python, *step)
        (site_packages,) = environment.folder.glob("lib/python3*/site-packages")
        (site_packages / "count_starts.pth").write_text(COUNT_STARTS)
        stamp.write_text(recipe)  # last: without it, the folder counts as incomplete
        session.log(f".nox/{environment.name} is ready after {time.monotonic() - started:.0f} s.")
    return environment.python


def interpreter_mistake(environment: Environment) -> str:
    """Return why the environment's Python is not supported, before any download; empty if it is."""
    version = environment.base.version.split()[0]
    minor = int(version.split(".")[1])
    allowed = [int(python.split(".")[1]) for python in PYTHONS]
    if minor in allowed or (minor > max(allowed) and not any(TORCH in step for step in environment.steps)):
        return ""
    found = next(filter(None, map(find_python, PYTHONS)), None)
    get = "Get one (`apt-get install python3.11-venv`, `pyenv install 3.11`, `uv python install 3.11`), and run nox on"
    advice, program = (f"This machine has {found.minor}; run nox on", found.program) if found else (get, "python3.11")
    command = f"{program} -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s train"
    return (
        f".nox/{environment.name} needs Python {', '.join(PYTHONS[:-1])} or {PYTHONS[-1]}; nox runs on {version}. "
        f"{advice} it: `{command}`"
    )


@contextlib.contextmanager
def only_one(session: nox.Session, environment: Environment) -> Iterator[None]:
    """Allow only one nox at a time to create an environment; others wait."""
    environment.folder.parent.mkdir(exist_ok=True)
    with (environment.folder.parent / f"{environment.name}.lock").open("w") as file:
        os.set_inheritable(file.fileno(), True)  # a pip that outlives a killed nox keeps the lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            session.log(f"Another process is creating .nox/{environment.name}; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(session: nox.Session, python: str, *arguments: str) -> None:
    """Run pip; torch comes from pip's configured indexes if they have its CPU build, else from PyTorch's CPU index.

    If neither has it for this interpreter, the environment gets the CUDA build. A failure ends the session with pip's
    last lines.
    """
    folder = Path(python).parents[1]
    has_cuda_torch = (folder / "cuda-torch").is_dir()
    words = with_cuda_torch(folder, arguments) if has_cuda_torch else list(arguments)
    lines = pip_install(session, python, *words)
    if lacks_torch(lines):
        session.log(f"pip's sources have no {TORCH}; trying PyTorch's CPU index.")
        lines = pip_install(session, python, "--extra-index-url", TORCH_INDEX, *words)
    if lacks_torch(lines) and TORCH in arguments:
        session.log(
            f"Neither has {TORCH} for Python {python_of(folder)}. Taking {CUDA_TORCH}, the build for GPUs, "
            "which runs on CPUs too: 2.3 GB more to download, 3.1 GB more on disk, and about 3 minutes."
        )
        (folder / "cuda-torch").mkdir()
        words = with_cuda_torch(folder, arguments)
        lines = pip_install(session, python, *words) or install_cuda_libraries(session, python, words)
    if lines:
        said = "\n".join(line for line in lines if not line.startswith("WARNING"))
        session.error(
            f"pip could not install {' '.join(words)}. Is a package registry reachable (`pip config list`)? "
            f"The next run creates the environment again. pip said:\n{said}"
        )


def python_of(folder: Path) -> str:
    """Return the Python version of an environment, such as "3.12"."""
    (library,) = folder.glob("lib/python3*")
    return library.name.removeprefix("python")


def lacks_torch(lines: Sequence[str]) -> bool:
    """Return True if pip found no CPU build of torch for the interpreter; its message depends on constraints."""
    said = (f"No matching distribution found for {TORCH}", f"Cannot install {TORCH} because")
    return any(words in line for line in lines for words in said)


def with_cuda_torch(folder: Path, arguments: Sequence[str]) -> list[str]:
    """Return pip's arguments with torch's CUDA build instead of its CPU build, also in copies of the named locks."""
    words = []
    for argument in arguments:
        if argument.startswith("locks/"):
            copy = folder / "cuda-torch" / Path(argument).name
            copy.write_text((ROOT / argument).read_text().replace(TORCH, CUDA_TORCH))
            words.append(str(copy))
        else:
            words.append(CUDA_TORCH if argument == TORCH else argument)
    return words


def install_cuda_libraries(session: nox.Session, python: str, words: Sequence[str]) -> list[str]:
    """Add torch's CUDA libraries after an install without dependencies, but not triton, which breaks vLLM on CPUs."""
    if "--no-deps" not in words:
        return []
    asked = "import importlib.metadata as m; print(*m.requires('torch'), sep='\\n')"
    needs = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.splitlines()
    libraries = [need for need in needs if need.startswith(("cuda-toolkit", "nvidia-"))]
    options = [word for word in words if word not in ("--no-deps", CUDA_TORCH)]
    return pip_install(session, python, *options, *libraries)


def pip_install(session: nox.Session, python: str, *arguments: str) -> list[str]:
    """Run `pip install` and log progress every 10 s; return pip's last lines if it fails, else []."""
    command = [python, "-m", "pip", "install", "--no-compile", "--progress-bar=off", *arguments]
    started = time.monotonic()
    with (
        tempfile.NamedTemporaryFile("w", prefix="pip-") as output,
        subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, close_fds=False) as process,
    ):
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            lines = Path(output.name).read_text(errors="replace").splitlines()
            if process.returncode is not None:
                return lines[-20:] if process.returncode else []
            num_found = sum(line.startswith(("Collecting", "Processing")) for line in lines)
            unpacks = any(line.startswith("Installing collected packages") for line in lines)
            state = f"unpacking {num_found} packages" if unpacks else f"{num_found} packages found"
            session.log(f"  {state} ({time.monotonic() - started:.0f} s)")


def workspace(session: nox.Session) -> str:
    """Create the environment with all locked libraries and editable projects; return its interpreter."""
    if sys.platform != "linux":
        session.error(f"locks/cpu.txt is for Linux; found {sys.platform}. A Linux container runs it")
    python = ensure(session, WORKSPACE)
    stamp = WORKSPACE.folder / "projects-made-from"
    with only_one(session, WORKSPACE):
        files = [(ROOT / project / "pyproject.toml").read_bytes() for project in PROJECTS]
        recipe = hashlib.sha256(b"\0".join(files)).hexdigest()
        if not stamp.is_file() or stamp.read_text() != recipe:
            names = [Path(project).name for project in PROJECTS]
            session.log("Installing the projects, editable.")
            install(session, python, "--no-deps", *editable(*names))
            stamp.write_text(recipe)
    return python


def chromium(session: nox.Session) -> None:
    """Install Debian's Chromium, in which the tests open reports; if that fails, log how to install it and continue.

    Tests in a browser are then skipped with the same advice.
    """
    if any(shutil.which(name) for name in CHROMIUM):
        return
    rights = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]
    advice = "install chromium by hand, such as: apt-get install chromium"
    if not all(shutil.which(name) for name in ("apt-get", *rights[:1])):
        session.warn(
            f"The tests of reports need Chromium, and there is no {' '.join((*rights[:1], 'apt-get'))}; {advice}."
        )
        return
    session.log("Installing Chromium, once: 90 MB to download.")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", "chromium"]):
        command = [*rights, "apt-get", "--quiet", *arguments]
        try:
            subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=APT_S)
        except subprocess.SubprocessError as error:
            said = "\n".join(str(getattr(error, "stderr", None) or error).splitlines()[-5:])
            session.warn(f"apt-get {arguments[0]} failed; {advice}. It said:\n{said}")
            return
