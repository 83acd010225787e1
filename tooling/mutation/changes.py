"""The changes that a mutation test makes to a source: one operator, boundary, constant, call or statement at a time."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
PAIRS = (
    ("any", "all"),
    ("min", "max"),
    ("amin", "amax"),
    ("minimum", "maximum"),
    ("argmin", "argmax"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("floor", "ceil"),
    ("log", "log1p"),
    ("exp", "expm1"),
    ("add", "discard"),
    ("append", "extend"),
    ("logical_and", "logical_or"),
)
FUNCTIONS = {"sorted": "list", "sum": "max", **dict(PAIRS), **{b: a for a, b in PAIRS}}
DROPPED = ("clamp", "clamp_", "clip", "detach", "abs")
"""Methods whose call is replaced by its object."""
IDENTITY = ("file", "function", "kind", "before", "after")
"""Fields that name a change while lines move."""


@dataclass(frozen=True)
class Change:
    """One change to one file: which text becomes which.

    Attributes:
        file: Path of the source from the repository's root.
        line: First line of the changed text.
        function: Name of the function or class around it, with dots; empty at the top of the module.
        kind: What is changed, such as "constant" or "drop raise".
        before: The source of the changed expression or statement, as `ast.unparse` writes it.
        after: What replaces it.
        span: First and last position of the text, in bytes of the UTF-8 source.
    """

    file: str
    line: int
    function: str
    kind: str
    before: str
    after: str
    span: tuple[int, int]

    @property
    def identity(self) -> tuple[str, ...]:
        """The values of `IDENTITY`."""
        return tuple(getattr(self, name) for name in IDENTITY)

    def text_of_line(self, root: Path) -> str:
        """Return the source's line, without indentation."""
        return (root / self.file).read_text().splitlines()[self.line - 1].strip()

    def applied(self, source: bytes) -> bytes:
        """Return the source with the change."""
        start, end = self.span
        return source[:start] + self.after.encode() + source[end:]

    def json(self) -> dict[str, object]:
        """Return the fields for a file."""
        return asdict(self)


def changes_of(path: Path, *, root: Path) -> list[Change]:
    """List the possible changes of a file in order, without docstrings, annotations, f-strings and `__all__`."""
    source = path.read_bytes()
    return list(_Walk(str(path.relative_to(root)), source).module())


class _Walk:
    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def module(self) -> Iterator[Change]:
        for node in self.tree.body:
            yield from self.visit(node, "")

    def visit(self, node: ast.AST, function: str) -> Iterator[Change]:
        if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        for kind, target, after in _changes(node):
            yield self.change(target, function, kind, after)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.visit(child, function)

    def change(self, node: ast.AST, function: str, kind: str, after: str) -> Change:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset
        return Change(self.file, node.lineno, function, kind, ast.unparse(node), after, span)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield kind, replaced node and new source of each change of a node itself."""
    match node:
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", node, str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", node, repr(value * 2 or 1.0)
        case ast.Compare(ops=[operator, *_]):
            for number, other in enumerate(COMPARISONS[type(operator)]):
                kind = "compare reversed" if number else "compare"
                yield kind, node, _with(node, ops=[other(), *node.ops[1:]])
        case ast.BoolOp():
            yield "and/or", node, _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
            for index in range(len(node.values)):
                left = node.values[:index] + node.values[index + 1 :]
                kept = left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
                yield "drop operand", node, f"({ast.unparse(kept)})"
        case ast.BinOp() if type(node.op) in OPERATORS and not _is_text(node):
            yield "arithmetic", node, _with(node, op=OPERATORS[type(node.op)]())
        case ast.AugAssign() if type(node.op) in OPERATORS:
            yield "drop statement", node, "pass"
            yield "arithmetic", node, ast.unparse(_changed(node, op=OPERATORS[type(node.op)]()))
        case ast.UnaryOp(op=ast.Not()):
            yield "remove not", node, f"({ast.unparse(node.operand)})"
        case ast.UnaryOp(op=ast.USub() | ast.Invert()):
            yield "remove minus", node, f"({ast.unparse(node.operand)})"
        case ast.If() | ast.IfExp() | ast.While():
            yield "negate if", node.test, f"(not ({ast.unparse(node.test)}))"
            if not isinstance(node, ast.While):
                yield "if True", node.test, "True"
            yield "if False", node.test, "False"
            if isinstance(node, ast.IfExp):
                yield "swap branches", node, _with(node, body=node.orelse, orelse=node.body)
        case ast.comprehension():
            for test in node.ifs:
                yield "drop filter", test, "True"
        case ast.Slice(lower=lower, upper=upper):
            if lower is not None:
                yield "slice open", lower, "None"
            if upper is not None:
                yield "slice open", upper, "None"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            yield from _call_changes(node, name)
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "drop statement", node, "pass"
        case ast.Raise():
            yield "drop raise", node, "pass"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) not in ("None", "False"):
            yield "return None", node, "return None"
        case ast.Break():
            yield "break", node, "continue"
        case ast.Continue():
            yield "continue", node, "break"


def _call_changes(node: ast.Call, name: str) -> Iterator[tuple[str, ast.AST, str]]:
    if name in DROPPED and isinstance(node.func, ast.Attribute):
        yield f"drop {name}", node, f"({ast.unparse(node.func.value)})"
    if name in FUNCTIONS and not (name == "sum" and len(node.args) > 1):
        other = copy.deepcopy(node.func)
        setattr(other, "id" if isinstance(other, ast.Name) else "attr", FUNCTIONS[name])
        yield "function", node, _with(node, func=other)


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _with(node: ast.expr, **fields: object) -> str:
    return f"({ast.unparse(_changed(node, **fields))})"


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operand is a text, or the operator joins types, so that the change would not even run."""
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )
