"""Write the tree that Sphinx reads: the repository's Markdown at its own paths, and generated pages.

A link to a file that is not a page gets the scheme `source:`; extension.py shows the text of that file on a page.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from tooling.docs_site.api import make_api
from tooling.docs_site.notebooks import notebook_page

PAGES = Path(__file__).parent / "pages"
LEFT_OUT = re.compile(r"(^|/)changes/|^tests/|^tooling/")
IMAGES = (".png", ".svg")
LINK = re.compile(r"\]\(([^)#\s]+)((?:#[^)\s]*)?)\)")


def stage(root: Path, folder: Path) -> list[str]:
    """Write the tree into an empty folder.

    Returns:
        Problems in docstrings.
    """
    api = make_api(root)
    wanted: dict[str, bytes] = {}
    for file in listed(root):
        if file.suffix in IMAGES:
            wanted[str(file)] = (root / file).read_bytes()
        elif file.suffix in (".md", ".ipynb"):
            text = (root / file).read_text()
            text = notebook_page(text) if file.suffix == ".ipynb" else text + unreleased(root, file)
            wanted[str(file.with_suffix(".md"))] = with_source_links(root, file, text).encode()
    wanted |= {f"api/{module}.md": text.encode() for module, text in api.pages.items()}
    wanted |= {path.name: text.encode() for path, text in with_entries(PAGES.glob("*.md"), wanted)}
    wanted["names.json"] = json.dumps({"public": api.public, "sources": api.sources}).encode()
    for name, content in wanted.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return api.problems


def with_entries(pages: Iterable[Path], files: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """Return the contents pages; a pattern such as `/docs/*` expands to documents that no earlier entry lists."""
    texts = {page: page.read_text() for page in pages}
    named = {name for text in texts.values() for name in re.findall(r"^(?:.*<)?/([\w./-]+)>?$", text, re.MULTILINE)}
    rest = sorted({file.removesuffix(".md") for file in files if file.endswith(".md")} - named)
    for page, text in texts.items():
        lines: list[str] = []
        for line in text.splitlines():
            is_pattern = line.startswith("/") and "*" in line
            matching = [name for name in rest if is_pattern and PurePosixPath(f"/{name}").match(line)]
            rest = [name for name in rest if name not in matching]
            lines.extend([f"/{name}" for name in matching] if is_pattern else [line])
        yield page, "\n".join((*lines, ""))


def listed(root: Path) -> Iterator[Path]:
    """Yield the tracked and new files of the repository that belong on the site."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in sorted(set(names)):
        if not LEFT_OUT.search(name) and (root / name).is_file():
            yield Path(name)


def unreleased(root: Path, file: Path) -> str:
    """Return the changes since the last release by kind, for a changelog; empty for other pages."""
    if file.name != "CHANGELOG.md":
        return ""
    kinds: dict[str, list[str]] = {}
    for fragment in sorted((root / file.parent / "changes").glob("*.*.md")):
        text = " ".join(fragment.read_text().split())
        kinds.setdefault(fragment.name.split(".")[1], []).append(f"- {text}\n")
    sections = [f"\n### {kind.capitalize()}\n\n{''.join(lines)}" for kind, lines in sorted(kinds.items())]
    return "\n## Not released yet\n" + "".join(sections) if sections else ""


def with_source_links(root: Path, file: Path, text: str) -> str:
    """Rewrite a page's links: a folder's to its README, others to the source page of the file or folder."""

    def rewritten(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(file.parent / found[1]))
        if re.match(r"[a-z]+:", found[1]) or target.suffix in IMAGES:
            return found[0]
        if (root / target / "README.md").exists():
            return f"]({found[1].rstrip('/')}/README.md{found[2]})"
        if target.suffix == ".ipynb" and (root / target).is_file():
            return f"]({found[1].removesuffix('.ipynb')}.md{found[2]})"
        if target.suffix == ".md" or not (root / target).exists():
            return found[0]
        return f"](source:{target}{found[2]})"

    return LINK.sub(rewritten, text)
