"""Pages of the public names, generated from the sources by `griffe` without importing them.

A module is public when a page of docs/reference lists it. Each name is documented once, under its shortest import path;
the other modules that export it link there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import griffe

PACKAGES = ("rl-core", "rl-rollout", "rl-distill", "rl-metrics")
RECORDS = ("record", "settings_record", "dataclass")
"""Decorators of classes whose attributes are the constructor's arguments."""
TITLES = {
    "parameters": "Arguments",
    "other parameters": "Arguments",
    "attributes": "Attributes",
    "returns": "Returns",
    "yields": "Yields",
    "receives": "Receives",
    "raises": "Raises",
    "warns": "Warns",
}


@dataclass
class Api:
    """The API pages, and the place of each of their names.

    Attributes:
        pages: Text by module.
        public: The path under which a name is documented, by every path that leads to it.
        types: The entries of `public` that annotations can link to.
        sources: File and line by documented path.
        problems: Problems that `griffe` found in docstrings, such as an argument that the function does not have.
    """

    pages: dict[str, str] = field(default_factory=dict)
    public: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def public_modules(root: Path) -> list[str]:
    """Return the modules that the reference pages list."""
    texts = [(root / f"docs/reference/{package}.md").read_text() for package in PACKAGES]
    return [name for text in texts for name in re.findall(r"^\| `(rl_\w+(?:\.\w+)*)` \| ", text, flags=re.MULTILINE)]


def make_api(root: Path) -> Api:
    """Read the packages and write a page for each public module."""
    api = Api()
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: api.problems.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("griffe").addHandler(listener)
    loader = griffe.GriffeLoader(search_paths=[root / f"packages/{package}/src" for package in PACKAGES])
    for package in PACKAGES:
        loader.load(package.replace("-", "_"))
    modules = {name: loader.modules_collection[name] for name in public_modules(root)}
    exported = {name: exports_of(module) for name, module in modules.items()}
    for module in sorted(modules, key=lambda name: (name.count("."), name)):
        for name, found in exported[module].items():
            place = api.public.setdefault(found.canonical_path, f"{module}.{name}")
            api.public.setdefault(f"{module}.{name}", place)
            if not isinstance(found, griffe.Function):
                api.types.setdefault(found.canonical_path, place)
    for name, module in modules.items():
        api.pages[name] = "\n".join(Writer(api, name, root).page(module, exported[name])) + "\n"
    return api


def exports_of(module: griffe.Module) -> dict[str, griffe.Object]:
    """Return a module's public names: its `__all__`, else the classes and functions that it defines."""
    if module.exports is None:
        names = [name for name, found in module.members.items() if not found.is_alias and name[0] != "_"]
        names = [name for name in names if module.members[name].kind.value in ("class", "function")]
    else:
        names = sorted(str(getattr(name, "name", name)) for name in module.exports)
    return {name: resolved(module.members[name]) for name in names}


def resolved(one: griffe.Object | griffe.Alias) -> griffe.Object:
    """Return the object behind an import."""
    return one.final_target if isinstance(one, griffe.Alias) else one


