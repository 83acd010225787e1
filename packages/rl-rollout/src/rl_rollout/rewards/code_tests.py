"""Reads the tests of a program from a row: cases of input and output, or assertions."""

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rl_core.data import Json
from rl_core.errors import DataError
from rl_rollout.rewards.outputs import preview

FORMS = (
    'a list of {"input": ..., "output": ...}, {"inputs": [...], "outputs": [...]}, a text or a list of texts with '
    '`assert` statements, or {"tests": ..., "setup": "..."}, each also as JSON text'
)


DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
StepKind = Literal["setup", "check", "between"]
Case = tuple[str, str]
"""Standard input of a program, and its expected output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Python code that runs after the program.

    Attributes:
        kind: "setup" only runs; "check" must not raise; "between" counts as one more, failed check if it raises.
        source: Python statements.
    """

    kind: StepKind
    source: str


def read_tests(ground_truth: Json) -> tuple[list[Case], list[Step]]:
    """Return the tests in a ground truth, either as cases or as steps.

    Raises:
        DataError: The ground truth has an unknown form, no test, or text that is not Python.
    """
    found = _parsed(ground_truth)
    if isinstance(found, dict) and "inputs" in found and "outputs" in found:
        inputs, outputs = found["inputs"], found["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise DataError("the ground truth's inputs and outputs must be lists of the same length. Repair the row.")
        if found.get("fn_name"):
            raise DataError("the ground truth has fn_name; give its calls as `assert` statements instead.")
        found = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    setup = ""
    if isinstance(found, dict) and "tests" in found:
        setup, found = found.get("setup") or "", _parsed(found["tests"])
    tests = [found] if isinstance(found, str) else found
    if not isinstance(tests, list) or not tests or not isinstance(setup, str):
        raise DataError(f"the ground truth of code must be {FORMS}; found {preview(ground_truth)}.")
    if all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in tests):
        return [(_text(test["input"]), _text(test["output"])) for test in tests], []
    if not all(isinstance(test, str) for test in tests):
        raise DataError(f"the ground truth of code must be {FORMS}; found {preview(ground_truth)}.")
    steps = [Step(kind="setup", source=setup)] if setup.strip() else []
    steps += [step for test in tests for step in _steps(test)]
    if not any(step.kind == "check" for step in steps):
        raise DataError(
            f"the ground truth of code must have a test that runs, an `assert` or a call; found "
            f"{preview(ground_truth)}."
        )
    return [], steps


def same_output(printed: str, expected: str, *, compare: Literal["lines", "tokens"]) -> bool:
    """Return whether a program printed the expected output.

    Args:
        printed: Output of the program.
        expected: Output that the row expects.
        compare: "lines" ignores spaces at line ends and empty lines at the end; "tokens" ignores all differences in
            spaces.
    """
    if compare == "tokens":
        return printed.split() == expected.split()
    return _lines(printed) == _lines(expected)


def _parsed(ground_truth: Json) -> Json:
    """Parse text that is JSON, as columns of tables often contain it."""
    if isinstance(ground_truth, str) and ground_truth.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(ground_truth)
        except ValueError:
            return ground_truth
    return ground_truth


def _steps(source: str) -> Iterable[Step]:
    """Make each `assert` a check, and the statements between them steps; text without `assert` is one step."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(
            f"the ground truth's test is not Python ({error}): {preview(source)}. Repair the row."
        ) from error
    if not statements:
        raise DataError("the ground truth's test is empty. Repair the row.")
    if not any(isinstance(statement, ast.Assert) for statement in statements):
        yield Step(kind="setup" if all(map(_only_defines, statements)) else "check", source=source)
        return
    for statement in statements:
        kind: StepKind = "setup" if _only_defines(statement) else "between"
        yield Step(kind="check" if isinstance(statement, ast.Assert) else kind, source=ast.unparse(statement))


def _only_defines(statement: ast.stmt) -> bool:
    """Return True for a statement that checks nothing. If its definition fails, the checks that need it fail."""
    return isinstance(statement, DEFINITIONS) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _text(value: Json) -> str:
    if isinstance(value, list):  # lines, in some datasets
        return "\n".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines
