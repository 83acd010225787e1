"""Finds the types that a JSON schema allows, as far as the schema tells.

Schemas come from users and servers, so they may contain anything.
"""

from collections.abc import Mapping, Sequence
from urllib.parse import unquote

Types = frozenset[str] | None
"""Names of JSON types; None if all are allowed or the types are unknown."""

MAX_DEPTH = 32


def allowed_types(schema: object, text: str, *, root: object) -> Types:
    """Return the types that a value with this text may have.

    Args:
        schema: Schema of the value.
        text: Text of the value. Listed strings count only if they equal it, or if only strings are listed.
        root: Schema in which `$ref` is resolved.
    """
    return _Reader(text, root).read(schema)


class _Reader:
    def __init__(self, text: str, root: object) -> None:
        self._text = text
        self._root = root
        self._targets: dict[str, Types] = {}
        self._depth = 0

    def read(self, schema: object) -> Types:
        if not isinstance(schema, Mapping) or self._depth >= MAX_DEPTH:
            return None
        self._depth += 1
        found = [_named(schema.get("type"))]
        if "const" in schema:
            found.append(self._listed([schema["const"]]))
        if isinstance(schema.get("enum"), list):
            found.append(self._listed(schema["enum"]))
        if isinstance(schema.get("$ref"), str):
            found.append(self._target(schema["$ref"]))
        found += [self._union(schema[key]) for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        found += [self.read(part) for part in schema["allOf"]] if isinstance(schema.get("allOf"), list) else []
        self._depth -= 1
        known = [types for types in found if types is not None]
        return (frozenset.intersection(*known) or None) if known else None

    def _listed(self, values: Sequence[object]) -> Types:
        strings = [value for value in values if isinstance(value, str)]
        types = {name for value in values if not isinstance(value, str) for name in _types_of(value)}
        if strings and (self._text in strings or len(strings) == len(values)):
            types.add("string")
        return frozenset(types) or None

    def _union(self, schemas: Sequence[object]) -> Types:
        found: set[str] = set()
        for schema in schemas:
            types = self.read(schema)
            if types is None:
                return None
            found |= types
        return frozenset(found) or None

    def _target(self, reference: str) -> Types:
        if reference not in self._targets:
            self._targets[reference] = None  # for a reference that leads back to itself
            self._targets[reference] = self.read(_resolve(reference, self._root))
        return self._targets[reference]


def _resolve(reference: str, root: object) -> object:
    """Return the target of a JSON pointer such as "#/$defs/Color"; None if there is none."""
    start, *steps = reference.split("/")
    found = root if start == "#" else None
    for step in steps:
        if not isinstance(found, Mapping):
            return None
        found = found.get(unquote(step).replace("~1", "/").replace("~0", "~"))
    return found


def _named(name: object) -> Types:
    names = name if isinstance(name, list) else [name]
    return frozenset(name for name in names if isinstance(name, str)) or None


def _types_of(value: object) -> tuple[str, ...]:
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int | float):
        return ("integer", "number")
    return ("array",) if isinstance(value, list | tuple) else ("object",)
