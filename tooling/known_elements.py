"""Decides whether the collections in a test have elements; for tooling/assertions.py."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from tooling.parsed_tests import Function, Module, Repository, assignments, dotted

PASSED_ON = {
    "enumerate",
    "iter",
    "list",
    "reversed",
    "set",
    "sorted",
    "tuple",
    "map",
    "product",
    "chain",
    "dict",
    "cycle",
    "array",
    "asarray",
    "stack",
    "tensor",
}
"""Functions whose result has elements if an argument has."""
FROM_SELF = {"items", "keys", "values", "tolist", "copy", "numpy", "unbind"}
"""Methods whose result has elements if its object has."""
NEED_ELEMENTS = {"max", "min", "choice", "stack", "concatenate", "cat", "pop", "popleft", "vstack", "fmean"}
"""Functions that raise for a collection without elements."""


class Elements:
    """Decides whether collections in one test have elements."""

    def __init__(self, repository: Repository, module: Module, function: Function) -> None:
        """Read what the test assigns, and what its parameters are."""
        self._repository, self._module, self._function = repository, module, function
        self._local: dict[str, list[ast.expr]] = defaultdict(list)
        self._unknown: set[str] = {argument.arg for argument in all_arguments(function)}
        for node in ast.walk(function):
            if isinstance(node, ast.stmt | ast.NamedExpr):
                for name, value in assignments([node]):
                    self._local[name].append(value)
        for names, values in parameters(function):
            for index, name in enumerate(names):
                self._unknown.discard(name)
                self._local[name] += [element(value, index) if len(names) > 1 else value for value in values]

    @cached_property
    def _shown(self) -> set[str]:
        return set(self._proofs())

    def has(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        """Return True if a collection has elements for sure."""
        text = ast.unparse(node)
        if text in self._shown:
            return True
        match node:
            case ast.Constant(value=value):
                return isinstance(value, str | bytes) and bool(value)
            case ast.JoinedStr(values=values):
                return any(isinstance(value, ast.Constant) for value in values)
            case ast.List(elts=elts) | ast.Tuple(elts=elts) | ast.Set(elts=elts):
                return any(not isinstance(one, ast.Starred) or self.has(one.value, seen) for one in elts)
            case ast.Dict(keys=keys, values=values):
                return any(key is not None or self.has(value, seen) for key, value in zip(keys, values, strict=True))
            case ast.ListComp(generators=parts) | ast.SetComp(generators=parts) | ast.GeneratorExp(generators=parts):
                return all(self.has(part.iter, seen) and not part.ifs for part in parts)
            case ast.DictComp(generators=parts):
                return all(self.has(part.iter, seen) and not part.ifs for part in parts)
            case ast.BinOp(left=left, op=ast.Add() | ast.BitOr(), right=right):
                return self.has(left, seen) or self.has(right, seen)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return any(self.has(one, seen) for one in (left, right))
            case ast.IfExp(body=body, orelse=orelse):
                return self.has(body, seen) and self.has(orelse, seen)
            case ast.Call():
                return self._has_result(node, seen)
            case ast.Name(id=name):
                return name not in seen and self._has_value(name, seen | {name})
            case ast.Attribute(value=ast.Name(id=name)) if name in ("self", "cls"):
                return False
        return False

    def _has_result(self, call: ast.Call, seen: frozenset[str]) -> bool:
        name, arguments = dotted(call.func).rpartition(".")[2], call.args
        if name == "range" and arguments:
            numbers = [self._number(one) for one in arguments]
            first, last = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
            return first is not None and last is not None and (first < last or len(numbers) == 3)
        if name == "zip":
            is_strict = any(word.arg == "strict" and ast.unparse(word.value) == "True" for word in call.keywords)
            return (any if is_strict else all)(self.has(one, seen) for one in arguments)
        if name == "split" and isinstance(call.func, ast.Attribute):
            return self.has(call.func.value, seen)
        if name in FROM_SELF and isinstance(call.func, ast.Attribute):
            return self.has(call.func.value, seen)
        if name == "product":
            return all(self.has(one, seen) for one in arguments)
        return name in PASSED_ON and any(self.has(one, seen) for one in arguments)

    def _has_value(self, name: str, seen: frozenset[str]) -> bool:
        if name in self._local:
            return name not in self._unknown and all(self.has(value, seen) for value in self._local[name])
        if name in self._unknown:
            return False
        module, value = self._module, None
        while module and value is None:
            value = module.constants.get(name)
            if value is None:
                source = module.imports.get(name)
                module = self._repository.module(source) if source else None
        return value is not None and module is not None and Elements.of(self._repository, module).has(value, seen)

    @classmethod
    def of(cls, repository: Repository, module: Module) -> Elements:
        """Return what decides for constants of a module."""
        return cls(repository, module, ast.parse("def nothing(): pass").body[0])  # type: ignore[arg-type]

    def _number(self, node: ast.expr) -> int | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self._number(node.operand)
            return None if number is None else -number
        if isinstance(node, ast.Name):
            constant = self._module.constants.get(node.id)
            values = self._local.get(node.id) or ([] if constant is None else [constant])
            numbers = [self._number(value) for value in values]
            return None if None in numbers or not numbers or node.id in self._unknown else min(numbers)  # type: ignore[type-var]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
            left, right = self._number(node.left), self._number(node.right)
            if left is not None and right is not None:
                return left * right if isinstance(node.op, ast.Mult) else left + right
        if isinstance(node, ast.Call) and dotted(node.func) == "len" and self.has(node.args[0]):
            return 1
        return None

    def _proofs(self) -> Iterator[str]:
        """Yield the collections of which the test shows that they have elements."""
        for node in ast.walk(self._function):
            match node:
                case ast.Assert(test=test):
                    for part in conjuncts(test):
                        yield from self._asserted(part)
                case ast.Subscript(value=value, slice=index, ctx=ast.Load()) if not isinstance(index, ast.Slice):
                    yield ast.unparse(value)
                case ast.Assign(targets=[ast.Tuple(elts=elts) | ast.List(elts=elts)], value=value):
                    if any(not isinstance(one, ast.Starred) for one in elts):
                        yield ast.unparse(value)
                case ast.Call(func=called, args=[first, *_]) if dotted(called).rpartition(".")[2] in NEED_ELEMENTS:
                    yield ast.unparse(first)
                case ast.Call(func=ast.Name(id="next"), args=[ast.Call(func=ast.Name(id="iter"), args=[first])]):
                    yield ast.unparse(first)
                case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in NEED_ELEMENTS:
                    yield ast.unparse(value)

    def _asserted(self, test: ast.expr) -> Iterator[str]:
        if isinstance(test, ast.Call) and dotted(test.func) in ("any", "bool", "len"):
            yield from collections(test.args[0])
        elif not isinstance(test, ast.Compare):
            yield ast.unparse(test)
        else:
            sides = [test.left, *test.comparators]
            for left, operator, right in zip(sides, test.ops, sides[1:], strict=False):
                if isinstance(operator, ast.In):
                    yield from collections(right)
                for one, other, ops in ((left, right, (ast.Gt, ast.GtE)), (right, left, (ast.Lt, ast.LtE))):
                    if isinstance(operator, (ast.Eq, *ops)) and not is_empty(other, operator):
                        yield from collections(one)


def collections(node: ast.expr) -> Iterator[str]:
    """Yield the collections in an expression that has elements, or a number above 0, only if they have elements."""
    yield ast.unparse(node)
    match node:
        case ast.Call(func=called, args=arguments):
            yield from (text for one in arguments for text in collections(one))
            if isinstance(called, ast.Attribute):
                yield from collections(called.value)
        case ast.ListComp(generators=parts) | ast.SetComp(generators=parts) | ast.GeneratorExp(generators=parts):
            yield from (text for part in parts for text in collections(part.iter))
        case ast.DictComp(generators=parts):
            yield from (text for part in parts for text in collections(part.iter))
        case ast.Tuple(elts=elts) | ast.List(elts=elts) | ast.Set(elts=elts):
            yield from (text for one in elts for text in collections(one))
        case ast.Subscript(value=value) | ast.Starred(value=value):
            yield from collections(value)


def is_empty(node: ast.expr, operator: ast.cmpop) -> bool:
    """Return True if a comparison with this value also holds for nothing."""
    if isinstance(node, ast.Constant):
        return not node.value and not (isinstance(operator, ast.Gt | ast.Lt) and node.value == 0)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return not node.elts
    if isinstance(node, ast.Dict):
        return not node.keys
    return isinstance(node, ast.Call) and not node.args and dotted(node.func) in ("set", "dict", "list", "tuple")


def all_arguments(function: Function) -> list[ast.arg]:
    """Return the arguments of a function."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def parameters(function: Function) -> Iterator[tuple[list[str], list[ast.expr]]]:
    """Yield the names and values of each `pytest.mark.parametrize`."""
    for node in function.decorator_list:
        if isinstance(node, ast.Call) and dotted(node.func).endswith("parametrize") and len(node.args) > 1:
            names, values = node.args[:2]
            if isinstance(names, ast.Constant) and isinstance(values, ast.List | ast.Tuple):
                words = [word.strip() for word in str(names.value).split(",")]
                yield words, [unwrapped(one, len(words)) for one in values.elts]


def unwrapped(node: ast.expr, num_names: int) -> ast.expr:
    """Return the value in a `pytest.param`."""
    if isinstance(node, ast.Call) and dotted(node.func) == "pytest.param":
        return node.args[0] if num_names == 1 else ast.Tuple(elts=node.args, ctx=ast.Load())
    return node


def element(node: ast.expr, index: int) -> ast.expr:
    """Return one element of a tuple; what is not known counts as empty."""
    is_known = isinstance(node, ast.Tuple | ast.List) and index < len(node.elts)
    return node.elts[index] if is_known else ast.Tuple(elts=[], ctx=ast.Load())  # type: ignore[union-attr]


def conjuncts(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the parts that `and` joins."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        for value in node.values:
            yield from conjuncts(value)
    else:
        yield node
