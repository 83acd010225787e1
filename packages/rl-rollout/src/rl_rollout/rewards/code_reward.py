"""Reward for programs: runs a response's program against the row's tests, in a sandbox."""

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from importlib.resources import files
from typing import Any, Literal

import structlog

from rl_core.data import Prompt
from rl_core.errors import DataError, SettingsError
from rl_core.registry import nearest_name
from rl_rollout.rewards.code_tests import Case, Step, read_tests, same_output
from rl_rollout.rewards.outputs import cut, preview
from rl_rollout.rewards.protocol import RewardInput, RewardResult
from rl_rollout.sandbox import ProgramRun, Sandbox, SandboxLimits, SandboxOptions

log = structlog.get_logger(__name__)

FENCE = re.compile(r"^[ \t]*+```[ \t]*+([\w+-]*+)[ \t]*+\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON_NAMES = ("", "python", "py", "python3")
RUNNER, PEER = "code_runner.py", "code_peer.py"
OUT_OF_TIME = ("wall_time",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one test.

    Attributes:
        is_passed: True if the program did what the test expects.
        is_timed_out: True if the time ran out.
        reason: Why the test failed.
    """

    is_passed: bool
    is_timed_out: bool = False
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CodeReward:
    """1 if the response's program passes all of the row's tests, else 0; or the share of tests that it passes.

    The ground truth is a list of {"input", "output"}: the program runs once for each, and its output is compared
    outside the sandbox. Or it is text with `assert` statements, which run in a process that the program cannot inspect;
    functions that they call run in the program's process and return plain data. The program is the last fenced block of
    Python.

    Components: `passed`, the share of tests passed (mode "all" stops at the first case that fails); `timed_out`, the
    share that ran out of time; `has_code`. The extras contain the first reason. A broken sandbox is a failure; a broken
    program gets 0.

    Attributes:
        mode: "all" gives 1 if every test passes, "share" gives the share.
        compare: How outputs are compared: "lines" ignores spaces at line ends, "tokens" all differences in spaces.
        checks: "outside" runs assertions in a separate process. "inside" runs them in the program's process, for rows
            whose assertions pass it more than plain data; a program can then search its interpreter and make them pass.
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
    total_s: float = 20.0
    limits: dict[str, float] = field(default_factory=dict)
    needs_fence: bool = False
    network: Literal["deny", "allow"] = "deny"
    isolation: Literal["strong", "any"] = "strong"
    python: str = ""
    readable: tuple[str, ...] = ()
    max_concurrency: int | None = None
    sandbox: Sandbox = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options. Nothing runs yet."""
        for name, known in (
            ("mode", ("all", "share")),
            ("compare", ("lines", "tokens")),
            ("checks", ("outside", "inside")),
            ("network", ("deny", "allow")),
            ("isolation", ("strong", "any")),
        ):
            if getattr(self, name) not in known:
                raise SettingsError(f"{name} of reward 'code' must be one of {known}; found {getattr(self, name)!r}.")
        if not self.total_s > 0:
            raise SettingsError(f"total_s of reward 'code' must be above 0; found {self.total_s!r}.")
        limits = [limit.name for limit in fields(SandboxLimits)]
        for name in sorted(set(self.limits) - set(limits)):
            raise SettingsError(
                f"limits of reward 'code' have no {name!r}.{nearest_name(name, limits)} Known: {', '.join(limits)}."
            )
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
            readable=tuple(self.readable),
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
        read_tests(prompt.ground_truth)

    async def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            DataError: The row has no valid tests.
            RoleError: The sandbox failed.
        """
        cases, steps = read_tests(given.ground_truth)
        num_tests = len(cases) + sum(step.kind == "check" for step in steps)
        program = program_of(given.final_text, needs_fence=self.needs_fence)
        if program is None:
            outcomes = [Outcome(is_passed=False, reason="the response has no program")]
        else:
            outcomes = await (self._run_cases(program, cases) if cases else self._run_steps(program, steps))
        num_tests = max(num_tests, len(outcomes))
        passed = sum(outcome.is_passed for outcome in outcomes) / num_tests
        timed_out = sum(outcome.is_timed_out for outcome in outcomes) / num_tests
        reason = next((outcome.reason for outcome in outcomes if not outcome.is_passed), "")
        return RewardResult(
            reward=passed if self.mode == "share" else float(passed == 1.0),
            components={"passed": passed, "timed_out": timed_out, "has_code": float(program is not None)},
            extras={"code_failure": reason} if reason else {},
        )

    async def _run_cases(self, program: str, cases: Sequence[Case]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        ends_at = time.monotonic() + self.total_s
        for given, expected in cases:
            remaining_s = ends_at - time.monotonic()
            if remaining_s <= 0:
                late = Outcome(
                    is_passed=False, is_timed_out=True, reason=f"the {self.total_s:g} s for all tests ran out"
                )
                return outcomes + [late] * (len(cases) - len(outcomes))
            outcomes.append(
                self._outcome(await self.sandbox.run(program, stdin=given.encode(), wall_s=remaining_s), expected)
            )
            if self.mode == "all" and not outcomes[-1].is_passed:
                break
        return outcomes

    def _outcome(self, run: ProgramRun, expected: str) -> Outcome:
        if not run.is_success:
            return Outcome(is_passed=False, is_timed_out=is_timed_out(run), reason=describe_run(run))
        printed = run.stdout.decode("utf-8", errors="replace")
        if same_output(printed, expected, compare=self.compare):
            return Outcome(is_passed=True)
        return Outcome(is_passed=False, reason=f"printed {cut(printed, max_characters=200)!r}")

    async def _run_steps(self, program: str, steps: Sequence[Step]) -> list[Outcome]:
        word = secrets.token_hex(16)
        parts = (
            {"program": program, "is_inside": self.checks == "inside"},
            {"word": word, "steps": [step.source for step in steps]},
        )
        stdin = b"".join(len(part).to_bytes(8, "little") + part for part in (json.dumps(p).encode() for p in parts))
        run = await self.sandbox.run(_source(RUNNER), stdin=stdin, files={PEER: _source(PEER)}, wall_s=self.total_s)
        found: dict[Any, tuple[str, str]] = dict(_results(run.stdout, word))
        ended = found.get("load", ("passed", ""))
        if ended[0] == "passed":
            ended = ("ended", describe_run(run))
        outcomes = []
        for number, step in enumerate(steps):
            kind, said = found.get(number, ended)
            if kind == "not_plain" and self.checks == "outside":
                raise DataError(
                    f"a test passes the program {said}, which is not plain data: {preview(step.source)}. Repair the "
                    'row, or set checks = "inside", which lets programs see their tests.'
                )
            if step.kind == "check" or (step.kind == "between" and kind != "passed"):
                timed_out = kind == "ended" and is_timed_out(run)
                reason = "" if kind == "passed" else cut(f"{step.source}: {said}", max_characters=300)
                outcomes.append(Outcome(is_passed=kind == "passed", is_timed_out=timed_out, reason=reason))
        return outcomes


def program_of(response_text: str, *, needs_fence: bool) -> str | None:
    """Return the last block fenced as Python, else the last of no language, else the text unless needs_fence."""
    blocks = [(name.lower(), text) for name, text in FENCE.findall(response_text) if name.lower() in PYTHON_NAMES]
    named = [text for name, text in blocks if name]
    found = named or [text for _, text in blocks] or ([] if needs_fence else [response_text])
    return found[-1] if found and found[-1].strip() else None


def is_timed_out(run: ProgramRun) -> bool:
    """Return True if a time limit ended the program."""
    return run.ended in OUT_OF_TIME or run.exit_code == -24  # SIGXCPU


def describe_run(run: ProgramRun) -> str:
    """Return in one line why a program failed."""
    last = run.stderr.decode("utf-8", errors="replace").strip().splitlines()[-1:]
    how = (
        f"ended with exit code {run.exit_code}" if run.ended == "exited" else f"was killed at its limit on {run.ended}"
    )
    return cut(f"the program {how}{''.join(f': {line}' for line in last)}", max_characters=300)


def _source(name: str) -> str:
    return files("rl_rollout.rewards").joinpath(name).read_text(encoding="utf-8")


def _results(stdout: bytes, word: str) -> Iterable[tuple[Any, tuple[str, str]]]:
    """Yield the runner's result of each step. Other output is ignored."""
    for line in stdout.decode("utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line.removeprefix(word)) if line.startswith(word) else None
            if isinstance(found, list) and len(found) == 3 and {*map(type, found)} <= {int, str}:
                yield found[0], (str(found[1]), str(found[2]))
