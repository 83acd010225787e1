"""Checks of a project before its release; `nox -s release` runs them before it builds anything."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from packaging.version import InvalidVersion, Version

from tooling.projects import Project, git, last_release


def mistakes_of(project: Project, projects: dict[str, Project], root: Path) -> list[str]:
    """Return what must change before a project can be released, one sentence each."""
    return [
        *version_mistakes(project, root),
        *commit_mistakes(project, root),
        *changelog_mistakes(project, root),
        *bound_mistakes(project, projects),
    ]


def need_mistakes(project: Project, chosen: Collection[str], projects: dict[str, Project], root: Path) -> list[str]:
    """Check that each of our packages that a project needs is released with it or has a matching release."""
    mistakes = []
    for need in project.needs:
        if need.name not in projects or need.name in chosen:
            continue
        last = last_release(need.name, root)
        if last is None or last[0] not in need.specifier:
            found = f"whose last release is {last[0]}" if last else "which has no release"
            mistakes.append(f"it needs {need}, {found}. Release {need.name} too.")
    return mistakes


def version_mistakes(project: Project, root: Path) -> list[str]:
    """Check that the version is X.Y.Z and newer than the last release, unless nothing has changed since."""
    where = f"version in {project.folder}/pyproject.toml"
    try:
        version = Version(project.version)
    except InvalidVersion:
        version = None
    if version is None or project.version != version.base_version or len(version.release) != 3:
        return [f"{where} must be X.Y.Z, such as 0.1.0; found {project.version}."]
    last = last_release(project.name, root)
    if last is None or version > last[0]:
        return []
    if version < last[0]:
        return [f"{where} must be newer than the released {last[0]}; found {version}. Raise it."]
    try:
        changed = git(root, "diff", "--name-only", last[1], "HEAD", "--", project.folder).split()
    except RuntimeError:
        return [f"{where} is the released {version}, and this clone lacks its commit {last[1]}: `git fetch --tags`."]
    if changed:
        since = f"{len(changed)} files have changed since, such as {changed[0]}"
        return [f"{version} is released, and {since}. Raise {where}."]
    return []


def commit_mistakes(project: Project, root: Path) -> list[str]:
    """Check that all changes are committed, because a release is built from a commit."""
    changed = git(root, "status", "--porcelain", "--", project.folder).splitlines()
    if changed:
        return [f"{len(changed)} files in {project.folder} are not committed, such as {changed[0][3:]}. Commit them."]
    return []


def changelog_mistakes(project: Project, root: Path) -> list[str]:
    """Check that the changelog has a section for the version and that no fragments are left."""
    mistakes = []
    if waiting := fragments(project, root):
        mistakes.append(f"{len(waiting)} fragments in {project.folder}/changes are not in CHANGELOG.md")
    if not has_section(project, root):
        mistakes.append(f"{project.folder}/CHANGELOG.md has no section for {project.version}")
    return [f"{mistake}: `nox -s release -- {project.name} --changelog` writes it." for mistake in mistakes]


def fragments(project: Project, root: Path) -> list[Path]:
    """Return the fragments that are not in the changelog yet."""
    return sorted((root / project.folder / "changes").glob("*.md"))


def has_section(project: Project, root: Path) -> bool:
    """Return True if the changelog has a section for the project's version."""
    heading = rf"^## {re.escape(project.version)} \(\d{{4}}-\d\d-\d\d\)$"
    text = (root / project.folder / "CHANGELOG.md").read_text()
    return re.search(heading, text, flags=re.MULTILINE) is not None


def bound_mistakes(project: Project, projects: dict[str, Project]) -> list[str]:
    """Check that needed packages of ours have a lower bound, and an upper one up to the next breaking version."""
    mistakes = []
    for need in project.needs:
        if need.name not in projects:
            continue
        version = Version(projects[need.name].version)
        bounds = {one.operator: Version(one.version) for one in need.specifier}
        breaking = next_breaking(version)
        if ">=" not in bounds or "<" not in bounds:
            mistakes.append(f"{need} must have a lower and an upper bound, such as >={version},<{breaking}.")
        elif version not in need.specifier:
            mistakes.append(f"{need} must allow {need.name} {version}, today's version. Change the bounds.")
        elif bounds["<"] > breaking:
            mistakes.append(f"{need} allows {breaking}, which may break it. Lower the upper bound to <{breaking}.")
    declared = {need.name for need in project.needs}
    for extra, needs in project.extras.items():
        unbound = {need.name for need in needs if need.name in projects} - declared - {project.name}
        mistakes += [f"extra {extra} asks for {name}, but dependencies set no bounds for it." for name in unbound]
    return mistakes


def next_breaking(version: Version) -> Version:
    """Return the next version that may be incompatible: 0.2 after 0.1.3, 2 after 1.4.0."""
    return Version(str(version.major + 1) if version.major else f"0.{version.minor + 1}")
