"""Reward for programs: runs a response's program against the row's tests, in a sandbox."""

import ast
import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.resources import files
from typing import Annotated, Any, Literal, NamedTuple

import structlog
from annotated_types import Gt

from rl_core.data import Json, Prompt
from rl_core.errors import DataError, SettingsError
from rl_core.record_fields import PositiveInt, settings_record
from rl_core.registry import unknown_name
from rl_rollout.rewards.code_runner import missing_names
from rl_rollout.rewards.outputs import cut, preview
from rl_rollout.rewards.protocol import RewardInput, RewardResult
from rl_rollout.sandbox import ProgramRun, Sandbox, SandboxLimits, SandboxOptions

FORMS = (
    'a list of {"input": ..., "output": ...}, {"inputs": [...], "outputs": [...]}, a text or a list of texts with '
    '`assert` statements, or {"tests": ..., "setup": "..."}, each also as JSON text'
)
OBJECTS_ADVICE = 'Repair the row, or set checks = "inside", which lets programs see their tests.'
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
StepKind = Literal["setup", "check", "between"]
Case = tuple[str, str]
"""Standard input of a program, and its expected output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeStep:
    """Python code that runs after the program.

    Attributes:
        kind: "setup" only runs; "check" must not raise; "between" counts as one more, failed check if it raises.
        source: Python statements.
    """

    kind: StepKind
    source: str


def read_tests(ground_truth: Json) -> tuple[list[Case], list[CodeStep]]:
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
    tests: Any = [found] if isinstance(found, str) else found
    is_list = isinstance(tests, list) and tests and isinstance(setup, str)
    if is_list and all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in tests):
        return [(_text(test["input"]), _text(test["output"])) for test in tests], []
    if not is_list or not all(isinstance(test, str) for test in tests):
        raise DataError(f"the ground truth of code must be {FORMS}; found {preview(ground_truth)}.")
    steps = [CodeStep(kind="setup", source=setup)] if _statements(setup) else []
    steps += [step for test in tests for step in _steps(test)]
    if not any(step.kind == "check" for step in steps):
        raise DataError(
            "the ground truth of code must have a test that runs, an `assert` or a call; found "
            f"{preview(ground_truth)}."
        )
    return [], steps


def class_of_program(tests: list[str]) -> str | None:
    """Return the first class of the program that tests use; a class is a name in capitals such as `Solution`."""
    names, _ = missing_names(tests)
    for node in (node for test in tests for node in ast.walk(ast.parse(test))):
        match node:
            case (
                ast.Call(func=ast.Name(id=name))
                | ast.Attribute(value=ast.Name(id=name))
                | ast.ExceptHandler(type=ast.Name(id=name))
            ) if name in names and name[0].isupper() and (len(name) == 1 or not name.isupper()):
                return name
    return None


def same_output(printed: str, expected: str, *, compare: Literal["lines", "tokens"]) -> bool:
    """Return whether a program printed the expected output.

    Args:
        printed: Output of the program.
        expected: Output that the row expects.
        compare: "lines" ignores spaces at line ends and empty lines at the end; "tokens" ignores all differences in
            spaces.
    """
    read = str.split if compare == "tokens" else _lines
    return read(printed) == read(expected)


def _parsed(ground_truth: Json) -> Json:
    """Parse text that is JSON, as columns of tables often contain it."""
    if isinstance(ground_truth, str) and ground_truth.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(ground_truth)
        except ValueError:
            return ground_truth
    return ground_truth


def _steps(source: str) -> Iterable[CodeStep]:
    """Make each `assert` a check, and the statements between them steps; text without `assert` is one step."""
    statements = _statements(source)
    if not statements:
        raise DataError("the ground truth's test is empty. Repair the row.")
    if not any(isinstance(statement, ast.Assert) for statement in statements):
        yield CodeStep(kind="setup" if all(map(_only_defines, statements)) else "check", source=source)
        return
    for statement in statements:
        kind: StepKind = "setup" if _only_defines(statement) else "between"
        yield CodeStep(kind="check" if isinstance(statement, ast.Assert) else kind, source=ast.unparse(statement))


def _statements(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(
            f"the ground truth's test is not Python ({error}): {preview(source)}. Repair the row."
        ) from error


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
    return [line.rstrip() for line in text.rstrip().splitlines()]


log = structlog.get_logger(__name__)

FENCE = re.compile(r"^[ \t]*+```[ \t]*+([\w+-]*+)[ \t]*+\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON_NAMES = ("", "python", "py", "python3")


class StepOutcome(NamedTuple):
    """Outcome of one test.

    Attributes:
        failure: Why the test failed; empty if it passed.
        is_timed_out: True if the time ran out.
    """

    failure: str = ""
    is_timed_out: bool = False


@settings_record
class CodeReward:
    """1 if the response's program passes all of the row's tests, else 0; or the share of tests that it passes.

    The ground truth is a list of {"input", "output"}: the program runs once for each, and its output is compared
    outside the sandbox. Or it is text with `assert` statements, which run in a process that the program cannot inspect,
    and call the program's functions with plain data. The program is the last fenced block of Python.

    Components: `passed`, the share of tests passed (mode "all" stops at the first case that fails); `timed_out`, the
    share that ran out of time; `has_code`. The extras contain the first reason. A broken sandbox is a failure; a broken
    program gets 0.

    Attributes:
        mode: "all" gives 1 if every test passes, "share" gives the share.
        compare: How outputs are compared: "lines" ignores spaces at line ends, "tokens" all differences in spaces.
        checks: "outside" runs assertions in a separate process. "inside" runs them in the program's process, for rows
            that use its classes or pass it objects; a program can then search its interpreter and make them pass.
        total_s: Maximum seconds for all tests of a response; later tests count as timed out. Keep it below the scorer's
            timeout_s.
        limits: Limits of each run, by field of SandboxLimits.
        needs_fence: True accepts only a fenced block as a program.
        network: As in SandboxOptions.
        isolation: As in SandboxOptions.
        python: As in SandboxOptions.
        readable: As in SandboxOptions.
        max_concurrency: Maximum number of concurrent programs, whatever the scorer allows; None is the number of
            processors.
    """

    mode: Literal["all", "share"] = "all"
    compare: Literal["lines", "tokens"] = "lines"
    checks: Literal["outside", "inside"] = "outside"
    total_s: Annotated[float, Gt(0)] = 20.0
    limits: Mapping[str, float] = field(default_factory=dict)
    needs_fence: bool = False
    network: Literal["deny", "allow"] = "deny"
    isolation: Literal["strong", "any"] = "strong"
    python: str = ""
    readable: tuple[str, ...] = ()
    max_concurrency: PositiveInt | None = None
    sandbox: Sandbox = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options. Nothing runs yet."""
        known = [limit.name for limit in fields(SandboxLimits)]
        for name in sorted(set(self.limits) - set(known)):
            raise SettingsError(unknown_name("limit of reward 'code'", name, known))
        if self.limits.get("processes", 2) < 2:
            raise SettingsError(
                f"limits.processes of reward 'code' must be at least 2; found {self.limits['processes']}."
            )
        if self.max_concurrency is None:
            object.__setattr__(self, "max_concurrency", os.cpu_count() or 1)
        options = SandboxOptions(
            limits=SandboxLimits(**self.limits),  # type: ignore[arg-type]
            network=self.network,
            isolation=self.isolation,
            python=self.python,
            readable=self.readable,
        )
        object.__setattr__(self, "sandbox", Sandbox(options))

    async def rehearse(self, prompt: Prompt) -> None:
        """Check that a sandbox works, and read the first prompt's tests.

        Raises:
            SettingsError: No sandbox works here.
            DataError: The prompt has no tests.
        """
        if self.checks == "inside":
            log.warning(
                "reward_can_be_gamed", reward="code", checks="inside", reason="programs can see their assertions"
            )
        await self.sandbox.start()
        self._tests(prompt.ground_truth)

    async def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            DataError: The row has no valid tests.
            RoleError: The sandbox failed.
        """
        cases, steps = self._tests(given.ground_truth)
        num_tests = len(cases) + sum(step.kind == "check" for step in steps)
        program = program_of(given.final_text, needs_fence=self.needs_fence)
        if program is None:
            outcomes = [StepOutcome("the response has no program")]
        else:
            outcomes = await (self._run_cases(program, cases) if cases else self._run_steps(program, steps))
        num_tests = max(num_tests, len(outcomes))
        passed = sum(not outcome.failure for outcome in outcomes) / num_tests
        timed_out = sum(outcome.is_timed_out for outcome in outcomes) / num_tests
        failure = next((outcome.failure for outcome in outcomes if outcome.failure), "")
        return RewardResult(
            reward=passed if self.mode == "share" else float(passed == 1.0),
            components={"passed": passed, "timed_out": timed_out, "has_code": float(program is not None)},
            extras={"code_failure": failure} if failure else {},
        )

    def _tests(self, ground_truth: Json) -> tuple[list[Case], list[CodeStep]]:
        cases, steps = read_tests(ground_truth)
        if self.checks == "outside" and (name := class_of_program([step.source for step in steps])):
            raise DataError(
                f"the ground truth's tests use the program's class {name}, but its objects cannot leave its process: "
                f"tests can only call functions with plain data. {OBJECTS_ADVICE}"
            )
        return cases, steps

    async def _run_cases(self, program: str, cases: Sequence[Case]) -> list[StepOutcome]:
        outcomes: list[StepOutcome] = []
        ends_at = time.monotonic() + self.total_s
        for stdin, expected in cases:
            remaining_s = ends_at - time.monotonic()
            if remaining_s <= 0:
                late = StepOutcome(f"the {self.total_s:g} s for all tests ran out", is_timed_out=True)
                return outcomes + [late] * (len(cases) - len(outcomes))
            run = await self.sandbox.run(program, stdin=stdin.encode(), wall_s=remaining_s)
            printed = run.stdout.decode("utf-8", errors="replace")
            failure = describe_run(run)
            if run.is_success:
                is_same = same_output(printed, expected, compare=self.compare)
                failure = "" if is_same else f"printed {cut(printed, max_characters=200)!r}"
            outcomes.append(StepOutcome(failure, is_timed_out=is_timed_out(run)))
            if self.mode == "all" and failure:
                break
        return outcomes

    async def _run_steps(self, program: str, steps: Sequence[CodeStep]) -> list[StepOutcome]:
        word = secrets.token_hex(16)
        parts = (
            {"program": program, "is_inside": self.checks == "inside"},
            {"word": word, "steps": [step.source for step in steps]},
        )
        stdin = b"".join(len(part).to_bytes(8, "little") + part for part in (json.dumps(p).encode() for p in parts))
        runner = files("rl_rollout.rewards").joinpath("code_runner.py").read_text(encoding="utf-8")
        run = await self.sandbox.run(runner, stdin=stdin, wall_s=self.total_s)
        results: dict[Any, tuple[str, str]] = dict(_results(run.stdout, word))
        ended = results.get("load", ("passed", ""))
        if ended[0] == "passed":
            ended = ("ended", describe_run(run))
        outcomes = []
        for number, step in enumerate(steps):
            kind, reason = results.get(number, ended)
            if kind == "not_plain":
                raise DataError(f"a test passes the program {reason}: {preview(step.source)}. {OBJECTS_ADVICE}")
            if step.kind == "check" or (step.kind == "between" and kind != "passed"):
                failure = "" if kind == "passed" else cut(f"{step.source}: {reason}", max_characters=300)
                outcomes.append(StepOutcome(failure, is_timed_out=kind == "ended" and is_timed_out(run)))
        return outcomes


def program_of(response_text: str, *, needs_fence: bool) -> str | None:
    """Return the last block fenced as Python, else the last of no language, else the text unless needs_fence."""
    blocks = [(name.lower(), text) for name, text in FENCE.findall(response_text) if name.lower() in PYTHON_NAMES]
    named = [text for name, text in blocks if name]
    found = named or [text for _, text in blocks] or ([] if needs_fence else [response_text])
    return found[-1] if found and found[-1].strip() else None


def is_timed_out(run: ProgramRun) -> bool:
    """Return True if a time limit ended the program."""
    return run.ended == "wall_time" or run.exit_code == -24  # SIGXCPU


def describe_run(run: ProgramRun) -> str:
    """Return in one line why a program failed."""
    last = run.stderr.decode("utf-8", errors="replace").strip().splitlines()[-1:]
    how = (
        f"ended with exit code {run.exit_code}" if run.ended == "exited" else f"was killed at its limit on {run.ended}"
    )
    return cut(f"the program {how}{''.join(f': {line}' for line in last)}", max_characters=300)


def _results(stdout: bytes, word: str) -> Iterable[tuple[Any, tuple[str, str]]]:
    """Yield the runner's result of each step. Other output is ignored."""
    for line in stdout.decode("utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line.removeprefix(word)) if line.startswith(word) else None
            if isinstance(found, list) and len(found) == 3 and {*map(type, found)} <= {int, str}:
                yield found[0], (str(found[1]), str(found[2]))
