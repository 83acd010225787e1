"""Equality of mathematical expressions by the math-verify library, in processes that can be stopped."""

import asyncio
import contextlib
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import IO, Any, NoReturn, cast

from rl_core.errors import DataError, DeadlineError, MissingExtraError, RoleError
from rl_rollout.rewards.protocol import RewardInput, RewardResult
from rl_rollout.rewards.rules import last_boxed

INTEGER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,300})")
START_TIMEOUT_S = 120.0


class MathVerify:
    r"""Reward 1 when the response's answer equals the ground truth as mathematics, else 0.

    The answer is what the last `\boxed{}` holds, else what math-verify finds in the response. One that
    takes longer than timeout_s counts as wrong, with the component `math_verify_timed_out` = 1. Worker
    processes start at the first use, and end with this process whatever happens to it.
    """

    def __init__(self, *, timeout_s: float = 3.0, num_workers: int = 2) -> None:
        """Check that the library is there; start nothing.

        Args:
            timeout_s: For each comparison.
            num_workers: Processes; each takes about 80 MB.

        Raises:
            MissingExtraError: math-verify is not installed.
        """
        if find_spec("math_verify") is None:
            raise MissingExtraError("math_verify needs math-verify. Install rl-rollout[math] as the README says.")
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="math-verify")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(timeout_s) for _ in range(num_workers)]
        for worker in self._workers:
            self._idle.put(worker)

    async def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response."""
        is_equal = await self.compare(str(given.ground_truth), answer_of(given.response_text))
        reward = float(is_equal or False)
        return RewardResult(
            reward=reward, components={"accuracy": reward, "math_verify_timed_out": float(is_equal is None)}
        )

    async def compare(self, gold: str, answer: str) -> bool | None:
        """Whether math-verify proves that an answer equals the gold one; None where it found no verdict in time.

        Raises:
            DataError: The gold answer is no expression.
            RoleError: The worker cannot start, or died.
        """
        if is_integer(gold) and is_integer(answer):
            return _integer(gold) == _integer(answer)
        return await asyncio.wrap_future(self._threads.submit(self._compare_in_worker, gold, answer))

    def close(self) -> None:
        """End the workers; can be called twice."""
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(wait=False)

    def _compare_in_worker(self, gold: str, answer: str) -> bool | None:
        worker = self._idle.get()
        try:
            reply = worker.ask({"gold": gold, "answer": answer})
        except DeadlineError:
            return None
        finally:
            self._idle.put(worker)
        if "error" in reply:
            raise RoleError(f"math-verify raised {reply['error']} on gold {gold!r} and answer {answer[:200]!r}.")
        if not reply["is_gold_parsed"]:
            raise DataError(f"math-verify finds no expression in the ground truth {gold!r}. Repair the row.")
        return bool(reply["is_equal"])


def answer_of(response_text: str) -> str:
    r"""The last `\boxed{}`'s content as LaTeX (a bare one when it is an integer), else the whole text."""
    boxed = last_boxed(response_text)
    if boxed is None:
        return response_text
    boxed = boxed.strip()
    return boxed if is_integer(boxed) else f"\\boxed{{{boxed}}}"


def is_integer(text: str) -> bool:
    """True for digits with a sign and thousands separators at most."""
    return INTEGER.fullmatch(text.strip()) is not None


def _integer(text: str) -> int:
    return int(text.strip().replace(",", ""))


class _Worker:
    """One process, started when asked and again after it died; used by one thread at a time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes]], _Worker] | None = None
        self._buffer = b""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            DeadlineError: The process took too long, and was ended.
            RoleError: It died by itself.
        """
        process = self._process if self._process is not None and self._process.poll() is None else self._start()
        try:
            stdin = cast(IO[bytes], process.stdin)
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            return self._read_line(process, timeout_s=self._timeout_s + 1.0)
        except BrokenPipeError as error:
            self.stop()
            raise RoleError("a math-verify worker ended before it took a request.") from error
        except (DeadlineError, RoleError):
            self.stop()
            raise

    def stop(self) -> None:
        """End the process, if there is one."""
        self._buffer = b""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _start(self) -> "subprocess.Popen[bytes]":
        self.stop()
        command = [sys.executable, "-P", "-W", "ignore", "-m", "rl_rollout.rewards.math_worker", str(self._timeout_s)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 (our own module)
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        self._read_line(process, timeout_s=START_TIMEOUT_S)
        return process

    def _read_line(self, process: "subprocess.Popen[bytes]", *, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        stdout = cast(IO[bytes], process.stdout)
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([stdout], [], [], max(deadline - time.monotonic(), 0.0))
            if not readable:
                raise DeadlineError(f"a math-verify worker gave no answer for {timeout_s:.1f} s.")
            received = os.read(stdout.fileno(), 1 << 16)
            if not received:
                _raise_ended(process, timeout_s=timeout_s)
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply


def _raise_ended(process: "subprocess.Popen[bytes]", *, timeout_s: float) -> NoReturn:
    exit_code = process.wait(timeout=10)
    if exit_code == -signal.SIGALRM:
        raise DeadlineError(f"a math-verify comparison was ended after {timeout_s - 1.0:.1f} s.")
    raise RoleError(f"a math-verify worker ended with exit code {exit_code}; its stderr says why.")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(timeout=10)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
