"""The project's nox sessions: `nox -l` lists them, `nox` alone runs the checks.

tooling/environments.py creates their environments; tooling/runs.py runs tests, and sessions in parallel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tooling.environments import (
    AGENTS,
    AGENTS_AIDER,
    AGENTS_OPENAI2,
    DOCS,
    PACKAGES,
    PROJECTS,
    ROOT,
    SERVICE,
    TOOLS,
    TRANSFERQUEUE,
    TRL,
    VERIFIERS,
    VERL,
    chromium,
    ensure,
    install,
    unit_environment,
    wheels_environment,
    workspace,
)
from tooling.processors import Suite, run_on_processors
from tooling.projects import read_projects
from tooling.pythons import HERE, PYTHONS, how_to_get, needed_python, other_pythons
from tooling.release import DIST, build, release_projects, try_from_index
from tooling.runs import LOGS, METRICS, STOP_S, Job, end, run_jobs, run_pytest, summary

SOURCES = tuple(f"{project}/src" for project in PROJECTS)
CHECKED = (*PROJECTS, "benchmarks", "examples", "tests", "tooling", "noxfile.py", "conftest.py")
WORKSPACE_TESTS = (
    "packages/rl-rollout/tests/test_engines_process.py",
    "packages/rl-rollout/tests/test_engines_vllm.py",
    "packages/rl-rollout/tests/test_engines_vllm_adapters.py",
    "packages/rl-rollout/tests/test_engines_vllm_slots.py",
    "packages/rl-rollout/tests/test_engines_vllm_experts.py",
    "packages/rl-rollout/tests/test_engines_vllm_image_adapters.py",
    "packages/rl-rollout/tests/test_engines_vllm_images.py",
    "packages/rl-rollout/tests/test_engines_vllm_live_weights.py",
    "packages/rl-rollout/tests/test_engines_vllm_mixtures.py",
    "packages/rl-rollout/tests/test_engines_vllm_scores.py",
    "packages/rl-rollout/tests/test_engines_vllm_support.py",
    "packages/rl-rollout/tests/test_engines_vllm_tensor_parallel.py",
    "packages/rl-rollout/tests/test_tools_vllm_parsers.py",
    "packages/rl-rollout/tests/test_loops_verifiers.py",
)
"""Tests of packages that need undeclared dependencies, such as vLLM; `unit` leaves them out."""
WORKSPACE_SUITES = (
    "tests",
    "examples",
    *WORKSPACE_TESTS,
    *(f"{project}/tests" for project in PROJECTS if project.startswith("apps/")),
)
"""What `tests` runs in the workspace's environment; `unit` covers the packages."""
RECORDED_TEST = "tests/test_recorded_metrics.py"
"""Reads the names of metrics that the other tests recorded."""
AGENT_LOCKS = ("agents", "agents-openai2", "agents-aider")
LOCKS = ("cpu", "dev", "trl", "transferqueue", "verl", "verifiers", *AGENT_LOCKS, "docs", "gpu", "service")
RECIPES_TESTS = "apps/rl-service/tests/test_recipes.py"
AGENTS_TESTS = "packages/rl-rollout/tests/test_gateway_agents.py"
TWO_WORKERS = ("-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "--max-worker-restart", "0")
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # Without bytecode, hundreds of processes would each compile torch and vLLM; keep it out of the checkout.
    os.environ["PYTHONPYCACHEPREFIX"] = str(ROOT / ".nox" / "pycache")
CHECKS = (
    ("lint",),
    ("imports",),
    ("unit", "rl-rollout"),
    ("unit", "rl-distill"),
    ("types",),
    ("unit", "rl-core"),
    ("unit", "rl-metrics"),
    ("wheels",),
    ("pythons", "--newest"),
)
"""Sessions of `checks` with their arguments: the quick ones first, then the longest."""
ON_EVERY_PYTHON = ("--without-torch", "rl-core", "rl-metrics", "-m", "not one_python and not soak and not gpu")
"""Arguments that `pythons` passes to `unit`. Without a CPU build of torch, pip would download 2.3 GB."""
PEERS = {
    "trl": ("TRL_PYTHON", TRL),
    "transfer": ("TRANSFERQUEUE_PYTHON", TRANSFERQUEUE),
    "skip-cache": ("VERL_PYTHON", VERL),
}
"""For each benchmark, the variable with its peer's interpreter, and the peer's environment."""
OPTIONAL_PEERS = ("skip-cache",)
"""Benchmarks that run without their peer if its environment cannot be created."""

CHECKS_S = 7200.0
"""Maximum wait for the checks after the tests, in seconds; then they are stopped and count as failed."""

nox.options.sessions = ["checks"]
nox.options.default_venv_backend = "none"
nox.options.error_on_external_run = False


@nox.session
def train(session: nox.Session) -> None:
    """Run the arithmetic example; arguments are passed on: `nox -s train -- --trainer.steps=20`."""
    python = workspace(session)
    sys.stdout.flush()
    # The trainer replaces nox, so the user gets its exit status, and it receives Ctrl-C and SIGTERM directly.
    os.execv(python, [python, "examples/arithmetic/run.py", *session.posargs])


@nox.session
def tests(session: nox.Session) -> None:
    """Run what CI runs: the checks, and in parallel all tests with vLLM and Megatron; with arguments, run pytest."""
    ensure(session, TOOLS)  # tests/test_release.py writes a changelog with its towncrier
    if session.posargs:
        with summary(session):
            if any(word.rstrip("/") == "tests" or "report" in word or "docs" in word for word in session.posargs):
                chromium(session)
            if any(word.rstrip("/") == "tests" or "docs" in word for word in session.posargs):
                ensure(session, DOCS)
            if any("rl-service" in word for word in session.posargs):
                recipes_environment(session, is_needed=False)
            run_pytest(session, workspace(session), *session.posargs)
        return
    session.log("All tests, and in parallel the checks (lint, types, unit, wheels): 25 minutes on two cores.")
    with summary(session):
        beside = Job("checks", ())
        running = beside.start()
        try:
            chromium(session)
            ensure(session, DOCS)
            failure = None
            try:
                run_workspace(session)
            except CommandFailed as error:
                failure = error
            session.log(f"Waiting for the checks, which write to {LOGS.relative_to(ROOT)}.")
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(CHECKS_S)
        finally:
            end([running])
        print(beside.log.read_text(errors="replace"))
    if failure is not None:
        raise failure
    if running.returncode:
        session.error("the tests passed, but a check above failed")


def run_workspace(session: nox.Session) -> None:
    """Run the workspace's tests, then compare the metrics that they recorded with the defined ones."""
    python = workspace(session)
    os.environ[METRICS] = str(LOGS / "metrics.txt")
    recipes_environment(session, is_needed=False)
    try:
        run_pytest(session, python, *TWO_WORKERS, f"--ignore={RECORDED_TEST}", *WORKSPACE_SUITES)
        run_pytest(session, python, RECORDED_TEST)
    finally:
        del os.environ[METRICS]


@nox.session
def checks(session: nox.Session) -> None:
    """Run lint, imports, types, unit, wheels and pythons, two at a time; `nox` alone does this."""
    parser = argparse.ArgumentParser(prog="nox -s checks --")
    parser.add_argument("--at-once", type=int, default=2, help="number of sessions to run in parallel")
    options = parser.parse_args(session.posargs)
    if options.at_once < 1:
        parser.error(f"--at-once must be at least 1; found {options.at_once}.")
    jobs = [Job(name, tuple(words)) for name, *words in CHECKS]
    with summary(session):
        run_jobs(session, jobs, at_once=options.at_once)


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure which lines of packages and apps the tests run, including child processes."""
    folder = ROOT / ".nox" / "coverage"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["COVERAGE_FILE"] = str(folder / "data")
    command = [sys.executable, "-m", "nox", "--session", "tests"]
    tests = subprocess.run(command, cwd=ROOT, check=False).returncode
    python = workspace(session)
    session.run(python, "-m", "coverage", "combine", "--quiet", str(folder))
    session.run(python, "-m", "coverage", "json", "--quiet", "-o", str(folder / "coverage.json"))
    session.run(python, "-m", "coverage", "report", "--skip-covered", "--format=total")
    if tests:
        session.error("a test failed")


@nox.session
def mutate(session: nox.Session) -> None:
    """Change code at random and name what no test notices: `nox -s mutate -- FOLDER --sample 200 --seed 1`."""
    python = workspace(session)
    words = (*session.posargs, "--without", *WORKSPACE_TESTS)
    session.run(python, "-m", "tooling.mutation.run", *words, interrupt_timeout=STOP_S)


@nox.session
def unit(session: nox.Session) -> None:
    """Test each package with only its declared dependencies: `nox -s unit -- rl-core -k queue --python 3.12`."""
    parser = argparse.ArgumentParser(prog="nox -s unit --", allow_abbrev=False)
    parser.add_argument("--python", choices=PYTHONS, default=HERE.minor, help="Python version (default: that of nox)")
    parser.add_argument("--without-torch", action="store_true", help="test rl-core without its extra `torch`")
    options, words = parser.parse_known_args(session.posargs)
    base = needed_python(session, options.python)
    named = [name for name in PACKAGES if name in words]
    rest = [word for word in words if word not in PACKAGES]
    failed = []
    with summary(session):
        for name in named or PACKAGES:
            python = ensure(session, unit_environment(name, without_torch=options.without_torch).on(base))
            try:
                run_pytest(session, python, "-k", "not vllm", f"packages/{name}/tests", *rest)  # `tests` runs those
            except CommandFailed:
                failed.append(name)
    if failed:
        session.error(f"unit tests failed: {', '.join(failed)}")


@nox.session
def pythons(session: nox.Session) -> None:
    """Run the unit tests of rl-core and rl-metrics on the other supported Pythons found; `-- --newest` on one."""
    parser = argparse.ArgumentParser(prog="nox -s pythons --")
    parser.add_argument("--newest", action="store_true", help="only on the newest Python found")
    options = parser.parse_args(session.posargs)
    found, missing = other_pythons()
    found = found[-1:] if options.newest else found
    for minor in missing:
        session.warn(f"Not tested on Python {minor}, which was not found; {how_to_get(minor)}")
    jobs = [Job("unit", ("--python", minor, *ON_EVERY_PYTHON)) for minor in found]
    with summary(session):
        run_jobs(session, jobs, at_once=1)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format, prose, launch files and assertions; `nox -s lint -- --fix` fixes style and format."""
    tools = ensure(session, TOOLS)
    fix = "--fix" in session.posargs
    paths = [path for path in CHECKED if (ROOT / path).exists()]
    session.run(tools, "-m", "ruff", "check", *(["--fix"] if fix else []), *paths)
    session.run(tools, "-m", "ruff", "format", *([] if fix else ["--check"]), *paths)
    session.run(tools, "tooling/prose.py")
    session.run(tools, "tooling/launch.py")
    session.run(tools, "-m", "tooling.assertions")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly, against the installed libraries."""
    python, tools = workspace(session), ensure(session, TOOLS)
    mypy = (tools, "-m", "mypy", "--python-executable", python)
    session.run(*mypy, *SOURCES)
    for folder in [ROOT / "benchmarks", *sorted({path.parent for path in (ROOT / "examples").rglob("*.py")})]:
        session.run(
            *mypy,
            str(folder.relative_to(ROOT)),
            env={"MYPYPATH": f"{folder}:{folder.parent}:tests/support:{folder / 'peers'}"},
        )  # scripts import neighbouring files
    session.run(tools, "-m", "mypy", "noxfile.py")


@nox.session
def imports(session: nox.Session) -> None:
    """Check the directions of imports, which files import optional backends, and that no imports form a circle."""
    tools = ensure(session, TOOLS)
    path = os.pathsep.join(str(ROOT / source) for source in SOURCES)
    session.run(str(Path(tools).with_name("lint-imports")), "--no-cache", env={"PYTHONPATH": path})
    roots = [
        folder.name for source in SOURCES for folder in (ROOT / source).iterdir() if (folder / "__init__.py").exists()
    ]
    session.run(tools, "tooling/circles.py", *roots, env={"PYTHONPATH": path})


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every wheel as `release` does, and try them outside the checkout with only their declared dependencies.

    rl-core is installed into an empty environment. Then each trainer is installed from `dist` without an index, so its
    dependencies must be our packages or locked ones.
    """
    projects = read_projects()
    build(session, ensure(session, TOOLS), list(projects))
    built = {path.name.partition("-")[0].replace("_", "-"): str(path) for path in sorted(DIST.glob("*.whl"))}
    try_from_index(session, projects["rl-core"], projects)
    light, whole = ("rl-core", "rl-rollout"), tuple(built)
    python = ensure(session, wheels_environment("wheels-light", built, light))
    install(session, python, "--no-deps", "--force-reinstall", *(built[name] for name in light))
    try_wheels(session, python, "test_imports.py", "-k", "rl_core or rl_rollout", WITHOUT_TORCH="1")
    python = ensure(session, wheels_environment("wheels", built, whole))
    for app in ("rl-sync-trainer", "rl-async-trainer"):
        session.run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *whole)
        install(session, python, "--no-index", "--find-links", str(DIST), app)
        try_wheels(session, python, "test_wheels.py", "-k", f"{app} or locked")
    install(session, python, "--no-deps", "--force-reinstall", *built.values())
    try_wheels(session, python, "test_imports.py", "test_wheels.py")


def try_wheels(session: nox.Session, python: str, *attempt: str, **env: str) -> None:
    """Run tests against the installed wheels outside the checkout, then `pip check`."""
    with tempfile.TemporaryDirectory(prefix="rl-wheels-") as folder:
        shutil.copytree(ROOT / "locks", Path(folder, "locks"))
        tests = Path(folder, "tests")
        tests.mkdir()
        for name in ("test_imports.py", "test_wheels.py"):
            shutil.copy(ROOT / "tests" / name, tests)
        with session.chdir(tests):
            words = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tests), *attempt]
            session.run(python, "-I", "-m", "pytest", *words, env=env)
    session.run(python, "-m", "pip", "check")


@nox.session
def bench(session: nox.Session) -> None:
    """Run a benchmark against its peer: `nox -s bench -- trl --json results.json`; without a name, list benchmarks."""
    names = {path.stem.replace("_", "-"): path for path in sorted((ROOT / "benchmarks").glob("[!_]*.py"))}
    name = session.posargs[0].replace("_", "-") if session.posargs else ""
    if name not in names:
        session.error(f"expected the name of a benchmark: {', '.join(names)}; found {name or 'none'}")
    env = peer_variables(session, name)
    python = workspace(session)
    session.run(python, str(names[name].relative_to(ROOT)), *session.posargs[1:], env=env, interrupt_timeout=STOP_S)


def peer_variables(session: nox.Session, name: str) -> dict[str, str]:
    """Return the variable with the interpreter of a benchmark's peer; empty if it runs without a peer."""
    if name not in PEERS or "--quick" in session.posargs:
        return {}
    variable, peer = PEERS[name]
    try:
        return {variable: ensure(session, peer)}
    except Exception as error:  # nox has no public name for what session.error raises
        if name not in OPTIONAL_PEERS:
            raise
        session.log(f"The benchmark runs without .nox/{peer.name}: {error}")
        return {}


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site, with `--serve` also serve it; `-- --settings` and `-- --models` update a page."""
    for name in ("settings", "models"):
        if f"--{name}" in session.posargs:
            session.run(workspace(session), "-m", f"tooling.{name}_page")
            return
    session.run(ensure(session, DOCS), "-m", "tooling.docs_site.build", *session.posargs)


@nox.session
def verifiers(session: nox.Session) -> None:
    """Run examples/verifiers in its own environment, because the library verifiers conflicts with vLLM."""
    session.run(ensure(session, VERIFIERS), "examples/verifiers/run.py")


@nox.session
def agents(session: nox.Session) -> None:
    """Run unmodified agents from PyPI and npm, in their own environments, against the gateway."""
    agent_environments(session)
    with summary(session):
        run_pytest(session, workspace(session), "-m", "soak", AGENTS_TESTS, *session.posargs)


def agent_environments(session: nox.Session) -> None:
    """Make the environments of agents and set their variables; without npm, the tests skip the agents of Node."""
    os.environ["AGENTS_PYTHON"] = ensure(session, AGENTS)
    os.environ["AGENTS_OPENAI2_PYTHON"] = ensure(session, AGENTS_OPENAI2)
    if sys.version_info < (3, 13):
        os.environ["AGENTS_AIDER_PYTHON"] = ensure(session, AGENTS_AIDER)
    if shutil.which("npm") is None:
        session.log("Skipping the agents of Node: there is no npm. Install Node 20 or later to run them.")
        return
    folder = ROOT / ".nox" / "agents-node"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / "locks" / "agents-node" / name, folder)
    session.run("npm", "ci", "--prefix", str(folder), "--no-audit", "--no-fund", external=True, silent=True)
    os.environ["AGENTS_NODE"] = str(folder)


@nox.session
def service(session: nox.Session) -> None:
    """Run recipes of the tinker cookbook, unmodified, in their own environment, against `rl-service serve`."""
    recipes_environment(session)
    with summary(session):
        run_pytest(session, workspace(session), "-m", "soak", "-rP", RECIPES_TESTS, *session.posargs)


def recipes_environment(session: nox.Session, *, is_needed: bool = True) -> None:
    """Make the environment of the recipes and set its variable; if it is not needed, tests are skipped without it."""
    try:
        os.environ["SERVICE_PYTHON"] = ensure(session, SERVICE)
    except Exception as error:  # nox has no public name for what session.error raises
        if is_needed:
            raise
        session.log(f"The recipes are skipped, because there is no .nox/{SERVICE.name}: {error}")


@nox.session
def notebooks(session: nox.Session) -> None:
    """Run the example notebooks and save their new outputs; `nox -s notebooks -- FILE` runs one."""
    session.run(workspace(session), "tooling/notebooks.py", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Run the long fault and fuzz tests: `nox -s soak -- transfer --seed 7`; a random seed is printed.

    `nox -s soak -- processors` runs all other tests with the instructions of older processors; name suites to choose.
    """
    if session.posargs[:1] == ["processors"]:
        processors(session, session.posargs[1:])
        return
    parser = argparse.ArgumentParser(prog="nox -s soak --")
    parser.add_argument("-k", dest="name", help="part of a test's name, as in pytest (default: all)")
    parser.add_argument("name", nargs="?", default=argparse.SUPPRESS, help="the same as -k")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    options, rest = parser.parse_known_args(session.posargs)
    session.log(f"Seed {options.seed}; to repeat this run: nox -s soak -- {options.name or ''} --seed {options.seed}")
    chosen = ["-k", options.name.replace("-", "_")] if options.name else []
    seeds = [f"--seed={options.seed}", f"--hypothesis-seed={options.seed}", "--hypothesis-profile=soak"]
    limits = ["-o", "faulthandler_timeout=14400"]
    agent_environments(session)
    recipes_environment(session, is_needed=False)
    os.environ["RL_TESTS_COLD"] = "1"  # start every process as users do
    with summary(session):
        folders = ("packages", "apps", "tests")
        run_pytest(session, workspace(session), "-m", "soak", *chosen, *seeds, *limits, *rest, *folders)


