"""Protocol between a row's tests and a program, each in its own process: JSON lines that carry only data.

`code_reward.py` puts this file next to `code_runner.py` in the sandbox, where both sides import it.
"""

import builtins
import importlib
import json
import operator
import os
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

MAX_DEPTH = 100
MAX_MESSAGE_BYTES = 1 << 24
MESSAGES = ([5, "ask"], [3, "value"], [3, "raised"])
# How plain values of each type are encoded and decoded; a type comes before its base.
SCALARS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    type(None): (lambda _: None, lambda _: None),
    bool: (bool, bool),
    int: (lambda value: int.__format__(value, "x"), lambda text: int(text, 16)),
    float: (float.hex, float.fromhex),
    complex: (lambda value: [value.real.hex(), value.imag.hex()], lambda parts: complex(*map(float.fromhex, parts))),
    str: (str.__str__, str),
    bytes: (bytes.hex, bytes.fromhex),
}
DECODERS = {kind.__name__: decoded for kind, (_, decoded) in SCALARS.items()}
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
MADE = ("fractions.Fraction", "decimal.Decimal", "datetime.date", "datetime.timedelta", "builtins.range")
# Operations that a test may apply to an object in the program's process.
ASKED: dict[str, Callable[..., Any]] = {
    "__bool__": bool,
    "__call__": lambda value, *given, **named: value(*given, **named),
    "__contains__": operator.contains,
    "__delitem__": operator.delitem,
    "__enter__": lambda value: value.__enter__(),
    "__exit__": lambda value, *given: value.__exit__(*given),
    "__getitem__": operator.getitem,
    "__instancecheck__": lambda value, other: isinstance(other, value),
    "__iter__": iter,
    "__len__": len,
    "__next__": next,
    "__repr__": repr,
    "__setattr__": setattr,
    "__setitem__": operator.setitem,
    "__str__": str,
}
# Operations between two such objects only: an object that claims to equal everything must not equal plain data.
PAIRED = ("add", "eq", "ge", "gt", "le", "lt", "matmul", "mod", "mul", "ne", "sub", "truediv")
OPERATIONS = {**ASKED, **{f"__{name}__": getattr(operator, name) for name in PAIRED}, "getattr": getattr}


class Broken(BaseException):
    """The other process is gone or sent an invalid answer. A test's `except Exception` does not catch it."""


class NotPlain(BaseException):
    """A test passes the program an object that cannot leave this process."""


class Remote:
    """Proxy of an object in the other process."""

    def __init__(self, peer: "Peer", number: int) -> None:
        """Refer to the object that the other end keeps under a number."""
        object.__setattr__(self, "_remote", (peer, number))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return ask(self, "getattr", name)

    def __hash__(self) -> int:
        return hash(self._remote[1])


def ask(remote: Remote, operation: str, *given: Any, **named: Any) -> Any:
    """Apply an operation to an object in the other process."""
    peer, number = object.__getattribute__(remote, "_remote")
    return peer.ask(operation, number, given, named)


def forwarded(operation: str, *, is_paired: bool) -> Callable[..., Any]:
    """Return a method of Remote that forwards an operation."""

    def method(self: Remote, *given: Any, **named: Any) -> Any:
        if is_paired and not isinstance(given[0], Remote):
            return NotImplemented
        return ask(self, operation, *given, **named)

    return method


for _name in OPERATIONS.keys() - {"getattr"}:
    setattr(Remote, _name, forwarded(_name, is_paired=_name not in ASKED))