@dataclass
class Writer:
    """Writes the page of one module, in MyST Markdown with the directives of Sphinx's Python domain."""

    api: Api
    module: str
    root: Path

    def page(self, module: griffe.Module, names: dict[str, griffe.Object]) -> Iterator[str]:
        """Yield the lines of the page."""
        yield from (f"# {self.module}", "", f"```{{py:module}} {self.module}", "```", "")
        yield from self.docstring(module)
        elsewhere = {name: one for name, one in names.items() if self.place_of(one) != f"{self.module}.{name}"}
        if elsewhere:
            links = (f"{{py:obj}}`{name} <{self.place_of(one)}>`" for name, one in elsewhere.items())
            yield from (f"Also exported here: {', '.join(links)}.", "")
        for name, one in names.items():
            if name not in elsewhere:
                yield from self.entry(one, name, depth=5)

    def place_of(self, one: griffe.Object) -> str:
        """Return the path under which an object is documented."""
        return self.api.public[one.canonical_path]

    def entry(self, one: griffe.Object, name: str, *, depth: int) -> Iterator[str]:
        """Yield a name's directive with the directives of its members."""
        fence = ":" * depth
        self.api.sources[f"{self.module}.{name}"] = (
            f"{Path(str(one.filepath)).relative_to(self.root)}#L-{one.lineno or 1}"
        )
        last = name.rpartition(".")[2]
        kind, signatures, options = self.head(one, last, is_member="." in name)
        yield f"{fence}{{py:{kind}}} {signatures[0]}"
        yield from (f"    {signature}" for signature in signatures[1:])
        yield from (*options, "")
        if isinstance(one, griffe.Class) and one.bases:
            yield from (f"Bases: {', '.join(f'`{self.typed(base, short=True)}`' for base in one.bases)}", "")
        yield from self.docstring(one)
        if isinstance(one, griffe.Class):
            for member_name, member in one.members.items():
                if self.is_shown(member_name, member):
                    yield from self.entry(resolved(member), f"{name}.{member_name}", depth=depth - 1)
        yield from (fence, "")

    def is_shown(self, name: str, member: griffe.Object | griffe.Alias) -> bool:
        """Return True for public methods and properties; the class's docstring describes its attributes."""
        if member.is_alias or name.startswith(("_", "test_")):
            return False
        return isinstance(member, griffe.Function) or "property" in member.labels

    def head(self, one: griffe.Object, name: str, *, is_member: bool) -> tuple[str, list[str], list[str]]:
        """Return the directive, signatures and options."""
        labels = one.labels
        if isinstance(one, griffe.Class):
            is_error = name.endswith(("Error", "Exception"))
            return "exception" if is_error else "class", [f"{name}{self.made_from(one)}"], []
        if isinstance(one, griffe.Attribute):
            kind = "property" if "property" in labels else "attribute" if is_member else "data"
            typed = [f":type: {self.typed(one.annotation)}"] if one.annotation else []
            is_short = kind == "data" and one.value is not None and len(str(one.value)) < 120
            return kind, [name], [*typed, *([f":value: {' '.join(str(one.value).split())}"] if is_short else [])]
        options = [f":{label}:" for label in ("async", "classmethod", "staticmethod") if label in labels]
        functions = one.overloads or [one] if isinstance(one, griffe.Function) else []
        signatures = [f"{name}{self.signature(function, skip_self=is_member)}" for function in functions]
        return "method" if is_member else "function", signatures, options

    def made_from(self, one: griffe.Class) -> str:
        """Return the arguments of a class: those of its `__init__`, or a record's attributes."""
        own = one.members.get("__init__")
        if isinstance(own, griffe.Function) and not any(parameter.name == "cls" for parameter in own.parameters):
            return self.signature(own, skip_self=True, with_result=False)
        decorators = {str(found.value).partition("(")[0]: str(found.value) for found in one.decorators}
        used = [name for name in RECORDS if name in decorators]
        if not used:
            return ""
        words = [
            f"{name}: {self.typed(member.annotation or '')}"
            + (f" = {default_of(member.value)}" if member.value else "")
            for name, member in one.members.items()
            if isinstance(member, griffe.Attribute) and is_field(member)
        ]
        by_name = used[0] != "dataclass" or "kw_only=True" in decorators["dataclass"]
        return f"({', '.join([*(['*'] if by_name and words else []), *words])})"

    def signature(self, function: griffe.Function, *, skip_self: bool, with_result: bool = True) -> str:
        """Return a function's signature, with full paths for our names, so that they become links."""
        words: list[str] = []
        seen_star = False
        for parameter in function.parameters:
            if skip_self and parameter.name in ("self", "cls") and not words:
                continue
            kind = parameter.kind.value if parameter.kind else ""
            if kind == "keyword-only" and not seen_star:
                words.append("*")
            seen_star = seen_star or kind in ("keyword-only", "variadic positional")
            stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
            typed = f": {self.typed(parameter.annotation)}" if parameter.annotation else ""
            default = f" = {parameter.default}" if parameter.default is not None and not stars else ""
            words.append(f"{stars}{parameter.name}{typed}{default}")
        result = f" -> {self.typed(function.returns)}" if with_result and function.returns else ""
        return f"({', '.join(words)}){result}"

    def typed(self, annotation: griffe.Expr | str, *, short: bool = False) -> str:
        """Return an annotation with the public path of each of our names."""
        if isinstance(annotation, str):
            return annotation.strip("'\"")
        parts = annotation.iterate(flat=True)
        return "".join(
            self.api.types.get(part.canonical_path, part.name)
            if isinstance(part, griffe.ExprName) and not short
            else str(getattr(part, "name", part))
            for part in parts
        )

    def docstring(self, one: griffe.Object) -> Iterator[str]:
        """Yield the text and sections of a docstring."""
        if one.docstring is None:
            return
        for section in one.docstring.parse("google", warn_unknown_params=True):
            kind = section.kind.value
            if kind == "text":
                yield from (plain(section.value), "")
            elif kind == "examples":
                for part, text in section.value:
                    yield from (text if part.value == "text" else f"```pycon\n{text}\n```", "")
            elif kind == "admonition":
                yield from (f"**{section.title}**", "", plain(section.value.contents), "")
            else:
                yield from (f"**{TITLES[kind]}**", "", *map(self.item, section.value), "")

    def item(self, one: griffe.DocstringElement) -> str:
        """Return one argument, attribute, result or error as a list item."""
        name, annotation = getattr(one, "name", ""), getattr(one, "annotation", None)
        words = plain(one.description).replace("\n", "\n  ")
        if isinstance(one, griffe.DocstringRaise):
            place = self.api.public.get(getattr(annotation, "canonical_path", ""))
            name = f"{{py:exc}}`{annotation} <{place}>`" if place else f"`{annotation}`"
            return f"- {name}: {words}"
        if isinstance(one, griffe.DocstringAttribute) and name and annotation:
            return f"- `{name}` (`{self.typed(annotation, short=True)}`): {words}"
        return f"- `{name}`: {words}" if name else f"- {words}"


def is_field(member: griffe.Attribute) -> bool:
    """Return True if an attribute is an argument of its record."""
    return (
        member.annotation is not None and "ClassVar" not in str(member.annotation) and "property" not in member.labels
    )


def default_of(value: griffe.Expr | str) -> str:
    """Return a field's default as a caller would write it."""
    text = " ".join(str(value).split())
    made = re.fullmatch(r"(?:dataclasses\.)?field\(default_factory=(\w+)\)", text)
    if made:
        return {"dict": "{}", "list": "[]", "tuple": "()"}.get(made[1], f"{made[1]}()")
    return "..." if text.startswith(("field(", "dataclasses.field(")) else text


def plain(text: str) -> str:
    """Return a docstring's text with Markdown syntax escaped outside code spans and code blocks."""
    special = re.compile(r"([<*|$\\]|\b_|_\b)")
    parts = re.split(r"(```.*?```|``.*?``|`[^`]*`)", text, flags=re.DOTALL)
    return "".join(part if index % 2 else special.sub(r"\\\1", part) for index, part in enumerate(parts))
