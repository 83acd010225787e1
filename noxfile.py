"""Every verb of the project: `nox -l` is the table of contents, a bare `nox` runs the checks.

Environments live in .nox, one for each purpose, and are shared between verbs. Each is made from locks/ once,
made again when what it was made from changes, and never taken for whole when its making was cut short.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).resolve().parent
PACKAGES = ("rl-core", "rl-rollout", "rl-distill", "rl-metrics")
APPS = ("rl-trainer", "rl-sync-trainer", "rl-async-trainer")
PROJECTS = (*(f"packages/{name}" for name in PACKAGES), *(f"apps/{name}" for name in APPS))
SOURCES = tuple(f"{project}/src" for project in PROJECTS)
CHECKED = (*PROJECTS, "benchmarks", "examples", "tests", "noxfile.py", "conftest.py")
UNIT_EXTRAS = {
    "rl-core": ("rl-core[torch,prometheus,zarr]",),
    "rl-rollout": ("rl-core[torch]", "rl-rollout[transformers,math,datasets,tools,mcp,http,json-schema,skip]"),
    "rl-distill": ("rl-core[torch]", "rl-distill[megatron,cache]"),
    "rl-metrics": ("rl-core", "rl-metrics[plot,tensorboard,wandb,mlflow,parquet]"),
}
WORKSPACE_TESTS = (
    "packages/rl-rollout/tests/test_engines_process.py",
    "packages/rl-rollout/tests/test_engines_vllm.py",
    "packages/rl-rollout/tests/test_engines_vllm_live_weights.py",
    "packages/rl-rollout/tests/test_engines_vllm_scores.py",
    "packages/rl-rollout/tests/test_engines_vllm_tensor_parallel.py",
    "packages/rl-rollout/tests/test_loops_verifiers.py",
)
"""Tests of packages that need more than the packages declare, such as vLLM; `unit` leaves them out."""
TORCH = "torch==2.13.0+cpu"
CONSTRAINTS = ("-c", "locks/cpu.txt", "-c", "locks/dev.txt")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
BACKEND = ("hatchling", "pathspec", "trove-classifiers", "pluggy", "packaging")
TWO_WORKERS = ("-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "--max-worker-restart", "0")
TEST_ENV = {
    "OMP_NUM_THREADS": "1",  # two processes with two threads each starve one another on two cores
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_MODE": "offline",
    "TOKENIZERS_PARALLELISM": "false",
}
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # Some hundred processes of a test run would each compile torch and vLLM anew; nothing is written into the checkout.
    os.environ["PYTHONPYCACHEPREFIX"] = str(ROOT / ".nox" / "pycache")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
"""Names of the program, by any of which tests/support/chromium.py finds it."""
APT_S = 600.0  # a mirror that stalls, or another apt-get, does not keep the tests
STOP_S = 120.0  # after Ctrl-C a child may still write its checkpoint
LOGS = ROOT / ".nox" / "log"
CHECKS = (
    ("lint",),
    ("imports",),
    ("unit", "rl-rollout"),
    ("unit", "rl-distill"),
    ("types",),
    ("unit", "rl-core"),
    ("unit", "rl-metrics"),
    ("wheels",),
)
"""Sessions of `checks`, with their arguments: the quick ones first, then the longest."""
TIMES, STARTS = "RL_TEST_TIMES", "RL_TEST_STARTS"
"""Files to which every pytest appends the seconds of its tests, and every Python process of an environment a byte."""
COUNT_STARTS = (
    f"import os; name = os.environ.get('{STARTS}'); file = os.open(name, os.O_WRONLY | os.O_APPEND) if name else None; "
    "name and (os.write(file, b'.'), os.close(file))\n"
)

nox.options.sessions = ["checks"]
nox.options.default_venv_backend = "none"
nox.options.error_on_external_run = False


@dataclass(frozen=True)
class Environment:
    """A virtual environment: a name, what it costs, pip's arguments step by step, and the files these read."""

    name: str
    cost: str
    steps: tuple[tuple[str, ...], ...]
    inputs: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where it is."""
        return ROOT / ".nox" / self.name

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    def recipe(self) -> str:
        """Digest of everything it is made from."""
        made_of = [sys.version, sys.base_prefix, str(self.folder), self.steps, COUNT_STARTS]
        digest = hashlib.sha256(json.dumps(made_of).encode())
        for name in self.inputs:
            digest.update((ROOT / name).read_bytes())
        return digest.hexdigest()


def editable(*requirements: str) -> tuple[str, ...]:
    """Pip arguments that install projects, with extras such as rl-core[torch], from their folders."""
    folders = {Path(project).name: project for project in PROJECTS}
    paths = [f"./{folders[r.partition('[')[0]]}{''.join(r.partition('[')[1:])}" for r in requirements]
    return ("--no-build-isolation", *(word for path in paths for word in ("-e", path)))


TOOLS = Environment(
    name="tools",
    cost="60 MB to download, 15 s",
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
PEERS = {
    "trl": ("TRL_PYTHON", TRL),
    "transfer": ("TRANSFERQUEUE_PYTHON", TRANSFERQUEUE),
    "skip-cache": ("VERL_PYTHON", VERL),
}
"""Of each benchmark: the variable that names its peer's interpreter, and the peer's environment."""
OPTIONAL_PEERS = ("skip-cache",)
"""Benchmarks that go on without a peer whose environment cannot be made."""


def unit_environment(package: str) -> Environment:
    """A package with what it declares and the test runner, nothing else; versions from the lock."""
    projects = UNIT_EXTRAS[package]
    needs_torch = any("torch" in r or "rl-distill" in r for r in projects)
    metadata = [f"packages/{r.partition('[')[0]}/pyproject.toml" for r in projects]
    return Environment(
        name=f"unit-{package}",
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


def ensure(session: nox.Session, environment: Environment) -> str:
    """Make the environment unless it stands as its recipe says; gives its interpreter."""
    if sys.version_info < (3, 11):  # noqa: UP036 - nox itself runs on older ones
        session.error(f"Python 3.11 or newer is needed; nox runs on {platform.python_version()}")
    stamp = environment.folder / "made-from"
    with only_one(session, environment):
        recipe = environment.recipe()
        if stamp.is_file() and stamp.read_text() == recipe and Path(environment.python).exists():
            return environment.python
        started = time.monotonic()
        session.log(f"Making the environment .nox/{environment.name}, once: {environment.cost}.")
        shutil.rmtree(environment.folder, ignore_errors=True)
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(environment.folder))
        for step in environment.steps:
            install(session, environment.python, *step)
        (site_packages,) = environment.folder.glob("lib/python3*/site-packages")
        (site_packages / "count_starts.pth").write_text(COUNT_STARTS)
        stamp.write_text(recipe)  # last: without it the folder counts as torn
        session.log(f".nox/{environment.name} is ready after {time.monotonic() - started:.0f} s.")
    return environment.python


@contextlib.contextmanager
def only_one(session: nox.Session, environment: Environment) -> Iterator[None]:
    """Let one nox at a time make an environment; the others wait for it."""
    environment.folder.parent.mkdir(exist_ok=True)
    with environment.folder.with_suffix(".lock").open("w") as file:
        os.set_inheritable(file.fileno(), True)  # a pip that outlives a killed nox still holds it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            session.log(f"Another process is making .nox/{environment.name}; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(session: nox.Session, python: str, *arguments: str) -> None:
    """Run pip; torch comes from pip's own sources where they have it, else from PyTorch's CPU index.

    A failure ends the session with pip's last words.
    """
    lines = pip_install(session, python, *arguments)
    if any(f"No matching distribution found for {TORCH}" in line for line in lines):
        session.log(f"pip's sources have no {TORCH}; trying PyTorch's CPU index.")
        lines = pip_install(session, python, "--extra-index-url", TORCH_INDEX, *arguments)
    if lines:
        said = "\n".join(line for line in lines if not line.startswith("WARNING"))
        session.error(
            f"pip could not install {' '.join(arguments)}. Is a package registry reachable (`pip config list`)? "
            f"The half-made environment is made again by the next run. pip said:\n{said}"
        )


def pip_install(session: nox.Session, python: str, *arguments: str) -> list[str]:
    """Run `pip install`, saying every 10 s how far it is; pip's last lines when it fails, else none."""
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
                return lines[-15:] if process.returncode else []
            num_found = sum(line.startswith(("Collecting", "Processing")) for line in lines)
            unpacks = any(line.startswith("Installing collected packages") for line in lines)
            state = f"unpacking {num_found} packages" if unpacks else f"{num_found} packages found"
            session.log(f"  {state} ({time.monotonic() - started:.0f} s)")


def workspace(session: nox.Session) -> str:
    """The environment with everything locked and all projects in it, editable; gives its interpreter."""
    if sys.platform != "linux":
        session.error(f"locks/cpu.txt is for Linux; found {sys.platform}. A Linux container runs it")
    python = ensure(session, WORKSPACE)
    stamp = WORKSPACE.folder / "projects-made-from"
    with only_one(session, WORKSPACE):
        files = [(ROOT / project / "pyproject.toml").read_bytes() for project in PROJECTS]
        recipe = hashlib.sha256(b"\0".join(files)).hexdigest()
        if not stamp.is_file() or stamp.read_text() != recipe:
            names = [Path(project).name for project in PROJECTS]
            session.log("Putting the projects into it, editable.")
            install(session, python, "--no-deps", *editable(*names))
            stamp.write_text(recipe)
    return python


def chromium(session: nox.Session) -> None:
    """Have Debian's Chromium, in which the tests open reports; a session that cannot install it says how, and goes on.

    The tests of reports in a browser are then skipped, with the same advice.
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


def run_pytest(session: nox.Session, python: str, *arguments: str) -> None:
    """Run pytest quietly for the environment: threads bounded, no network look-ups."""
    runner = ("coverage", "run", "-m", "pytest") if "COVERAGE_FILE" in os.environ else ("pytest",)
    session.run(python, "-m", *runner, *arguments, env=TEST_ENV, interrupt_timeout=STOP_S)


@contextlib.contextmanager
def summary(session: nox.Session) -> Iterator[None]:
    """Say at the end what the tests took: all of it, the ten slowest, and how many processes were started."""
    if TIMES in os.environ:  # whoever started this nox says it
        yield
        return
    began = time.monotonic()
    LOGS.mkdir(parents=True, exist_ok=True)
    times, starts = LOGS / "times.jsonl", LOGS / "starts"
    for name, file in ((TIMES, times), (STARTS, starts)):
        file.write_bytes(b"")
        os.environ[name] = str(file)
    try:
        yield
    finally:
        del os.environ[TIMES], os.environ[STARTS]
        rows = [json.loads(line) for line in times.read_text().splitlines()]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        session.log(
            f"{time.monotonic() - began:,.0f} s in total, {used.ru_utime + used.ru_stime:,.0f} s of processor time, "
            f"{starts.stat().st_size:,} Python processes, {len(rows):,} tests; the slowest:"
        )
        for row in sorted(rows, key=lambda row: -row["seconds"])[:10]:
            session.log(f"{row['seconds']:7.1f} s  {row['test']}")


@dataclass(frozen=True)
class Job:
    """A session of this file in a nox of its own, which says nothing until it has ended."""

    session: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """Such as "unit rl-core"."""
        return " ".join((self.session, *self.words))

    @property
    def log(self) -> Path:
        """What it says."""
        return LOGS / f"{'-'.join(word.strip('-') for word in (self.session, *self.words))}.txt"

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, in a process group of its own: Ctrl-C comes to it once, from `end`."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "nox", "--session", self.session, "--", *self.words]
        with self.log.open("wb") as output:
            return subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )


def run_jobs(session: nox.Session, jobs: Sequence[Job], *, at_once: int) -> None:
    """Run jobs side by side; one that fails is shown at once, with all its output, and fails the session at the end."""
    waiting, failed = list(jobs), []
    running: dict[Job, tuple[subprocess.Popen[bytes], float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job] = job.start(), time.monotonic()
            time.sleep(0.1)
            for job, (process, began) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[job]
                took = f"after {time.monotonic() - began:.0f} s"
                if process.returncode == 0:
                    session.log(f"{job.name} passed {took}")
                    continue
                failed.append(job.name)
                session.log(f"{job.name} FAILED {took}; it said:\n{job.log.read_text(errors='replace')}")
    finally:
        end([process for process, _ in running.values()])
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt jobs that run, as Ctrl-C does, and wait until they have ended."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        os.killpg(process.pid, signal.SIGINT)
    ends_at = time.monotonic() + STOP_S
    for process in left:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, ends_at - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@nox.session
def train(session: nox.Session) -> None:
    """Run the main job, the arithmetic example; arguments pass through: `nox -s train -- --trainer.steps=20`."""
    python = workspace(session)
    sys.stdout.flush()
    # The job takes the place of nox: its exit status, Ctrl-C and SIGTERM are then the user's, with nothing between.
    os.execv(python, [python, "examples/arithmetic/run.py", *session.posargs])


@nox.session
def tests(session: nox.Session) -> None:
    """Run all that CI runs: the checks, and beside them all tests on real vLLM and Megatron; with arguments, pytest."""
    if session.posargs:
        with summary(session):
            if any(word.rstrip("/") == "tests" or "report" in word for word in session.posargs):
                chromium(session)
            run_pytest(session, workspace(session), *session.posargs)
        return
    apps = [f"{project}/tests" for project in PROJECTS if project.startswith("apps/")]  # packages are covered by unit
    suites = ["tests", "examples", *WORKSPACE_TESTS, *apps]
    session.log("All tests, and beside them the checks (lint, imports, types, unit, wheels); on two cores 25 minutes.")
    with summary(session):
        checks = Job("checks", ("--at-once", "1"))
        running = checks.start()
        try:
            chromium(session)
            failure = None
            try:
                run_pytest(session, workspace(session), *TWO_WORKERS, *suites)
            except CommandFailed as error:
                failure = error
            session.log(f"Waiting for the checks, which write to {checks.log.relative_to(ROOT)}.")
            running.wait()
        finally:
            end([running])
        print(checks.log.read_text(errors="replace"))
    if failure is not None:
        raise failure
    if running.returncode:
        session.error("the tests passed, but a check above failed")


@nox.session
def checks(session: nox.Session) -> None:
    """Run lint, imports, types, unit and wheels, two at once: what a bare `nox` does."""
    parser = argparse.ArgumentParser(prog="nox -s checks --")
    parser.add_argument("--at-once", type=int, default=2, help="how many side by side")
    options = parser.parse_args(session.posargs)
    with summary(session):
        run_jobs(session, [Job(name, tuple(words)) for name, *words in CHECKS], at_once=options.at_once)


@nox.session
def coverage(session: nox.Session) -> None:
    """Run the tests, and say which lines of packages and apps they ran, child processes included."""
    folder = ROOT / ".nox" / "coverage"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["COVERAGE_FILE"] = str(folder / "data")
    os.environ["RL_TESTS_COLD"] = "1"  # a process that is forked takes what the others measured along
    command = [sys.executable, "-m", "nox", "--session", "tests"]
    tests = subprocess.run(command, cwd=ROOT, check=False).returncode
    python = workspace(session)
    session.run(python, "-m", "coverage", "combine", "--quiet", str(folder))
    session.run(python, "-m", "coverage", "json", "--quiet", "-o", str(folder / "coverage.json"))
    session.run(python, "-m", "coverage", "report", "--skip-covered", "--format=total")
    if tests:
        session.error("a test failed")


@nox.session
def unit(session: nox.Session) -> None:
    """Test each package with only what it declares: `nox -s unit -- rl-core -k queue`."""
    named = [name for name in PACKAGES if name in session.posargs]
    rest = [word for word in session.posargs if word not in PACKAGES]
    failed = []
    with summary(session):
        for name in named or PACKAGES:
            python = ensure(session, unit_environment(name))
            try:
                run_pytest(session, python, "-k", "not vllm", f"packages/{name}/tests", *rest)  # it is in `tests`
            except CommandFailed:
                failed.append(name)
    if failed:
        session.error(f"unit tests failed: {', '.join(failed)}")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format; `nox -s lint -- --fix` mends what can be mended."""
    tools = ensure(session, TOOLS)
    fix = "--fix" in session.posargs
    paths = [path for path in CHECKED if (ROOT / path).exists()]
    session.run(tools, "-m", "ruff", "check", *(["--fix"] if fix else []), *paths)
    session.run(tools, "-m", "ruff", "format", *([] if fix else ["--check"]), *paths)


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly, against the installed libraries."""
    python, tools = workspace(session), ensure(session, TOOLS)
    mypy = (tools, "-m", "mypy", "--python-executable", python)
    session.run(*mypy, *SOURCES)
    for folder in sorted({path.parent for name in ("examples", "benchmarks") for path in (ROOT / name).rglob("*.py")}):
        session.run(
            *mypy, str(folder.relative_to(ROOT)), env={"MYPYPATH": f"{folder}:{folder.parent}"}
        )  # scripts import neighbours
    session.run(tools, "-m", "mypy", "noxfile.py")


@nox.session
def imports(session: nox.Session) -> None:
    """Check the directions of imports between packages, and where optional backends may appear."""
    tools = ensure(session, TOOLS)
    path = os.pathsep.join(str(ROOT / source) for source in SOURCES)
    session.run(str(Path(tools).with_name("lint-imports")), "--no-cache", env={"PYTHONPATH": path})


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every wheel and try them outside the checkout, in environments with nothing but what they declare."""
    tools = ensure(session, TOOLS)
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for project in PROJECTS:
        session.run(tools, "-m", "build", "--no-isolation", "--outdir", str(dist), project, silent=True)
    built = {path.name.partition("-")[0].replace("_", "-"): str(path) for path in sorted(dist.glob("*.whl"))}
    light, whole = ("rl-core", "rl-rollout"), tuple(built)
    for names, environment, attempt in (
        (light, wheels_environment("wheels-light", built, light), ("test_imports.py", "-k", "rl_core or rl_rollout")),
        (whole, wheels_environment("wheels", built, whole), ("test_imports.py", "test_wheels.py")),
    ):
        python = ensure(session, environment)
        install(session, python, "--no-deps", "--force-reinstall", *(built[name] for name in names))
        with tempfile.TemporaryDirectory(prefix="rl-wheels-") as folder:
            for name in ("test_imports.py", "test_wheels.py"):
                shutil.copy(ROOT / "tests" / name, folder)
            with session.chdir(folder):
                words = ["-q", "-p", "no:cacheprovider", "--rootdir", folder, *attempt]
                without_torch = {"WITHOUT_TORCH": "1"} if names == light else {}
                session.run(python, "-I", "-m", "pytest", *words, env=without_torch)
        session.run(python, "-m", "pip", "check")


