"""Runs a program and its row's tests, in the sandbox. `code_reward.py` sends this file there; nothing imports it.

The tests run in this process, the program in a child that was forked before they were read, so that nothing of them
was ever in its memory. Where a test calls the program, a `Remote` asks the child and gets plain data back. The
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

sys.path.insert(0, str(Path.cwd()))  # an isolated Python does not look beside its script
from code_peer import Broken, NotPlain, Peer, describe  # type: ignore[import-not-found]

del sys.path[0]  # the program can write there

PR_SET_DUMPABLE = 4
ALIASES = {"np": "numpy", "pd": "pandas"}


def missing_names(sources: list[str]) -> tuple[set[str], set[str]]:
    """Names that tests use and do not define: the program's, and modules that these tests mean by `name.attribute`."""
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
    if not program and len(used - modules) == 1:  # a program may be asked for a `sum` of its own, never for `abs` too
        program = used - modules
    return program, modules


def explained(source: str) -> ast.Module:
    """A test whose comparisons say what they found."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and node.msg is None:
            node.test.left = ast.NamedExpr(ast.Name("_found", ast.Store()), node.test.left)
            node.msg = ast.Call(ast.Name("repr", ast.Load()), [ast.Name("_found", ast.Load())], [])
    return ast.fix_missing_locations(tree)


def start_program() -> tuple[int, Peer]:
    """Fork the process that runs the program."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:  # /proc shows others nothing of this
        raise OSError("the process of the tests cannot be closed to the program")
    questions, answers = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        become_program(questions, answers)
    os.close(questions[0])
    os.close(answers[1])
    return child, Peer(answers[0], questions[1], None)


def become_program(questions: tuple[int, int], answers: tuple[int, int]) -> NoReturn:
    """Keep no way to the tests and the results, and do what is asked."""
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
    """The next part of standard input, not one byte more."""
    size, received = int.from_bytes(os.read(0, 8), "little"), b""
    while len(received) < size:
        received += os.read(0, size - len(received)) or sys.exit("the input ended early")
    return json.loads(received)


def program_scope(program: str, sources: list[str], peer: Peer) -> dict[str, Any]:
    """The names that the tests use, each a Remote or a copy."""
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
    """All that the program defines, in this process."""
    untouched, scope = dict(vars(builtins)), {"__name__": "answer"}
    exec(compile(program, "answer.py", "exec"), scope)  # noqa: S102 (what this is for)
    return {**scope, "__builtins__": untouched}


def run_test(source: str, scope: dict[str, Any]) -> None:
    """Run one test; it raises where it fails."""
    exec(compile(explained(source), "test", "exec"), scope)  # noqa: S102


def main() -> None:
    """Run the program, then the tests; say what each test gave."""
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
                os.kill(os.getpid(), -code)  # what ended the program ends the run, and shows as such
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