def processors(session: nox.Session, words: list[str]) -> None:
    """Run the packages' unit tests and the workspace's tests as older processors; other words go to pytest."""
    names = [*PACKAGES, "workspace"]
    chosen = [name for name in names if name in words] or names
    rest = tuple(word for word in words if word not in names)
    suites = []
    for name in chosen:
        if name == "workspace":
            ensure(session, TOOLS)
            ensure(session, DOCS)
            chromium(session)
            suites.append(Suite(name, workspace(session), (*TWO_WORKERS, *WORKSPACE_SUITES, *rest)))
        else:
            python = ensure(session, unit_environment(name))
            suites.append(Suite(name, python, (f"packages/{name}/tests", "-k", "not vllm", *rest)))
    with summary(session):
        run_on_processors(session, suites)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run GPU tests, or with `-- --bench` benchmarks, in the python on PATH (see locks/gpu.md); `-- --wheels DIR`."""
    if "--wheels" in session.posargs:
        words = [word for word in session.posargs if word != "--wheels"]
        session.run(ensure(session, TOOLS), "tooling/gpu_wheels.py", *words)
        return
    session.run("python", "benchmarks/gpu.py", *session.posargs, interrupt_timeout=STOP_S)


@nox.session
def release(session: nox.Session) -> None:
    """Check, build and try packages before a release: `nox -s release -- rl-core`; `--help` lists further steps."""
    release_projects(session)


@nox.session
def lock(session: nox.Session) -> None:
    """Update locks/*.txt from locks/*.in: `nox -s lock -- cpu`; without a name, update all."""
    tools = ensure(session, TOOLS)
    left_out = {line.split(";")[0].strip() for line in (ROOT / "locks/overrides.txt").read_text().splitlines()}
    for name in session.posargs or LOCKS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            resolve = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--report", str(report)]
            install(session, tools, *resolve, "-r", f"locks/{name}.in")
            found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
        pins = {item["name"].lower().replace("_", "-").replace(".", "-"): item["version"] for item in found}
        here = {"torch"} if name == "gpu" else set()  # a GPU machine has its own torch
        text = "".join(f"{key}=={pins[key]}\n" for key in sorted(pins) if key not in left_out | here)
        (ROOT / f"locks/{name}.txt").write_text(text)
        session.log(f"locks/{name}.txt: {text.count('==')} packages. Run `nox -s tests` before you commit it.")
