"""What the site adds to Sphinx: pages of sources, links from code spans, and diagrams."""

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
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
OURS = re.compile(r"rl_(core|rollout|distill|metrics)(\.\w+)+")
NAMES: dict[str, dict[str, str]] = {"public": {}, "sources": {}}
WANTED: set[str] = set()
"""Files whose source some page links to."""


def setup(app: Sphinx) -> dict[str, object]:
    """Connect it."""
    NAMES.update(json.loads(Path(app.srcdir, "names.json").read_text()))
    app.connect("doctree-read", draw_diagrams)
    app.connect("doctree-resolved", link_code)
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", flatten_signatures)
    return {"parallel_read_safe": True, "parallel_write_safe": False}


def source_of(domain: str, info: dict[str, str]) -> str | None:
    """Where a documented name's source is, as a link from a page of api/."""
    place = NAMES["sources"].get(f"{info['module']}.{info['fullname']}") if domain == "py" else None
    return None if place is None else f"source:{place}"


SIGNATURE = re.compile(
    r'(<span class="sig-paren">\(</span>)\s*<dl>(.*?)</dl>\s*(<span class="sig-paren">\)</span>)', re.DOTALL
)


def flatten_signatures(
    _app: Sphinx, name: str, _template: str, context: dict[str, str], _tree: nodes.Node | None
) -> None:
    """Long signatures as lines in place of Sphinx's list within a term, which screen readers take for a broken list."""
    if name.startswith("api/"):
        context["body"] = SIGNATURE.sub(
            lambda found: (
                found[1] + found[2].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>") + found[3]
            ),
            context["body"],
        )


def draw_diagrams(app: Sphinx, doctree: nodes.document) -> None:
    """Replace Mermaid's code by its drawing, which needs no script in the browser."""
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") == "mermaid":
            svg = mermaidx.render(block.astext()).svg()
            block.replace_self(nodes.raw("", f'<div class="diagram" tabindex="0">{svg}</div>', format="html"))


def link_code(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Resolve links to sources, and link code spans that name a public name, a setting, a metric or a file."""
    for reference in doctree.findall(nodes.reference):
        target = reference.get("refuri", "")
        if target.startswith("source:"):
            reference["refuri"] = source_uri(app, docname, target.removeprefix("source:"))
    for span in list(doctree.findall(nodes.literal)):
        parents = ancestors(span)
        if any(isinstance(one, nodes.reference | nodes.title) for one in parents):
            continue
        uri = uri_of(app, docname, span.astext())
        if uri is not None:
            link = nodes.reference("", "", internal=True, refuri=uri)
            span.replace_self(link)
            link += span


def ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    """The nodes around one."""
    while node.parent is not None:
        node = node.parent
        yield node


def uri_of(app: Sphinx, docname: str, text: str) -> str | None:
    """Where a code span leads to; none where it names nothing that has a page."""
    objects = app.env.domains.python_domain.objects
    known = known_names()
    head, dot, member = text.rpartition(".")
    candidates = (
        known.get(text, ""),
        f"{known[head]}{dot}{member}" if head in known else "",
        text if OURS.fullmatch(text) else "",
    )
    for path in candidates:
        if path in objects:
            return page_uri(app, docname, objects[path].docname, objects[path].node_id)
    if (row := rows(app).get(text)) is not None:
        return page_uri(app, docname, *row)
    files = [text] if text.startswith(("examples/", "benchmarks/", "locks/")) else [f"*/*/src/{text}"]
    if re.fullmatch(r"[\w./-]+\.(py|toml)", text) and "/" in text:
        found = [file for pattern in files for file in ROOT.glob(pattern)]
        if len(found) == 1:
            return source_uri(app, docname, str(found[0].relative_to(ROOT)))
    if OURS.fullmatch(text) and not exists(text):
        LOGGER.warning("`%s` does not exist", text, location=docname)
    return None


_KNOWN: dict[str, str] = {}


def known_names() -> dict[str, str]:
    """Documented path by every way to write a name: whole, or the name alone where it is one of a kind."""
    if not _KNOWN:
        _KNOWN.update(NAMES["public"])
        short: dict[str, set[str]] = {}
        for path in set(NAMES["public"].values()):
            short.setdefault(path.rpartition(".")[2], set()).add(path)
        _KNOWN.update(
            {
                name: next(iter(paths))
                for name, paths in short.items()
                if len(paths) == 1 and (re.match("[A-Z]", name) or "_" in name)
            }
        )
    return _KNOWN


_ROWS: dict[str, tuple[str, str]] = {}


def rows(app: Sphinx) -> dict[str, tuple[str, str]]:
    """Page and heading of each setting and metric: of the first cell of a row in these two pages."""
    if not _ROWS:
        for docname in ("docs/settings", "docs/metrics"):
            if docname not in app.env.all_docs:
                continue
            for row in app.env.get_doctree(docname).findall(nodes.row):
                section = next((one for one in ancestors(row) if isinstance(one, nodes.section)), None)
                first = next(iter(row.children[0].findall(nodes.literal)), None)
                if section is not None and first is not None:
                    _ROWS.setdefault(first.astext(), (docname, section["ids"][0]))
    return _ROWS


def exists(text: str) -> bool:
    """True for a module of ours, or a name in one; entry points are named alike."""
    if text in entry_point_groups():
        return True
    package, *parts = text.split(".")
    for count in range(len(parts), -1, -1):
        base = ROOT / "packages" / package.replace("_", "-") / "src" / package / "/".join(parts[:count])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                rest = parts[count : count + 1]
                return all(re.search(rf"\b{name}\b", file.read_text()) for name in rest)
    return False


@functools.cache
def entry_point_groups() -> set[str]:
    """Groups by which other packages add names to registries; they are written like modules."""
    files = ROOT.glob("packages/*/src/**/*.py")
    return {found for file in files for found in re.findall(r'\bgroup="(rl_\w+\.\w+)"', file.read_text())}


def page_uri(app: Sphinx, docname: str, target: str, anchor: str) -> str:
    """Address of a place on a page, from another."""
    return f"{app.builder.get_relative_uri(docname, target)}#{anchor}"


def source_uri(app: Sphinx, docname: str, place: str) -> str:
    """Address of a file's page of source; asks for that page."""
    file, _, anchor = place.partition("#")
    WANTED.add(file)
    return app.builder.get_relative_uri(docname, f"source/{file}") + (f"#{anchor}" if anchor else "")


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, object], str]]:
    """A page for each file that is linked to."""
    formatter = HtmlFormatter(linespans="L", wrapcode=True)
    for file in sorted(WANTED):
        text = (ROOT / file).read_text()
        try:
            lexer = get_lexer_for_filename(file)
        except ClassNotFound:
            lexer = TextLexer()
        body = f'<h1><code>{file}</code></h1><div class="source">{highlight(text, lexer, formatter)}</div>'
        yield f"source/{file}", {"title": PurePosixPath(file).name, "body": body}, "page.html"