class Peer:
    """One end of the pipes between tests and program. Requests may nest: the program can call a test's function.

    Only data is received, never code. A number from the other end can only refer to an object that this end handed out.
    """

    def __init__(self, reads: int, writes: int, scope: dict[str, Any] | None) -> None:
        """Serve the names and objects of a program's scope; without a scope, serve only calls of objects handed out."""
        self._reads: BinaryIO = os.fdopen(reads, "rb")
        self._writes = writes
        self._scope = scope
        self._kept: list[Any] = []

    def ask(self, operation: str, target: Any, given: Iterable[Any] = (), named: dict[str, Any] | None = None) -> Any:
        """Request an operation from the other end. Changes that it makes to arguments are applied here too."""
        given = list(given)
        encoded = [encode(value, self._keep) for value in given]
        self._send("ask", operation, target, encoded, {k: encode(v, self._keep) for k, v in (named or {}).items()})
        kind, *found = self._receive()
        while kind == "ask":
            self._answer(*found)
            kind, *found = self._receive()
        if kind == "value":
            return self._checked(lambda: self._value(found[0], found[1], given))
        raise self._checked(lambda: as_exception(found[0], found[1]))

    def serve(self) -> None:
        """Answer requests until the other end is gone."""
        while True:
            kind, *found = self._receive()
            if kind == "ask":
                self._answer(*found)

    def _value(self, encoded: Any, changed: Any, given: list[Any]) -> Any:
        for index, argument in changed:
            replace_content(given[index], self._decode(argument))
        return self._decode(encoded)

    def _answer(self, operation: str, target: Any, given: list[Any], named: dict[str, Any]) -> None:
        try:
            arguments = [self._decode(value) for value in given]
            value = self._do(operation, target, arguments, {k: self._decode(v) for k, v in named.items()})
            after = [encode(argument, self._keep) for argument in arguments]
            changed = [(i, after[i]) for i in range(len(given)) if after[i] != given[i]]
            reply = ["value", encode(value, self._keep), changed]
        except Broken:
            raise
        except BaseException as error:
            reply = ["raised", [kind.__name__ for kind in type(error).__mro__], text_of(error)]
        self._send(*reply)

    def _do(self, operation: str, target: Any, given: list[Any], named: dict[str, Any]) -> Any:
        if self._scope is None:
            if operation not in ("__call__", "__bool__") and (operation, given) != ("getattr", ["__name__"]):
                raise AttributeError("a test's function can only be called")
            return OPERATIONS[operation](self._kept[target], *given, **named)
        if operation == "load":
            exec(compile(target, "answer.py", "exec"), self._scope)  # noqa: S102 (what this is for)
            return None
        if operation == "name":
            return self._scope[target]
        return OPERATIONS[operation](self._kept[target], *given, **named)

    def _keep(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["yours", object.__getattribute__(value, "_remote")[1]]
        if self._scope is None and not callable(value):
            raise NotPlain(f"a {type(value).__name__}")
        self._kept.append(value)
        return ["kept", len(self._kept) - 1]

    def _decode(self, encoded: Any) -> Any:
        kind, value = encoded
        if kind == "kept":
            return Remote(self, value)
        if kind == "yours":
            return self._kept[value]
        return decode(kind, value, self._decode)

    def _checked(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:
            raise Broken(f"an invalid answer ({describe(error)})") from error

    def _send(self, *message: Any) -> None:
        waiting = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while waiting:
                waiting = waiting[os.write(self._writes, waiting) :]
        except BrokenPipeError as error:
            raise Broken("the program ended") from error

    def _receive(self) -> Any:
        line = self._reads.readline(MAX_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise Broken("an answer that is too long" if line else "the program ended")
        message = self._checked(lambda: json.loads(line))
        if not isinstance(message, list) or [len(message), *message[:1]] not in MESSAGES:
            raise Broken("an invalid answer")
        return message


def encode(value: Any, keep: Callable[[Any], list[Any]], depth: int = 0) -> list[Any]:
    """Encode plain data by value, and other objects by their reference number."""
    if depth > MAX_DEPTH:
        raise ValueError("a value that is nested too deeply")
    for kind, (encoded, _) in SCALARS.items():
        if isinstance(value, kind):
            return [kind.__name__, encoded(value)]
    if isinstance(value, dict):
        items = list(dict.items(value))
        return ["dict", [[encode(key, keep, depth + 1), encode(item, keep, depth + 1)] for key, item in items]]
    for kind in CONTAINERS.values():
        if isinstance(value, kind):
            return [kind.__name__, [encode(item, keep, depth + 1) for item in kind.__iter__(value)]]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in MADE:
        return ["made", [name, [encode(part, keep, depth + 1) for part in value.__reduce__()[1]]]]
    if isinstance(value, type) and value in vars(builtins).values():
        return ["builtin", str(value.__name__)]
    if hasattr(value, "tolist") and not isinstance(value, Remote):  # numpy's arrays and numbers
        return encode(value.tolist(), keep, depth + 1)
    return keep(value)


def decode(kind: str, value: Any, part: Callable[[Any], Any]) -> Any:
    """Decode a value that `encode` encoded; raises for anything else."""
    if kind in DECODERS:
        return DECODERS[kind](value)
    if kind == "dict":
        return {part(key): part(item) for key, item in value}
    if kind == "made" and value[0] in MADE:
        module, _, name = value[0].rpartition(".")
        return getattr(importlib.import_module(module), name)(*map(part, value[1]))
    if kind == "builtin" and isinstance(getattr(builtins, value), type):
        return getattr(builtins, value)
    return CONTAINERS[kind](map(part, value))


def as_exception(names: list[str], text: str) -> BaseException:
    """Return the nearest built-in exception."""
    kinds = (getattr(builtins, name, None) for name in names)
    kind = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseException))
    try:
        return kind(text)
    except TypeError:
        return RuntimeError(text)


def replace_content(old: Any, new: Any) -> None:
    """Update a list, set or dict to match its copy in the other process."""
    if isinstance(old, list):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)


def describe(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {text_of(error)}"[:300]


def text_of(error: BaseException) -> str:
    """Return an error's text, even if the error's own str raises."""
    try:
        return str(error)[:300]
    except BaseException:
        return ""
