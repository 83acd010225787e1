"""Our packages and apps, read from pyproject.toml, and their releases, read from locks/released.toml."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
RELEASED = "locks/released.toml"


@dataclass(frozen=True)
class Project:
    """A package or an app.

    Attributes:
        folder: Path inside the repository, such as packages/rl-core.
        name: Name of its distribution.
        version: Version as written, which may be invalid.
        python: Accepted versions of Python.
        needs: Declared dependencies, without extras.
        extras: Dependencies that each extra adds.
        commands: Names of its commands.
        licences: Licence files named in its metadata.
    """

    folder: str
    name: str
    version: str
    python: str
    needs: tuple[Requirement, ...]
    extras: dict[str, tuple[Requirement, ...]]
    commands: tuple[str, ...]
    licences: tuple[str, ...]

    @property
    def module(self) -> str:
        """Name of the Python package."""
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class Release:
    """A tagged version, the commit of its tag, and its dependencies at that time."""

    name: str
    version: str
    commit: str
    python: str
    needs: tuple[str, ...]

    @property
    def tag(self) -> str:
        """Name of the tag."""
        return f"{self.name}-v{self.version}"

    def as_toml(self) -> str:
        """Return its entry in locks/released.toml."""
        fields = {"name": self.name, "version": self.version, "commit": self.commit, "python": self.python}
        lines = [f"{key} = {json.dumps(value)}" for key, value in {**fields, "needs": self.needs}.items()]
        return "\n".join(["\n[[release]]", *lines, ""])


def read_projects(root: Path = ROOT) -> dict[str, Project]:
    """Return all packages, then all apps, by name."""
    paths = [*sorted(root.glob("packages/*/pyproject.toml")), *sorted(root.glob("apps/*/pyproject.toml"))]
    projects = [read_project(root, str(path.parent.relative_to(root))) for path in paths]
    return {project.name: project for project in projects}


def read_project(root: Path, folder: str) -> Project:
    """Return the project in a folder below the root."""
    table = tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]
    extras = table.get("optional-dependencies", {})
    return Project(
        folder=folder,
        name=table["name"],
        version=table["version"],
        python=table["requires-python"],
        needs=tuple(map(Requirement, table.get("dependencies", []))),
        extras={extra: tuple(map(Requirement, lines)) for extra, lines in extras.items()},
        commands=tuple(table.get("scripts", {})),
        licences=tuple(table.get("license-files", [])),
    )


def with_needs(chosen: Sequence[Project], projects: dict[str, Project]) -> list[Project]:
    """Return the chosen projects and all of our projects that they need, in the order of `projects`."""
    wanted, waiting = set(), [project.name for project in chosen]
    while waiting:
        name = waiting.pop()
        wanted.add(name)
        waiting += [need.name for need in projects[name].needs if need.name in projects and need.name not in wanted]
    return [project for name, project in projects.items() if name in wanted]


def read_releases(root: Path = ROOT) -> list[Release]:
    """Return the releases in locks/released.toml, oldest first."""
    rows = tomllib.loads((root / RELEASED).read_text()).get("release", [])
    return [Release(**{**row, "needs": tuple(row["needs"])}) for row in rows]


def last_release(name: str, root: Path = ROOT) -> tuple[Version, str] | None:
    """Return a project's newest version in the list or in a tag, and its commit; None before its first release."""
    found = {Version(one.version): one.commit for one in read_releases(root) if one.name == name}
    for tag in git(root, "tag", "--list", f"{name}-v*").split():
        try:
            found[Version(tag.removeprefix(f"{name}-v"))] = git(root, "rev-parse", f"{tag}^{{commit}}").strip()
        except InvalidVersion:
            continue
    return max(found.items()) if found else None


def git(root: Path, *words: str) -> str:
    """Run git and return its output; an error contains its message."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout
