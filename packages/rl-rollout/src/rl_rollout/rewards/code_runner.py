"""Runs a program and its row's tests, in the sandbox. `code_reward.py` sends this file there.

The tests run in this process. The program runs in a child that is forked before the tests are read, so that its memory
never contains them. The tests call the program's functions by value: arguments and results cross the pipes as JSON
lines that contain only plain data. The results of the tests go to a pipe that the child does not have.
"""

import ast
import builtins
import ctypes
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO, NoReturn

PR_SET_DUMPABLE = 4
ALIASES = {"np": "numpy", "pd": "pandas"}
MAX_DEPTH = 100
MAX_MESSAGE_BYTES = 1 << 24
SCALARS = (bool, int, float, str)
# How values of each type are taken apart, and made from their encoded parts.
CONTAINERS: dict[str, tuple[Any, Callable[[Any], Iterable[Any]], Callable[[Iterable[Any]], Any]]] = {
    "dict": (dict, dict.items, dict),
    "list": (list, list.__iter__, list),
    "tuple": (tuple, tuple.__iter__, tuple),
    "set": (set, set.__iter__, set),
    "frozenset": (frozenset, frozenset.__iter__, frozenset),
    "bytes": (bytes, bytes.__iter__, bytes),
    "complex": (complex, lambda value: (value.real, value.imag), lambda parts: complex(*parts)),
    "iterator": (Iterator, iter, lambda parts: iter(list(parts))),
}
MADE = ("fractions.Fraction", "decimal.Decimal", "datetime.date", "datetime.timedelta", "builtins.range")


class Broken(BaseException):
    """The program's process is gone or sent an invalid answer. A test's `except Exception` does not catch it."""


class NotPlain(BaseException):
    """An argument or a result that is not plain data."""


def encode(value: Any, depth: int = 0) -> Any:
    """Encode plain data as JSON: a scalar as it is, anything else as its type's name and its parts.

    Raises:
        NotPlain: The value contains another object.
    """
    if depth > MAX_DEPTH:
        raise ValueError("a value that is nested too deeply")
    kind = type(value)
    if value is None or issubclass(kind, SCALARS):
        return value
    for name, (container, taken_apart, _) in CONTAINERS.items():
        if issubclass(kind, container):
            return [name, [encode(part, depth + 1) for part in taken_apart(value)]]
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in MADE:
        return [name, [encode(part, depth + 1) for part in value.__reduce__()[1]]]
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return encode(value.tolist(), depth + 1)
    raise NotPlain(f"a {kind.__name__}, which is not plain data")


def decode(encoded: Any) -> Any:
    """Decode what `encode` returned; other JSON is data too, or raises."""
    if not isinstance(encoded, list):
        return encoded
    name, parts = encoded
    if name in MADE:
        module, _, kind = name.rpartition(".")
        return getattr(importlib.import_module(module), kind)(*map(decode, parts))
    return CONTAINERS[name][2](map(decode, parts))


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


