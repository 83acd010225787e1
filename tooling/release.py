"""The nox session `release`: check projects, build them from a commit, try them in empty environments, tag them."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import nox

from tooling import compatibility
from tooling.claims import outdated
from tooling.environments import CONSTRAINTS, ROOT, TOOLS, TORCH, ensure, install
from tooling.projects import RELEASED, Project, last_release, read_projects, with_needs
from tooling.release_checks import mistakes_of, need_mistakes
from tooling.release_steps import is_new, tag_release, write_changelog

DIST = ROOT / "dist"
LIMIT_S, LIMIT_WITH_TORCH_S = 60.0, 120.0
"""Maximum time to install a project into an empty environment, import it and run its commands."""


def release_projects(session: nox.Session) -> None:
    """Run the steps that the arguments of `nox -s release` select."""
    projects = read_projects()
    options = read_options(session.posargs, projects)
    tools = ensure(session, TOOLS)
    named = [projects[name] for name in options.names]
    chosen = named or [project for project in projects.values() if is_new(project, ROOT)]
    if not chosen:
        session.log("Every version is released. Raise the version of what has changed, in its pyproject.toml.")
    if options.changelog:
        for project in chosen:
            session.log(write_changelog(project, ROOT, tools))
    if options.changelog or options.table or not chosen:
        compatibility.main()
        return
    check(session, chosen, projects)
    build(session, tools, [f"{one.name}@{commit_of(one, chosen)}" for one in with_needs(chosen, projects)])
    for project in chosen:
        try_from_index(session, project, projects)
        ask_index(session, tools, project)
    new = [project for project in chosen if is_new(project, ROOT)]
    if options.tag:
        tags = [tag_release(project, ROOT, sorted(DIST.glob(f"{project.module}-*"))) for project in new]
        compatibility.main()
        commit = f"git commit -m 'Releases: {' '.join(tags)}' {RELEASED} {compatibility.PAGE}"
        session.log(f"Tagged. Now: {commit} && git push origin HEAD {' '.join(tags)}" if tags else "Nothing to tag.")
    elif new:
        session.log(f"Ready to tag: nox -s release -- {' '.join(project.name for project in new)} --tag")


def read_options(words: Sequence[str], projects: dict[str, Project]) -> argparse.Namespace:
    """Parse the arguments of the session."""
    parser = argparse.ArgumentParser(prog="nox -s release --")
    names = f"one of {', '.join(projects)}; without a name, all whose version is not released yet"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--changelog", action="store_true", help="only write the version's section of CHANGELOG.md")
    step.add_argument("--table", action="store_true", help=f"only write {compatibility.PAGE}")
    step.add_argument("--tag", action="store_true", help=f"then tag each version and list it in {RELEASED}")
    options = parser.parse_args(words)
    if unknown := sorted(set(options.names) - projects.keys()):
        parser.error(f"NAME must be one of {', '.join(projects)}; found {', '.join(unknown)}.")
    return options


def check(session: nox.Session, chosen: Sequence[Project], projects: dict[str, Project]) -> None:
    """End the session if something must change before a release."""
    names = {project.name for project in chosen}
    found = {one.name: mistakes_of(one, projects, ROOT) + need_mistakes(one, names, projects, ROOT) for one in chosen}
    mistakes = [f"{name}: {line}" for name, lines in found.items() for line in lines]
    mistakes += outdated(ROOT, datetime.now(tz=UTC).date())
    if mistakes:
        session.error(("not ready for a release:\n  " + "\n  ".join(mistakes)).removesuffix("."))  # nox adds one
    session.log(f"Versions, changelogs and bounds are right: {', '.join(f'{p.name} {p.version}' for p in chosen)}.")


def commit_of(project: Project, chosen: Sequence[Project]) -> str:
    """Return the commit to build: HEAD for a project to release, else its last release, which users have."""
    last = None if project in chosen else last_release(project.name)
    return last[1] if last else "HEAD"


def build(session: nox.Session, tools: str, names: Sequence[str]) -> None:
    """Empty `dist`, then build and check the wheel and sdist of each project there; NAME@COMMIT builds a commit."""
    shutil.rmtree(DIST, ignore_errors=True)
    session.run(tools, "-m", "tooling.distributions", str(DIST), *names)


def try_from_index(session: nox.Session, project: Project, projects: dict[str, Project]) -> None:
    """Install a project into an empty environment with our packages from `dist`, import it and run its commands.

    Libraries are installed first, from pip's configured indexes: with both sources at once, pip would prefer a newer
    package from the index that has the name of ours.
    """
    needed = [need for one in with_needs([project], projects) for need in one.needs if need.name not in projects]
    has_torch = any(need.name == "torch" for need in needed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rl-release-") as folder:
        session.run(sys.executable, "-m", "virtualenv", "--quiet", folder)
        python = str(Path(folder, "bin", "python"))
        libraries = [*([TORCH] if has_torch else []), *(str(need) for need in needed if need.name != "torch")]
        install(session, python, *CONSTRAINTS, *libraries)
        ours = f"{project.name}=={project.version}"
        install(session, python, "--no-index", "--find-links", str(DIST), ours)
        with session.chdir(folder):
            session.run(python, "-I", "-c", f"import {project.module}")
            for command in project.commands:
                session.run(str(Path(folder, "bin", command)), "--help", silent=True)
        took = time.monotonic() - started
        session.run(python, "-m", "pip", "check", silent=True)
    limit = LIMIT_WITH_TORCH_S if has_torch else LIMIT_S
    say = session.log if took <= limit else session.warn
    say(f"{ours} was installed into an empty environment, imported and run in {took:.0f} s (at most {limit:.0f} s).")


def ask_index(session: nox.Session, tools: str, project: Project) -> None:
    """Log whether the package index has the name: before we publish there, it can only be someone else's package."""
    ask = (tools, "-m", "pip", "index", "versions", "--pre", "--ignore-requires-python", "--json")
    said = str(session.run(*ask, project.name, silent=True, success_codes=[0, 1], log=False))
    if '"versions"' in said:
        found = ", ".join(json.loads(said[said.index("{") :])["versions"])
        session.warn(f"The package index has {project.name} {found}. If it is not ours, rename the project.")
    elif "No matching distribution" in said:
        session.log(f"The package index has no {project.name}: the name is free.")
    else:
        session.warn(f"No package index answered whether it has {project.name}: {said.strip()[-200:]}")
