"""Runs a program and then its tests, in the sandbox. `code_reward.py` sends this file there; nothing imports it.

Each result is a line that starts with a word which the program was never told. What the program prints goes to
standard error, and can not be taken for a result.
"""

import builtins
import json
import os
import sys
from typing import Any

EVALUATE, EXECUTE, COMPILE, WRITE = eval, exec, compile, os.write  # before the program can replace them
MAX_DEPTH = 100
CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset)


def main() -> None:
    """Read the word, the program and the steps; run; say what each step gave."""
    given = json.loads(sys.stdin.buffer.read())
    results = os.dup(1)
    os.dup2(2, 1)
    word, steps = given["word"], given["steps"]
    untouched = dict(vars(builtins))
    scope: dict[str, Any] = {"__name__": "answer"}
    try:
        EXECUTE(COMPILE(given["program"], "answer.py", "exec"), scope)
    except BaseException as error:
        send(results, word, ["load", describe(error)])
        return
    tests = {**scope, "__builtins__": untouched}
    for number, (kind, source) in enumerate(steps):
        try:
            if kind == "value":
                found: Any = ["value", encode(EVALUATE(COMPILE(source, "test", "eval"), tests), 0)]
            else:
                EXECUTE(COMPILE(source, "test", "exec"), tests)
                found = ["passed", None]
        except BaseException as error:
            found = ["raised", describe(error)]
        send(results, word, [number, *found])


def send(results: int, word: str, value: list[Any]) -> None:
    """Write one result, on a line of its own whatever was written before."""
    WRITE(results, f"\n{word}{json.dumps(value)}\n".encode())


def describe(error: BaseException) -> str:
    """An error in one line."""
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:
        return type(error).__name__


def encode(value: Any, depth: int) -> list[Any]:
    """A value as plain data; for anything else its type's name."""
    if depth > MAX_DEPTH:
        raise ValueError("a value that is nested too deeply")
    if value is None or isinstance(value, bool):
        return ["none" if value is None else "bool", value]
    if isinstance(value, int):
        return ["int", int.__format__(value, "x")]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", [float.hex(value.real), float.hex(value.imag)]]
    if isinstance(value, str):
        return ["str", str.__str__(value)]
    if isinstance(value, bytes):
        return ["bytes", bytes.hex(value)]
    if isinstance(value, dict):
        return ["dict", [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]]
    for kind in CONTAINERS:
        if isinstance(value, kind):
            return [kind.__name__, [encode(item, depth + 1) for item in kind.__iter__(value)]]
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return encode(value.tolist(), depth + 1)
    return [type(value).__name__, None]


if __name__ == "__main__":
    main()