def wheels_environment(name: str, built: Mapping[str, str], projects: Sequence[str]) -> Environment:
    """What wheels declare, and the test runner; torch only where a wheel asks for it. The wheels in it get outdated."""
    torch = ((*CONSTRAINTS, TORCH),) if "rl-distill" in projects else ()
    return Environment(
        name=name,
        cost="1.5 GB on disk, half a minute" if torch else "15 s",
        steps=(*torch, (*CONSTRAINTS, "pytest", *(built[project] for project in projects))),
        inputs=("locks/cpu.txt", *(f"{project}/pyproject.toml" for project in PROJECTS)),
    )


@nox.session
def bench(session: nox.Session) -> None:
    """Run a benchmark against its peer: `nox -s bench -- trl --json results.json`; without a name, list them."""
    names = {path.stem.replace("_", "-"): path for path in sorted((ROOT / "benchmarks").glob("[!_]*.py"))}
    name = session.posargs[0].replace("_", "-") if session.posargs else ""
    if name not in names:
        session.error(f"name a benchmark: {', '.join(names) or 'there is none yet'}; found {name or 'no name'}")
    env = peer_variables(session, name)
    python = workspace(session)
    session.run(python, str(names[name].relative_to(ROOT)), *session.posargs[1:], env=env, interrupt_timeout=STOP_S)


