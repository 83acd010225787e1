"""Sphinx extension of the site: links from code spans, source pages, and diagrams."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import mermaidx
from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
SCHEME = "source:"
OURS = re.compile(r"rl_(core|rollout|distill|metrics)(\.\w+)+")
FILE = re.compile(r"[\w.-]+(/[\w.-]+)+\.(py|toml)")
FOLDERS = ("examples/", "benchmarks/", "locks/", "tooling/")
TABLES = ("docs/settings", "docs/metrics")
"""Pages whose tables have a setting or a metric in the first cell of each row."""
SIGNATURE = re.compile(r'(?<="sig-paren">\(</span>)\s*<dl>(.*?)</dl>\s*(?=<span class="sig-paren">\))', re.DOTALL)


def setup(app: Sphinx) -> dict[str, object]:
    """Connect the extension's handlers."""
    app.connect("doctree-read", draw_diagrams)
    app.connect("doctree-resolved", link_code)
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", flatten_signatures)
    return {"parallel_read_safe": True, "parallel_write_safe": False}


def draw_diagrams(_app: Sphinx, doctree: nodes.document) -> None:
    """Replace Mermaid code with its drawing, which needs no script in the browser."""
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") == "mermaid":
            svg = mermaidx.render(block.astext()).svg()
            block.replace_self(nodes.raw("", f'<div class="diagram" tabindex="0">{svg}</div>', format="html"))


