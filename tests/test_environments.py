"""Environments for each Python, also where torch has no CPU build. pip installs nearly empty wheels."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
from tooling import pythons

ROOT = Path(__file__).resolve().parents[1]
NEEDS = ("filelock", 'nvidia-blas==1.0; platform_system == "Linux"', "cuda-toolkit[blas]==1.0", "triton==1.0")


class FailedError(Exception):
    """Stands for the error that nox's session.error raises."""


class Session:
    """The part of a nox session that the creation of environments needs."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, line: str) -> None:
        self.said.append(line)

    def error(self, line: str) -> None:
        raise FailedError(line)

    def run(self, *command: str) -> None:
        subprocess.run(command, check=True)


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Load tooling/environments.py. It uses nox only in annotations, so an empty module can replace nox."""
    if importlib.util.find_spec("nox") is None:
        monkeypatch.setitem(sys.modules, "nox", types.ModuleType("nox"))
    spec = importlib.util.spec_from_file_location("tooling_environments", ROOT / "tooling" / "environments.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tooling_environments", module)  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def write_wheel(folder: Path, name: str, version: str, needs: tuple[str, ...] = ()) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {n}" for n in needs),
    ]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def sources(tmp_path: Path, environments: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Create wheels with torch's GPU build, and a lock that pins its CPU build; return pip's options for the wheels."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "torch", "2.13.0", NEEDS)
    for name in ("filelock", "nvidia-blas", "cuda-toolkit", "triton", "numpy"):
        write_wheel(folder, name, "1.0")
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "cpu.txt").write_text(f"numpy==1.0\n{environments.TORCH}\n")
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return ("--no-index", "--find-links", str(folder))


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Create a virtual environment; return its interpreter."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "virtualenv", "--quiet", folder], check=True)
    return str(folder / "bin" / "python")


def installed(python: str) -> set[str]:
    (packages,) = Path(python).parents[1].glob("lib/python3*/site-packages")
    return {path.stem.replace("_", "-") for path in packages.glob("*.dist-info")}


def test_the_build_for_gpus_comes_with_its_libraries_and_without_triton(environments, sources, python):
    before, session = installed(python), Session()
    environments.install(session, python, *sources, "--no-deps", environments.TORCH)
    environments.install(session, python, *sources, "--no-deps", "-r", "locks/cpu.txt")
    assert installed(python) - before == {"torch-2.13.0", "nvidia-blas-1.0", "cuda-toolkit-1.0", "numpy-1.0"}
    assert [line for line in session.said if "the build for GPUs" in line and "more to download" in line]


def test_constraints_take_the_build_for_gpus_too(environments, sources, python):
    environments.install(Session(), python, *sources, "-c", "locks/cpu.txt", environments.TORCH)
    environments.install(Session(), python, *sources, "-c", "locks/cpu.txt", "numpy")
    assert {"torch-2.13.0", "filelock-1.0", "numpy-1.0"} <= installed(python)


def test_a_torch_that_exists_nowhere_is_told_with_what_pip_said(environments, sources, python):
    for wheel in Path(sources[-1]).glob("torch-*"):
        wheel.unlink()
    with pytest.raises(FailedError, match=r"(?s)could not install .*torch==2\.13\.0\. .*No matching"):
        environments.install(Session(), python, *sources, "--no-deps", environments.TORCH)


def python_version(module, version):
    return module.Interpreter("python", f"{version} (main)", "/usr")