class Channel:
    """One end of the pipes between tests and program."""

    def __init__(self, reads: int, writes: int) -> None:
        """Take over both descriptors."""
        self._reads: BinaryIO = os.fdopen(reads, "rb")
        self._writes = writes

    def send(self, *message: Any) -> None:
        """Send a message of JSON."""
        waiting = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while waiting:
                waiting = waiting[os.write(self._writes, waiting) :]
        except BrokenPipeError as error:
            raise Broken("the program ended") from error

    def receive(self) -> Any:
        """Wait for the next message."""
        line = self._reads.readline(MAX_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise Broken("an answer that is too long" if line else "the program ended")
        return json.loads(line)


class Program:
    """The program, as its tests see it."""

    def __init__(self) -> None:
        """Fork the process that will run the program."""
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:  # hides this process in /proc
            raise OSError("the test process cannot be hidden from the program")
        questions, answers = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            become_program(questions, answers)
        os.close(questions[0])
        os.close(answers[1])
        self._channel = Channel(answers[0], questions[1])

    def ask(self, operation: str, /, *given: Any, **named: Any) -> Any:
        """Apply one of the operations of `serve`. Changes that it makes to arguments are applied here too."""
        encoded = [encode(value) for value in given]
        self._channel.send(operation, encoded, {name: encode(value) for name, value in named.items()})
        try:
            kind, found, more = self._channel.receive()
            if kind == "raised":
                raised = as_exception(found, more)
            else:
                for index, content in more:
                    replace_content(given[index], decode(content))
                return decode(found)
        except Exception as error:
            raise Broken(f"an invalid answer ({describe(error)})") from error
        raise raised

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function of the program."""

        def call(*given: Any, **named: Any) -> Any:
            return self.ask("call", name, *given, **named)

        return call


def become_program(questions: tuple[int, int], answers: tuple[int, int]) -> NoReturn:
    """Close all access to the tests and the results, and serve requests."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.close(questions[1])
    os.close(answers[0])
    try:
        serve(Channel(questions[0], answers[1]))
    finally:
        os._exit(0)


def serve(channel: Channel) -> None:
    """Answer the requests of the tests until they end."""
    scope: dict[str, Any] = {"__name__": "answer"}

    def load(program: str) -> dict[str, bool]:
        exec(compile(program, "answer.py", "exec"), scope)  # noqa: S102 (what this is for)
        return {name: callable(value) for name, value in scope.items()}

    def call(name: str, /, *given: Any, **named: Any) -> Any:
        return scope[name](*given, **named)

    operations: dict[str, Callable[..., Any]] = {"load": load, "call": call, "copy": scope.__getitem__}
    while True:
        operation, encoded, named = channel.receive()
        try:
            given = [decode(value) for value in encoded]
            value = operations[operation](*given, **{name: decode(value) for name, value in named.items()})
            after = [encode(value) for value in given]
            changes = [[index, after[index]] for index in range(len(given)) if after[index] != encoded[index]]
            reply = ["value", encode(value), changes]
        except BaseException as error:
            reply = ["raised", [kind.__name__ for kind in type(error).__mro__], text_of(error)]
        channel.send(*reply)


def missing_names(sources: list[str]) -> tuple[set[str], set[str]]:
    """Return the names that tests use without defining them: the program's, and modules used as `name.attribute`."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - defined
    owners = [node.value for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    alone = {node.id for node in nodes if isinstance(node, ast.Name) and node not in owners}
    modules = {name for name in used - alone if name in sys.stdlib_module_names or name in ALIASES}
    program = {name for name in used - modules if not hasattr(builtins, name)}
    if not program and len(used - modules) == 1:  # a single builtin, such as `sum`, is the program's own
        program = used - modules
    return program, modules


def explained(source: str) -> ast.Module:
    """Return a test whose failed comparisons report the value that they found."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and node.msg is None:
            node.test.left = ast.NamedExpr(ast.Name("_found", ast.Store()), node.test.left)
            node.msg = ast.Call(ast.Name("repr", ast.Load()), [ast.Name("_found", ast.Load())], [])
    return ast.fix_missing_locations(tree)


def read_part() -> Any:
    """Read the next part of standard input, and no byte more."""
    size, received = int.from_bytes(os.read(0, 8), "little"), b""
    while len(received) < size:
        received += os.read(0, size - len(received)) or sys.exit("the input ended early")
    return json.loads(received)


def program_scope(source: str, tests: list[str], program: Program) -> dict[str, Any]:
    """Run the program in its process, and return what the tests use of it: functions, and copies of data."""
    is_function = program.ask("load", source)
    names, modules = missing_names(tests)
    scope: dict[str, Any] = {name: importlib.import_module(ALIASES.get(name, name)) for name in modules}
    for name in names & is_function.keys():
        scope[name] = program.function(name) if is_function[name] else program.ask("copy", name)
    return scope


def own_scope(program: str) -> dict[str, Any]:
    """Run the program in this process, and return all that it defines."""
    untouched, scope = dict(vars(builtins)), {"__name__": "answer"}
    exec(compile(program, "answer.py", "exec"), scope)  # noqa: S102 (what this is for)
    return {**scope, "__builtins__": untouched}


def run_test(source: str, scope: dict[str, Any]) -> None:
    """Run one test. It raises if it fails."""
    exec(compile(explained(source), "test", "exec"), scope)  # noqa: S102


def main() -> None:
    """Run the program, then the tests, and report the result of each test."""
    sys.set_int_max_str_digits(0)  # JSON has long numbers too
    first = read_part()
    program = None if first["is_inside"] else Program()
    given = read_part()
    results, write = os.dup(1), os.write
    os.set_inheritable(results, False)
    os.dup2(2, 1)
    source, tests = first["program"], given["steps"]

    def send(*found: Any) -> None:
        write(results, f"\n{given['word']}{json.dumps(found)}\n".encode())

    def run(number: Any, act: Callable[[], Any]) -> Any:
        try:
            value = act()
        except Broken as error:
            ended = program if str(error) == "the program ended" else None
            code = os.waitstatus_to_exitcode(os.waitpid(ended.pid, 0)[1]) if ended else None
            send("load", "ended", f"{error}" + ("" if code is None else f" with exit code {code}"))
            if code is not None and code < 0:
                os.kill(os.getpid(), -code)  # the run ends by the program's signal, which the sandbox reports
            raise SystemExit(0) from None
        except NotPlain as error:
            send(number, "not_plain", str(error))
        except BaseException as error:
            send(number, "raised", describe(error))
        else:
            send(number, "passed", "")
            return value

    scope = run("load", lambda: own_scope(source) if program is None else program_scope(source, tests, program))
    if scope is not None:
        for number, test in enumerate(tests):
            run(number, partial(run_test, test, scope))


if __name__ == "__main__":
    main()
