"""Supported Python versions, and where to find them on this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nox

PYTHONS = ("3.11", "3.12", "3.13")
"""Versions on which everything in locks/cpu.txt runs; megatron-core has no wheels for newer ones."""


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter for creating environments."""

    program: str
    version: str
    """`sys.version`, which distinguishes builds of the same version."""
    prefix: str
    """Prefix of the installation, even if `program` is in an environment."""

    @property
    def minor(self) -> str:
        """Minor version, such as "3.12"."""
        return ".".join(self.version.split(".")[:2])


HERE = Interpreter(sys.executable, sys.version, sys.base_prefix)
"""The interpreter that runs nox."""


def find_python(minor: str) -> Interpreter | None:
    """Find a CPython such as "3.12": that of nox, then on PATH, in pyenv, then in uv.

    Raises:
        ImportError: nox is too old to depend on the library python-discovery.
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
    """Like `find_python`, but end the session if there is none."""
    found = find_python(minor)
    if found is None:
        session.error(f"There is no Python {minor} on PATH, in pyenv or in uv; {how_to_get(minor)}")
    return found


def other_pythons() -> tuple[list[str], list[str]]:
    """Return the supported versions other than nox's own: those found, and those missing."""
    others = [minor for minor in PYTHONS if minor != HERE.minor]
    found = [minor for minor in others if find_python(minor)]
    return found, [minor for minor in others if minor not in found]


def how_to_get(minor: str) -> str:
    """Return advice for a missing version."""
    return f"get it with `pyenv install {minor}` or `uv python install {minor}`."
