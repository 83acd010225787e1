"""Runs a program and its row's tests, in the sandbox. `code_reward.py` sends this file there; nothing imports it.

The tests run in this process. The program runs in a child that is forked before the tests are read, so that its memory
never contains them. A test calls the program through a `Remote`, which asks the child and returns plain data. The
results go to a pipe that the child does not have.
"""

import ast
import builtins
import ctypes
import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path.cwd()))  # an isolated Python does not search its script's folder
from code_peer import Broken, NotPlain, Peer, describe  # type: ignore[import-not-found]

del sys.path[0]  # the program can write there

PR_SET_DUMPABLE = 4
ALIASES = {"np": "numpy", "pd": "pandas"}


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


def start_program() -> tuple[int, Peer]:
    """Fork the process that runs the program."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:  # hides this process in /proc
        raise OSError("the test process cannot be hidden from the program")
    questions, answers = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        become_program(questions, answers)
    os.close(questions[0])
    os.close(answers[1])
    return child, Peer(answers[0], questions[1], None)


def become_program(questions: tuple[int, int], answers: tuple[int, int]) -> NoReturn:
    """Close all access to the tests and the results, and serve requests."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.close(questions[1])
    os.close(answers[0])
    try:
        Peer(questions[0], answers[1], {"__name__": "answer"}).serve()
    finally:
        os._exit(0)


def read_part() -> Any:
    """Read the next part of standard input, and no byte more."""
    size, received = int.from_bytes(os.read(0, 8), "little"), b""
    while len(received) < size:
        received += os.read(0, size - len(received)) or sys.exit("the input ended early")
    return json.loads(received)


def program_scope(program: str, sources: list[str], peer: Peer) -> dict[str, Any]:
    """Return the names that the tests use, each as a Remote or a copy."""
    peer.ask("load", program)
    names, modules = missing_names(sources)
    scope = {name: importlib.import_module(ALIASES.get(name, name)) for name in modules}
    for name in names:
        try:
            scope[name] = peer.ask("name", name)
        except KeyError:
            continue
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
    first = read_part()
    child, peer = (0, None) if first["is_inside"] else start_program()
    given = read_part()
    results, write = os.dup(1), os.write
    os.set_inheritable(results, False)
    os.dup2(2, 1)
    sources = given["steps"]

    def send(*found: Any) -> None:
        write(results, f"\n{given['word']}{json.dumps(found)}\n".encode())

    def run(number: Any, act: Callable[[], Any]) -> Any:
        try:
            value = act()
        except Broken as error:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if str(error) == "the program ended" else None
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

    program = first["program"]
    scope = run("load", lambda: own_scope(program) if peer is None else program_scope(program, sources, peer))
    if scope is not None:
        for number, source in enumerate(sources):
            run(number, partial(run_test, source, scope))


if __name__ == "__main__":
    main()