def link_code(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Resolve links to sources; link code spans that name a public name, a setting, a metric or a file."""
    for reference in doctree.findall(nodes.reference):
        if (target := reference.get("refuri", "")).startswith(SCHEME):
            place = target.removeprefix(SCHEME)
            reference["refuri"] = source_uri(app, docname, names(app.srcdir)["sources"].get(place, place))
    for span in list(doctree.findall(nodes.literal)):
        if any(isinstance(one, nodes.reference | nodes.title) for one in ancestors(span)):
            continue
        text = span.astext()
        uri = name_uri(app, docname, text) or row_uri(app, docname, text) or file_uri(app, docname, text)
        if uri is not None:
            link = nodes.reference("", "", internal=True, refuri=uri)
            span.replace_self(link)
            link += span
        elif OURS.fullmatch(text) and not docname.endswith("CHANGELOG") and not exists(text):  # those name old ones
            LOGGER.warning("`%s` does not exist", text, location=docname)


def ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield the ancestors of a node."""
    while node.parent is not None:
        node = node.parent
        yield node


def name_uri(app: Sphinx, docname: str, text: str) -> str | None:
    """Return the URI of a public name or of its method."""
    known = known_names(app.srcdir)
    head, _, member = text.rpartition(".")
    objects = app.env.domains.python_domain.objects
    for path in (known.get(text), f"{known.get(head)}.{member}", OURS.fullmatch(text) and text):
        if path in objects:
            return page_uri(app, docname, objects[path].docname, objects[path].node_id)
    return None


@functools.cache
def names(source: Path) -> dict[str, dict[str, str]]:
    """Return the public names and sources that stage.py wrote."""
    found: dict[str, dict[str, str]] = json.loads(Path(source, "names.json").read_text())
    return found


@functools.cache
def known_names(source: Path) -> dict[str, str]:
    """Return documented paths by every spelling of a name: its full path, or the name alone if it is unique."""
    public = names(source)["public"]
    short: dict[str, set[str]] = {}
    for path in set(public.values()):
        short.setdefault(path.rpartition(".")[2], set()).add(path)
    alone = {name: paths.pop() for name, paths in short.items() if len(paths) == 1}
    return public | {name: path for name, path in alone.items() if re.match("[A-Z]", name) or "_" in name}


def row_uri(app: Sphinx, docname: str, text: str) -> str | None:
    """Return the URI of a setting or a metric."""
    place = rows(app).get(text)
    return None if place is None or place[0] == docname else page_uri(app, docname, *place)


@functools.cache
def rows(app: Sphinx) -> dict[str, tuple[str, str]]:
    """Return the page and heading of each setting and metric."""
    found: dict[str, tuple[str, str]] = {}
    for docname in (name for name in TABLES if name in app.env.all_docs):
        for section in app.env.get_doctree(docname).findall(nodes.section):
            for row in section.findall(nodes.row):
                if (first := next(iter(row.children[0].findall(nodes.literal)), None)) is not None:
                    found[first.astext()] = (docname, section["ids"][0])  # the innermost section comes last
    return found


def file_uri(app: Sphinx, docname: str, text: str) -> str | None:
    """Return the URI of a file's source; the path starts at the root or in a package."""
    if FILE.fullmatch(text):
        found = list(ROOT.glob(text if text.startswith(FOLDERS) else f"*/*/src/{text}"))
        if len(found) == 1:
            return source_uri(app, docname, str(found[0].relative_to(ROOT)))
    return None


def exists(text: str) -> bool:
    """Return True for our modules, names in them, and groups of entry points."""
    if text in entry_point_groups():
        return True
    package, *parts = text.split(".")
    for count in range(len(parts), -1, -1):
        base = ROOT / "packages" / package.replace("_", "-") / "src" / package / "/".join(parts[:count])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return all(re.search(rf"\b{name}\b", file.read_text()) for name in parts[count : count + 1])
    return False


@functools.cache
def entry_point_groups() -> set[str]:
    """Return the entry point groups through which other packages add names to registries."""
    files = ROOT.glob("packages/*/src/**/*.py")
    return {found for file in files for found in re.findall(r'\bgroup="(rl_\w+\.\w+)"', file.read_text())}


def page_uri(app: Sphinx, docname: str, target: str, anchor: str) -> str:
    """Return the URI of a place on a page, relative to another page."""
    return f"{app.builder.get_relative_uri(docname, target)}#{anchor}"


def source_uri(app: Sphinx, docname: str, place: str) -> str:
    """Return the URI of a file's source page, and request that page."""
    file, _, anchor = place.partition("#")
    wanted(app).add(file)
    if (ROOT / file).is_dir():
        wanted(app).update(str(one.relative_to(ROOT)) for one in (ROOT / file).iterdir() if one.is_file())
    return app.builder.get_relative_uri(docname, f"source/{file}") + (f"#{anchor}" if anchor else "")


@functools.cache
def wanted(_app: Sphinx) -> set[str]:
    """Return the files whose source pages are requested."""
    return set()


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, object], str]]:
    """Yield a page for each requested file."""
    formatter = HtmlFormatter(linespans="L", wrapcode=True)
    for file in sorted(wanted(app)):
        body = f"<h1><code>{file}</code></h1>" + (
            folder_list(ROOT / file)
            if (ROOT / file).is_dir()
            else f'<div class="source">{highlight((ROOT / file).read_text(), lexer_of(file), formatter)}</div>'
        )
        yield f"source/{file}", {"title": PurePosixPath(file).name, "body": body}, "page.html"


def lexer_of(file: str) -> Lexer:
    """Return the lexer for a file's name, or one for plain text."""
    try:
        return get_lexer_for_filename(file)
    except ClassNotFound:
        return TextLexer()


def folder_list(folder: Path) -> str:
    """Return links to the source pages of the files in a folder."""
    names = sorted(one.name for one in folder.iterdir() if one.is_file())
    return "<ul>" + "".join(f'<li><a href="{folder.name}/{name}.html">{name}</a></li>' for name in names) + "</ul>"


def flatten_signatures(_app: Sphinx, name: str, _template: str, context: dict[str, str], _tree: nodes.Node) -> None:
    """Write long signatures as lines: Sphinx nests a list in a term, which is not a valid definition list."""
    if name.startswith("api/"):
        context["body"] = SIGNATURE.sub(
            lambda found: found[1].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>"),
            context["body"],
        )
