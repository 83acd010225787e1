"""The steps of `nox -s release`: on rl-core in a separate repository, and on projects with one mistake each."""

import re
import shutil
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tooling import compatibility
from tooling.distributions import build
from tooling.projects import RELEASED, Project, git, last_release, read_projects, read_releases, with_needs
from tooling.release_checks import bound_mistakes, changelog_mistakes, mistakes_of, need_mistakes, version_mistakes
from tooling.release_steps import is_new, tag_release, write_changelog

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = read_projects(ROOT)
TOOLS_PYTHON = ROOT / ".nox" / "tools" / "bin" / "python"
VERSION = "7.0.0"
FRAGMENT = "A queue that counts to seven."


def commit_all(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "--message", "Now")


def in_file(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the current rl-core at an unreleased version, and two change fragments."""
    root = tmp_path / "repository"
    project = PROJECTS["rl-core"]
    listed = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", project.folder).splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), listed):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "locks").mkdir()
    (root / RELEASED).write_text("")
    in_file(root / project.folder / "pyproject.toml", f'version = "{project.version}"', f'version = "{VERSION}"')
    (root / project.folder / "changes" / "+seven.feature.md").write_text(FRAGMENT)
    (root / project.folder / "changes" / "+seven.fix.md").write_text("What nobody had is mended.")
    git(tmp_path, "init", "--quiet", str(root))
    git(root, "config", "user.name", "A")
    git(root, "config", "user.email", "a@example.org")
    commit_all(root)
    return root


@pytest.mark.skipif(not TOOLS_PYTHON.exists(), reason="towncrier is in .nox/tools, which `nox -s tests` makes")
def test_rl_core_from_its_fragments_to_its_tag(repository: Path, tmp_path: Path):
    project = read_projects(repository)["rl-core"]
    (waiting, missing) = mistakes_of(project, {"rl-core": project}, repository)
    assert "fragments in packages/rl-core/changes are not in CHANGELOG.md" in waiting
    assert f"CHANGELOG.md has no section for {VERSION}" in missing

    assert "fragments about unreleased code" in write_changelog(project, repository, str(TOOLS_PYTHON))
    (uncommitted,) = mistakes_of(project, {"rl-core": project}, repository)
    assert "not committed" in uncommitted
    commit_all(repository)
    changelog = (repository / project.folder / "CHANGELOG.md").read_text()
    section = re.search(rf"^## {VERSION} .*?(?=^## |\Z)", changelog, flags=re.DOTALL | re.MULTILINE)
    assert section is not None
    assert f"- {FRAGMENT}" in section[0]
    assert "What nobody had" not in changelog
    assert mistakes_of(project, {"rl-core": project}, repository) == []

    files, mistakes = build(project, tmp_path / "dist", commit="HEAD", root=repository)
    assert mistakes == []
    assert is_new(project, repository)
    assert tag_release(project, repository, files) == f"rl-core-v{VERSION}"
    assert git(repository, "tag", "--list", "--format=%(contents)").count(f"rl_core-{VERSION}") == 2
    (release,) = read_releases(repository)
    assert git(repository, "rev-parse", f"{release.tag}^{{commit}}").strip() == release.commit
    assert f"| rl-core | {VERSION} | >=3.11 |" in compatibility.page({"rl-core": project}, [release], {})
    assert not is_new(project, repository)
    assert version_mistakes(project, repository) == []

    (repository / project.folder / "README.md").write_text("# Changed\n")
    commit_all(repository)
    (changed,) = version_mistakes(project, repository)
    assert "7.0.0 is released, and 1 files have changed since, such as packages/rl-core/README.md" in changed


def tagged(root: Path, version: str) -> None:
    git(root, "tag", f"rl-core-v{version}")


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("7", "must be X.Y.Z"),
        ("7.0", "must be X.Y.Z"),
        ("7.0.0.dev1", "must be X.Y.Z"),
        ("7.0.0+local", "must be X.Y.Z"),
        ("v7.0.0", "must be X.Y.Z"),
        ("seven", "must be X.Y.Z"),
        ("6.9.9", "must be newer than the released 6.10.0"),
    ],
)
def test_a_wrong_version_is_named(repository: Path, version: str, said: str):
    tagged(repository, "6.10.0")
    tagged(repository, "6.9.0")
    tagged(repository, "next")
    (mistake,) = version_mistakes(replace(PROJECTS["rl-core"], version=version), repository)
    assert said in mistake


def test_a_newer_version_is_right(repository: Path):
    tagged(repository, "6.10.0")
    assert version_mistakes(replace(PROJECTS["rl-core"], version="6.10.1"), repository) == []


def test_the_list_of_releases_counts_where_tags_are_missing(repository: Path):
    commit = "0" * 40
    entry = f'[[release]]\nname = "rl-core"\nversion = "{VERSION}"\ncommit = "{commit}"\npython = ""\nneeds = []\n'
    (repository / RELEASED).write_text(entry)
    last = last_release("rl-core", repository)
    assert last is not None
    assert (str(last[0]), last[1]) == (VERSION, commit)
    (mistake,) = version_mistakes(replace(PROJECTS["rl-core"], version=VERSION), repository)
    assert f"this clone lacks its commit {commit}" in mistake


def test_a_changelog_of_another_version_is_none(repository: Path):
    path = repository / "packages/rl-core/CHANGELOG.md"
    path.write_text(f"{path.read_text()}\n## {VERSION}.1 (2026-01-01)\n")
    assert "has no section" in changelog_mistakes(replace(PROJECTS["rl-core"], version=VERSION), repository)[-1]


@pytest.mark.parametrize(
    ("need", "said"),
    [
        ("rl-core", "must have a lower and an upper bound, such as >=0.3.1,<0.4"),
        ("rl-core>=0.3", "must have a lower and an upper bound"),
        ("rl-core<0.4", "must have a lower and an upper bound"),
        ("rl-core~=0.3.0", "must have a lower and an upper bound"),
        ("rl-core>=0.2,<0.3", "must allow rl-core 0.3.1, today's version"),
        ("rl-core>=0.3.2,<0.4", "must allow rl-core 0.3.1, today's version"),
        ("rl-core>=0.3,<1", "Lower the upper bound to <0.4"),
    ],
)
def test_a_wrong_bound_is_named(need: str, said: str):
    projects = {**PROJECTS, "rl-core": replace(PROJECTS["rl-core"], version="0.3.1")}
    (mistake,) = bound_mistakes(replace(PROJECTS["rl-rollout"], needs=(Requirement(need),)), projects)
    assert said in mistake


def test_what_is_needed_is_released_too_or_has_a_release_that_fits(repository: Path):
    project = replace(PROJECTS["rl-rollout"], needs=(Requirement("rl-core>=0.2,<0.3"), Requirement("numpy")))
    (unreleased,) = need_mistakes(project, {"rl-rollout"}, PROJECTS, repository)
    assert "needs rl-core<0.3,>=0.2, which has no release" in unreleased
    assert need_mistakes(project, {"rl-rollout", "rl-core"}, PROJECTS, repository) == []
    tagged(repository, "0.1.9")
    (too_old,) = need_mistakes(project, {"rl-rollout"}, PROJECTS, repository)
    assert "whose last release is 0.1.9. Release rl-core too" in too_old
    tagged(repository, "0.2.0")
    assert need_mistakes(project, {"rl-rollout"}, PROJECTS, repository) == []


def test_a_commit_is_built_with_the_version_that_it_had(small: tuple[Path, Project], tmp_path: Path):
    root, project = small
    in_file(root / project.folder / "pyproject.toml", 'version = "1.0.0"', 'version = "1.0.1"')
    (root / project.folder / "src/rl_small/new.py").write_text("")
    files, mistakes = build(read_projects(root)["rl-small"], tmp_path / "dist", commit="HEAD", root=root)
    assert mistakes == []
    assert [path.name for path in files] == ["rl_small-1.0.0.tar.gz", "rl_small-1.0.0-py3-none-any.whl"]


def test_an_extra_asks_for_nothing_of_ours_without_bounds():
    project = replace(PROJECTS["rl-rollout"], extras={"all": (Requirement("rl-metrics"), Requirement("rl-core[ray]"))})
    (mistake,) = bound_mistakes(project, PROJECTS)
    assert "extra all asks for rl-metrics" in mistake


@pytest.mark.parametrize("name", PROJECTS)
def test_bounds_of_today_are_right(name: str):
    assert bound_mistakes(PROJECTS[name], PROJECTS) == []


def test_what_a_project_needs_of_ours_comes_with_it():
    names = [project.name for project in with_needs([PROJECTS["rl-trainer-parts"]], PROJECTS)]
    assert names == ["rl-core", "rl-distill", "rl-metrics", "rl-rollout", "rl-trainer-parts"]
    assert [project.name for project in with_needs([PROJECTS["rl-core"]], PROJECTS)] == ["rl-core"]


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Project]:
    """A project without mistakes."""
    root = tmp_path / "small"
    folder = root / "packages" / "rl-small"
    for name, text in {
        "pyproject.toml": SMALL,
        "README.md": "# Small",
        "CHANGELOG.md": "",
        "LICENSE": "Free",
        "src/rl_small/__init__.py": "",
        "src/rl_small/py.typed": "",
        "tests/test_small.py": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(tmp_path, "init", "--quiet", str(root))
    git(root, "config", "user.name", "A")
    git(root, "config", "user.email", "a@example.org")
    commit_all(root)
    return root, read_projects(root)["rl-small"]


SMALL = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "rl-small"
version = "1.0.0"
description = "Small."
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = ">=3.11"
[tool.hatch.build.targets.wheel]
packages = ["src/rl_small"]
[tool.hatch.build.targets.sdist]
include = ["/src", "/tests", "/CHANGELOG.md"]
"""


def test_a_project_without_mistakes_has_its_files_and_no_others(small: tuple[Path, Project], tmp_path: Path):
    root, project = small
    (root / project.folder / "src/rl_small/__pycache__").mkdir()
    (root / project.folder / "src/rl_small/__pycache__/of_somebody.py").write_text("")
    (root / ".gitignore").write_text("__pycache__/\n")
    (sdist, wheel), mistakes = build(project, tmp_path / "dist", root=root)
    assert mistakes == []
    with zipfile.ZipFile(wheel) as archive:
        info = "rl_small-1.0.0.dist-info"
        about = [f"{info}/METADATA", f"{info}/RECORD", f"{info}/WHEEL", f"{info}/licenses/LICENSE"]
        assert sorted(archive.namelist()) == [*about, "rl_small/__init__.py", "rl_small/py.typed"]
    with tarfile.open(sdist) as tar:
        names = {name.removeprefix("rl_small-1.0.0/") for name in tar.getnames()}
    assert names == {
        *("CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"),
        *("src/rl_small/__init__.py", "src/rl_small/py.typed", "tests/test_small.py"),
    }


def test_each_file_that_is_wrong_is_named(small: tuple[Path, Project], tmp_path: Path):
    root, project = small
    for path, text in {
        "src/rl_small/notes.rst": "",
        "src/rl_small/large.py": "x" * 500_000,
        "src/rl_small/theirs.LICENSE": "MIT",
        "src/rl_other/__init__.py": "",
        "README.md": "",
        "NOTICE": "Theirs",
    }.items():
        (root / project.folder / path).parent.mkdir(exist_ok=True)
        (root / project.folder / path).write_text(text)
    _, mistakes = build(project, tmp_path / "dist", root=root)
    assert mistakes == [
        "rl_small-1.0.0-py3-none-any.whl lacks rl_other/__init__.py.",
        "packages/rl-small/src/rl_small/notes.rst does not belong in a package: it is neither a licence nor "
        ".css, .html, .js, .jsonl, .py, .toml, .txt, .LICENSE.",
        "packages/rl-small/src/rl_small/large.py has 500,000 bytes; a file of a package has at most 400,000.",
        "packages/rl-small/NOTICE is missing in license-files.",
        "packages/rl-small/src/rl_small/theirs.LICENSE is missing in license-files.",
        "rl_small-1.0.0-py3-none-any.whl has no description; readme in packages/rl-small/pyproject.toml must name one.",
    ]


def test_each_setting_of_the_build_that_is_wrong_is_named(small: tuple[Path, Project], tmp_path: Path):
    root, project = small
    (root / project.folder / "stray.txt").write_text("")
    in_file(root / project.folder / "pyproject.toml", 'license = "Apache-2.0"\n', "")
    in_file(root / project.folder / "pyproject.toml", '"/CHANGELOG.md"]', '"/stray.txt"]')
    _, mistakes = build(project, tmp_path / "dist", root=root)
    assert mistakes == [
        "rl_small-1.0.0.tar.gz holds stray.txt, which does not belong there.",
        "rl_small-1.0.0.tar.gz lacks CHANGELOG.md.",
        "rl_small-1.0.0-py3-none-any.whl names no licence; set license and license-files in its pyproject.toml.",
    ]


def test_a_build_that_depends_on_when_or_where_it_runs_is_found(small: tuple[Path, Project], tmp_path: Path):
    root, project = small
    folder = root / project.folder
    in_file(folder / "pyproject.toml", "[tool.hatch.build.targets.wheel]", HOOK)
    (folder / "hatch_build.py").write_text(CLOCK)
    _, mistakes = build(project, tmp_path / "dist", root=root)
    assert "rl_small-1.0.0-py3-none-any.whl is not reproducible: two builds differ." in mistakes


HOOK = """\
[tool.hatch.build.targets.wheel.hooks.custom]
[tool.hatch.build.targets.wheel]
"""
CLOCK = """\
import os
from pathlib import Path
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

class Place(BuildHookInterface):
    def initialize(self, version, build_data):
        Path(self.root, "src/rl_small/__init__.py").write_text(repr(os.environ["TZ"]))
"""


def test_a_project_that_cannot_be_built_says_why(small: tuple[Path, Project], tmp_path: Path):
    root, project = small
    in_file(root / project.folder / "pyproject.toml", 'readme = "README.md"', 'readme = "READ.md"')
    with pytest.raises(RuntimeError, match=r"hatchling cannot build the sdist of rl-small:(.|\n)*READ.md"):
        build(project, tmp_path / "dist", root=root)


def test_the_page_of_versions_is_up_to_date():
    page = compatibility.page(PROJECTS, read_releases(ROOT), compatibility.read_pins(ROOT))
    wrong = f"{compatibility.PAGE} is out of date; run `nox -s release -- --table`"
    assert (ROOT / compatibility.PAGE).read_text() == page, wrong


def test_every_library_with_an_upper_bound_or_a_pin_has_a_tested_version():
    rows = compatibility.library_rows(PROJECTS, compatibility.read_pins(ROOT))[2:]
    assert len(rows) > 30
    assert [row for row in rows if "|  |" in row] == []
