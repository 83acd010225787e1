"""The Pythons that the project supports, and where this machine has them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nox

PYTHONS = ("3.11", "3.12", "3.13")
"""Everything in locks/cpu.txt runs on these; megatron-core has no wheels for newer ones."""


@dataclass(frozen=True)
class Interpreter:
    """A Python to make environments with."""

    program: str
    version: str
    """`sys.version`: two builds of one version differ in it."""
    prefix: str
    """Its installation, also when `program` lies in an environment."""

    @property
    def minor(self) -> str:
        """Such as "3.12"."""
        return ".".join(self.version.split(".")[:2])


HERE = Interpreter(sys.executable, sys.version, sys.base_prefix)
"""The one that nox runs on."""


def find_python(minor: str) -> Interpreter | None:
    """Look for a CPython such as "3.12": where nox runs, on PATH, in pyenv's versions, then in uv's.

    Raises:
        ImportError: nox is too old to bring the library python-discovery.
    """
    if minor == HERE.minor:
        return HERE
    try:
        from python_discovery import get_interpreter
    except ImportError as error:
        raise ImportError("nox is too old to find other Pythons: python -m pip install --upgrade nox") from error
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [os.environ.get("PATH", os.defpath), *map(str, sorted(pyenv.glob("versions/*/bin")))]
    env = {**os.environ, "PATH": os.pathsep.join(folders)}
    found = get_interpreter(f"cpython{minor}", env=env)
    if found is None or found.system_executable is None:
        return None
    return Interpreter(found.system_executable, found.version, found.system_prefix)


def needed_python(session: nox.Session, minor: str) -> Interpreter:
    """As `find_python`; the session ends where there is none."""
    found = find_python(minor)
    if found is None:
        session.error(f"There is no Python {minor} on PATH, in pyenv or in uv; {how_to_get(minor)}")
    return found


def other_pythons() -> tuple[list[str], list[str]]:
    """The supported Pythons that nox does not run on: those that are here, and those that are not."""
    others = [minor for minor in PYTHONS if minor != HERE.minor]
    found = [minor for minor in others if find_python(minor)]
    return found, [minor for minor in others if minor not in found]


def how_to_get(minor: str) -> str:
    """Advice for one that is not here."""
    return f"get it with `pyenv install {minor}` or `uv python install {minor}`."