def peer_variables(session: nox.Session, name: str) -> dict[str, str]:
    """The variable that tells a benchmark its peer's interpreter; none where it has no peer, or does without."""
    if name not in PEERS or "--quick" in session.posargs:
        return {}
    variable, peer = PEERS[name]
    try:
        return {variable: ensure(session, peer)}
    except Exception as error:  # nox has no public name for what session.error raises
        if name not in OPTIONAL_PEERS:
            raise
        session.log(f"The benchmark goes on without .nox/{peer.name}: {error}")
        return {}


@nox.session
def soak(session: nox.Session) -> None:
    """Run the long fault and fuzz tests: `nox -s soak -- transfer --seed 7`; the seed is printed when none is given."""
    parser = argparse.ArgumentParser(prog="nox -s soak --")
    parser.add_argument("name", nargs="?", help="part of a test's name; all when left out")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    options, rest = parser.parse_known_args(session.posargs)
    session.log(f"Seed {options.seed}; the same run again: nox -s soak -- {options.name or ''} --seed {options.seed}")
    chosen = ["-k", options.name.replace("-", "_")] if options.name else []
    seeds = [f"--seed={options.seed}", f"--hypothesis-seed={options.seed}", "--hypothesis-profile=soak"]
    limits = ["-o", "faulthandler_timeout=14400"]
    os.environ["RL_TESTS_COLD"] = "1"  # every process as users start it
    with summary(session):
        folders = ("packages", "apps", "tests")
        run_pytest(session, workspace(session), "-m", "soak", *chosen, *seeds, *limits, *rest, *folders)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the GPU tests with the python on PATH, whose wheels fit its GPU (locks/README.md)."""
    paths = os.pathsep.join([*(str(ROOT / s) for s in SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**TEST_ENV, "PYTHONPATH": paths}
    session.run("python", "-m", "pytest", "-m", "gpu", *(session.posargs or ["packages", "apps", "tests"]), env=env)


@nox.session
def changelog(session: nox.Session) -> None:
    """Show each package's next changelog; `nox -s changelog -- rl-core` writes that one and drops its fragments."""
    tools = ensure(session, TOOLS)
    names = [Path(project).name for project in PROJECTS]
    for project, name in zip(PROJECTS, names, strict=True):
        if session.posargs and name not in session.posargs:
            continue
        version = nox.project.load_toml(ROOT / project / "pyproject.toml")["project"]["version"]
        mode = ["--yes"] if session.posargs else ["--draft"]
        session.run(tools, "-m", "towncrier", "build", "--dir", project, "--version", version, *mode)


@nox.session
def lock(session: nox.Session) -> None:
    """Renew locks/*.txt from locks/*.in: `nox -s lock -- cpu`; all when none is named."""
    tools = ensure(session, TOOLS)
    left_out = {line.split(";")[0].strip() for line in (ROOT / "locks/overrides.txt").read_text().splitlines()}
    for name in session.posargs or ("cpu", "dev", "trl", "transferqueue", "verl"):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            resolve = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--report", str(report)]
            install(session, tools, *resolve, "-r", f"locks/{name}.in")
            found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
        pins = {item["name"].lower().replace("_", "-").replace(".", "-"): item["version"] for item in found}
        text = "".join(f"{key}=={pins[key]}\n" for key in sorted(pins) if key not in left_out)
        (ROOT / f"locks/{name}.txt").write_text(text)
        session.log(f"locks/{name}.txt: {text.count('==')} packages. Now run `nox -s tests` before you commit it.")
