"""Repository changes of a release: the changelog before it, the tag and the list of releases after it."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tooling.projects import RELEASED, Project, Release, git, last_release, read_projects
from tooling.release_checks import fragments


def write_changelog(project: Project, root: Path, python: str) -> str:
    """Turn a project's fragments into its version's section; return a summary.

    Args:
        project: The project.
        root: The repository.
        python: Interpreter that has towncrier.

    Raises:
        RuntimeError: towncrier fails, for example because the version already has a section.
    """
    waiting, done = fragments(project, root), ""
    if not waiting:
        return f"{project.name}: no fragments."
    if last_release(project.name, root) is None:
        unseen = [path for path in waiting if ".feature." not in path.name]
        for path in unseen:
            path.unlink()
        done = f" Skipped {len(unseen)} fragments about unreleased code."
    words = ["build", "--yes", "--dir", str(root / project.folder), "--version", project.version]
    run = subprocess.run([python, "-m", "towncrier", *words], cwd=root, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"towncrier cannot write the changelog of {project.name}:\n{run.stdout}{run.stderr}")
    return f"{project.name}: {project.folder}/CHANGELOG.md has a section for {project.version}.{done}"


def is_new(project: Project, root: Path) -> bool:
    """Return True if a project's version is not released yet."""
    last = last_release(project.name, root)
    return last is None or str(last[0]) != project.version


def tag_release(project: Project, root: Path, files: Sequence[Path]) -> str:
    """Tag HEAD with the digests of a project's files, list the release, and return the tag."""
    ours = read_projects(root)
    needs = tuple(str(need) for need in project.needs if need.name in ours)
    release = Release(project.name, project.version, git(root, "rev-parse", "HEAD").strip(), project.python, needs)
    digests = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    git(root, "tag", "--annotate", release.tag, "--message", f"{project.name} {project.version}\n\n{digests}")
    with (root / RELEASED).open("a") as file:
        file.write(release.as_toml())
    return release.tag
