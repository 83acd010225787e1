"""Compares mathematical expressions with the math-verify library, in processes that can be killed."""

import asyncio
import re
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from importlib.util import find_spec

from rl_core.errors import DeadlineError, MissingExtraError
from rl_rollout.rewards.check_processes import CheckProcesses
from rl_rollout.rewards.protocol import RewardInput, RewardResult
from rl_rollout.rewards.rules import last_boxed

INTEGER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3}){1,100}|\d{1,300})")
POWER = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207b]+")
FRACTION = re.compile("(\\d{0,15})([\u00bc-\u00be\u2150-\u215e\u2189])")
MINUS = re.compile("[\u2212\ufe63\uff0d]|(?<![\\w.)])\u2013(?=\\d)")
EXPONENT = re.compile(r"(?<=\d)[eE]([-+]?\d{1,4})(?!\w)")
THOUSANDS = re.compile(r"(?<=\d)_(?=\d{3})")
WORKER = "rl_rollout.rewards.math_worker"


class MathVerify:
    r"""Reward 1 if the response's answer equals the ground truth mathematically, else 0.

    The answer is the content of the last `\boxed{}`, or else what math-verify finds in the response. A comparison that
    takes longer than timeout_s counts as wrong, with the component `math_verify_timed_out` = 1. Worker processes start
    at the first use and always end with this process.
    """

    def __init__(self, *, timeout_s: float = 3.0, num_workers: int = 2) -> None:
        """Check that the library is installed. No process starts yet.

        Args:
            timeout_s: Maximum seconds of one comparison.
            num_workers: Number of processes; each uses about 80 MB.

        Raises:
            MissingExtraError: math-verify is not installed.
        """
        if find_spec("math_verify") is None:
            raise MissingExtraError("math_verify needs math-verify. Install rl-rollout[math] as the README says.")
        self.max_concurrency = num_workers  # so that the scorer's timeout excludes waits for a process
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="math-verify")
        self._processes = CheckProcesses(WORKER, timeout_s=timeout_s, num_processes=num_workers)

    async def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response."""
        is_equal = await self.compare(str(given.ground_truth), answer_of(given.response_text))
        reward = float(is_equal or False)
        return RewardResult(
            reward=reward, components={"accuracy": reward, "math_verify_timed_out": float(is_equal is None)}
        )

    async def compare(self, gold: str, answer: str) -> bool | None:
        """Return whether math-verify proves that an answer equals the gold answer; None if there is no verdict in time.

        Raises:
            DataError: The gold answer is not an expression.
            RoleError: The worker cannot start, or died.
        """
        if is_integer(gold) and is_integer(answer):
            return _integer(gold) == _integer(answer)
        return await asyncio.wrap_future(self._threads.submit(self._compare_in_worker, gold, answer))

    def close(self) -> None:
        """Stop the workers. Can be called twice."""
        self._processes.close()
        self._threads.shutdown(wait=False)

    def _compare_in_worker(self, gold: str, answer: str) -> bool | None:
        try:
            verdict = self._processes.check({"gold": gold, "answer": answer})
        except DeadlineError:
            return None
        return None if verdict is None else bool(verdict["is_equal"])


def answer_of(response_text: str) -> str:
    r"""Return the content of the last `\boxed{}` as LaTeX, without the box for an integer, or else the whole text.

    Superscripts, fraction characters, exponents, underscores and typographic minuses are rewritten, because math-verify
    misreads them: it finds the answer 4 in `4²` and 1 in `1e4`.
    """
    boxed = last_boxed(response_text)
    if boxed is None:
        is_latex = "$" in response_text or "\\" in response_text
        return plain_scripts(response_text, power="^{%s}" if is_latex else "^%s")
    boxed = plain_scripts(boxed.strip(), power="^{%s}")
    return boxed if is_integer(boxed) else f"\\boxed{{{boxed}}}"


def plain_scripts(text: str, *, power: str) -> str:
    """Return a text with `4\u00b2` and `1e4` as powers in the given form, `3\u00bd` as 7/2, and `1_000` as 1000."""

    def fraction(match: re.Match[str]) -> str:
        value = Fraction(unicodedata.numeric(match[2])).limit_denominator(10)
        return f"{int(match[1] or 0) * value.denominator + value.numerator}/{value.denominator}"

    text = THOUSANDS.sub("", MINUS.sub("-", text))
    text = EXPONENT.sub(lambda match: f"*10{power % match[1]}", text)
    text = POWER.sub(lambda match: power % unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-"), text)
    return FRACTION.sub(fraction, text)


def is_integer(text: str) -> bool:
    """Return True for an integer, with an optional sign and thousands separators."""
    return INTEGER.fullmatch(text.strip()) is not None


def _integer(text: str) -> int:
    return int(text.strip().replace(",", ""))