@pytest.mark.parametrize("version", ["3.11.7", "3.12.1", "3.13.0"])
def test_supported_interpreters_are_taken(environments, version):
    workspace = dataclasses.replace(environments.WORKSPACE, base=python_version(environments, version))
    assert environments.interpreter_mistake(workspace) == ""


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0rc1"])
def test_interpreters_that_do_not_serve_are_told_with_one_that_does(environments, monkeypatch, version):
    workspace = dataclasses.replace(environments.WORKSPACE, base=python_version(environments, version))
    monkeypatch.setattr(environments, "find_python", lambda minor: None)
    said = environments.interpreter_mistake(workspace)
    assert said.startswith(f".nox/workspace needs Python 3.11, 3.12 or 3.13; nox runs on {version}. ")
    assert "`pyenv install 3.11`" in said
    here = dataclasses.replace(environments.HERE, program="/opt/python3.12", version="3.12.1 (main)")
    monkeypatch.setattr(environments, "find_python", {"3.11": None, "3.12": here}.__getitem__)
    said = environments.interpreter_mistake(workspace)
    assert said.endswith(
        f"nox runs on {version}. This machine has 3.12; run nox on it: "
        "`/opt/python3.12 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s train`"
    )


def test_tools_run_on_newer_interpreters(environments):
    for version, serves in (("3.14.0", True), ("3.10.0", False)):
        tools = dataclasses.replace(environments.TOOLS, base=python_version(environments, version))
        assert (environments.interpreter_mistake(tools) == "") is serves


def test_projects_name_the_supported_pythons():
    projects = sorted(ROOT.glob("*/*/pyproject.toml"))
    assert len(projects) >= 8
    for project in projects:
        named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project.read_text())
        assert tuple(named) == pythons.PYTHONS, project


def write_python(folder: Path, minor: str) -> Path:
    """Write a program that runs this Python and reports another version."""
    folder.mkdir(parents=True)
    program = folder / f"python{minor}"
    program.write_text(f"""#!{sys.executable}
import collections, runpy, sys
kind = collections.namedtuple("version_info", "major minor micro releaselevel serial")
sys.version = "{minor}.1 (main, Jan  1 2026, 00:00:00) [GCC 12.2.0]"
sys.version_info = kind(*map(int, "{minor}.1".split(".")), "final", 0)
sys.executable, sys.prefix, sys.exec_prefix = __file__, sys.base_prefix, sys.base_exec_prefix
sys.argv = [word for word in sys.argv[1:] if not word.startswith("-")]
runpy.run_path(sys.argv[0], run_name="__main__")
""")
    program.chmod(0o700)
    return program


def test_a_python_is_found_on_path_and_among_pyenvs_versions(tmp_path, monkeypatch):
    on_path = write_python(tmp_path / "bin", "3.70")
    pyenvs = write_python(tmp_path / "pyenv" / "versions" / "3.71.1" / "bin", "3.71")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv"))
    found = [pythons.find_python(minor) for minor in ("3.70", "3.71")]
    assert [(python.program, python.minor) for python in found if python] == [
        (str(on_path), "3.70"),
        (str(pyenvs), "3.71"),
    ]
    with pytest.raises(FailedError, match=r"no Python 3\.72 on PATH, .*`pyenv install 3\.72`"):
        pythons.needed_python(Session(), "3.72")


def test_other_pythons_leave_out_the_one_that_nox_runs_on(environments, monkeypatch):
    here = dataclasses.replace(environments.HERE, version="3.12.1 (main)")
    monkeypatch.setattr(pythons, "HERE", here)
    monkeypatch.setattr(pythons, "find_python", {"3.11": None, "3.13": here}.__getitem__)
    assert pythons.other_pythons() == (["3.13"], ["3.11"])


def test_each_python_has_environments_of_its_own(environments, tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    other = dataclasses.replace(environments.HERE, version="3.70.1 (main)")
    here = environments.Environment(name="unit", cost="nothing", steps=(), inputs=())
    there, session = here.on(other), Session()
    assert here.on(environments.HERE) is here
    assert (there.name, there.recipe() == here.recipe()) == ("unit-3.70", False)
    python = environments.ensure(session, there)
    assert subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True).stdout == (
        f"{tmp_path}/.nox/unit-3.70\n"
    )
    assert [line for line in session.said if "Creating the environment" in line] == session.said[:1]
    assert environments.ensure(session, there) == python
    assert len(session.said) == 2, "it was made twice"
