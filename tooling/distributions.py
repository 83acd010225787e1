"""Build wheels and sdists reproducibly: `python -m tooling.distributions dist rl-core@HEAD`.

Each is built twice, from two copies of the sources, and the bytes must be equal. One wheel is built from the sdist
and the other from the sources, which also detects an incomplete sdist.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.metadata import Metadata

from tooling.projects import ROOT, Project, git, read_project, read_projects

SUFFIXES = (".css", ".html", ".js", ".jsonl", ".py", ".toml", ".txt", ".LICENSE")
"""Suffixes of the files that a package may contain, beside py.typed."""
MAX_BYTES = 400_000
"""Maximum size of a file in a package; larger data belongs in a separate repository or a download."""
UNCOMMITTED_S = "1580601600"
"""Seconds since 1970 for the files of a project without a commit, as in hatchling."""
LICENCE = re.compile(r"(.*[._-])?(licen[cs]e|notice|copying)(\.(md|rst|txt))?", flags=re.IGNORECASE)


def main(words: Sequence[str] | None = None) -> int:
    """Build and check; print the digest of each file, or each problem."""
    parser = argparse.ArgumentParser(prog="distributions")
    parser.add_argument("out", type=Path, help="output folder for wheels and sdists")
    parser.add_argument("names", nargs="+", metavar="NAME[@COMMIT]", help="without a commit, build the working tree")
    options = parser.parse_args(words)
    projects, num_mistakes = read_projects(), 0
    options.out.mkdir(parents=True, exist_ok=True)
    for name, _, commit in (word.partition("@") for word in options.names):
        built, mistakes = build(projects[name], options.out, commit=commit or None)
        num_mistakes += len(mistakes)
        for path in built:
            print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
        for mistake in mistakes:
            print(f"  {mistake}")
    return 1 if num_mistakes else 0


def build(project: Project, out: Path, *, commit: str | None = None, root: Path = ROOT) -> tuple[list[Path], list[str]]:
    """Build sdist and wheel twice, from the working tree or a commit; return the files and their problems."""
    epoch = git(root, "log", "-1", "--format=%ct", commit or "HEAD", "--", project.folder).strip() or UNCOMMITTED_S
    with tempfile.TemporaryDirectory(prefix="rl-build-") as folder:
        first, second = Path(folder, "first"), Path(folder, "the second, elsewhere")
        for copy in (first, second):
            export(project, copy, commit=commit, root=root)
        project = read_project(first, project.folder)  # a commit may have another version
        usual = Surroundings({"SOURCE_DATE_EPOCH": epoch, "PYTHONHASHSEED": "1", "TZ": "UTC"}, umask=0o022)
        unusual = Surroundings({"SOURCE_DATE_EPOCH": epoch, "PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo"}, umask=0o077)
        stem = f"{project.module}-{project.version}"
        sdist, wheel = out / f"{stem}.tar.gz", out / f"{stem}-py3-none-any.whl"
        usual.build("sdist", first / project.folder, out)
        with tarfile.open(sdist) as archive:
            archive.extractall(first, filter="data")
        usual.build("wheel", first / stem, out)
        for kind in ("sdist", "wheel"):
            unusual.build(kind, second / project.folder, second / "dist")
        mistakes = [
            f"{path.name} is not reproducible: two builds differ."
            for path in (sdist, wheel)
            if path.read_bytes() != (second / "dist" / path.name).read_bytes()
        ]
        mistakes += content_mistakes(project, first / project.folder, sdist, wheel)
    return [sdist, wheel], mistakes + metadata_mistakes(project, wheel)


@dataclass(frozen=True)
class Surroundings:
    """Environment of a build, on which its result must not depend."""

    env: dict[str, str]
    umask: int

    def build(self, kind: str, folder: Path, out: Path) -> None:
        """Build the sdist or the wheel of a folder into another folder with hatchling."""
        command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(out.resolve())]
        env = {**os.environ, **self.env}
        done = subprocess.run(
            command, cwd=folder, env=env, umask=self.umask, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"hatchling cannot build the {kind} of {folder.name}:\n{done.stdout}{done.stderr}")


def export(project: Project, copy: Path, *, commit: str | None, root: Path) -> None:
    """Copy a project from a commit, or the files of the working tree that git does not ignore."""
    copy.mkdir()
    if commit is not None:
        archive = subprocess.run(["git", "archive", commit, project.folder], cwd=root, check=True, capture_output=True)
        subprocess.run(["tar", "--extract"], cwd=copy, input=archive.stdout, check=True)
        return
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", project.folder)
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():  # a removed file is listed until the removal is committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, copy / name)


def content_mistakes(project: Project, source: Path, sdist: Path, wheel: Path) -> list[str]:
    """Check that the archives contain exactly the sources, the licences and the build's own files."""
    files = {str(path.relative_to(source)): path for path in source.rglob("*") if path.is_file()}
    sources = {name for name in files if name.startswith("src/")}
    tests = {name for name in files if name.startswith("tests/")}
    info = f"{project.module}-{project.version}.dist-info"
    written = {"METADATA", "WHEEL", "RECORD", *(["entry_points.txt"] if project.commands else [])}
    licences = {f"licenses/{name}" for name in project.licences}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as tar:
        in_sdist = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
    expected = {name.removeprefix("src/") for name in sources} | {f"{info}/{name}" for name in written | licences}
    mistakes = differences(wheel.name, in_wheel, expected)
    about = {"CHANGELOG.md", "PKG-INFO", "README.md", "pyproject.toml", *project.licences}
    mistakes += differences(sdist.name, in_sdist, sources | tests | about)
    mistakes += [
        f"{project.folder}/{name} does not belong in a package: it is neither a licence nor {', '.join(SUFFIXES)}."
        for name in sorted(sources)
        if not name.endswith((*SUFFIXES, "/py.typed"))
    ]
    mistakes += [
        f"{project.folder}/{name} has {path.stat().st_size:,} bytes; a file of a package has at most {MAX_BYTES:,}."
        for name, path in sorted(files.items())
        if path.stat().st_size > MAX_BYTES
    ]
    unnamed = {name for name in files if LICENCE.fullmatch(Path(name).name)} - set(project.licences)
    return mistakes + [f"{project.folder}/{name} is missing in license-files." for name in sorted(unnamed)]


def differences(archive: str, found: set[str], expected: set[str]) -> list[str]:
    """Return problems of unexpected and missing files in an archive."""
    stray = [f"{archive} holds {name}, which does not belong there." for name in sorted(found - expected)]
    return stray + [f"{archive} lacks {name}." for name in sorted(expected - found)]


def metadata_mistakes(project: Project, wheel: Path) -> list[str]:
    """Check that the metadata are valid for a package index and agree with pyproject.toml."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{project.module}-{project.version}.dist-info/METADATA")
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as errors:
        return [f"{wheel.name}: {error}" for error in errors.exceptions]
    mistakes = []
    if not (metadata.description or "").strip() or metadata.description_content_type != "text/markdown":
        mistakes.append(f"{wheel.name} has no description; readme in {project.folder}/pyproject.toml must name one.")
    if not metadata.license_expression or not metadata.license_files:
        mistakes.append(f"{wheel.name} names no licence; set license and license-files in its pyproject.toml.")
    if (metadata.name, str(metadata.version)) != (project.name, project.version):
        mistakes.append(f"{wheel.name} is of {metadata.name} {metadata.version}, not {project.name} {project.version}.")
    return mistakes


if __name__ == "__main__":
    sys.exit(main())
