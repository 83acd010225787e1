"""probes.jsonl: what the policy thinks at a few tokens of known responses, once a validation."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from rl_core.data import IntArray
from rl_metrics.run_files import JsonLinesWriter, read_json_lines
from rl_rollout.prompts import PromptTokenizer
from rl_rollout.rollouter import PolicyScores
from rl_trainer_parts.rollouts.answers import Answer, first_answers

CANDIDATES = 5
"""Likeliest tokens that are written down."""

DEADLINE_S = 120.0
"""Longest wait for what the policy thinks; then nobody is asked any more."""

MAX_TOKENS = 2048
"""Tokens of a prompt and response up to the one that is asked about; longer ones are not probed."""

log = structlog.get_logger(__name__)


Score = Callable[[Sequence[IntArray], int], Awaitable[PolicyScores]]
"""Asks whoever has the policy's weights of now: sequences, and how many of the likeliest tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenProbe:
    """A token of a response, of which the policy is asked again and again.

    Attributes:
        name: Of the problem, and the token's place.
        ids: [T] tokens of the prompt and of the response, up to the token that is asked about.
        num_prompt_tokens: Of these, tokens of the prompt.
    """

    name: str
    ids: tuple[int, ...]
    num_prompt_tokens: int

    @property
    def position(self) -> int:
        """Of the token in the response, from 0."""
        return len(self.ids) - self.num_prompt_tokens - 1


class TokenProbes:
    """Chooses tokens at a run's first validation, those of which the policy is least sure, and asks at each one.

    A resumed run goes on with the tokens that it finds in the file. An engine that fails or takes too long, and a file
    that cannot be written, stop no run: one warning, and no probes from then on.
    """

    def __init__(self, path: Path, tokenizer: PromptTokenizer, *, count: int, deadline_s: float = DEADLINE_S) -> None:
        """Name the file; it is made with the first probe.

        Args:
            path: Such as `run/probes.jsonl`.
            tokenizer: Of the policy.
            count: Tokens that are asked about; 0 asks about none.
            deadline_s: Longest wait at one validation.
        """
        self._path = path
        self._tokenizer = tokenizer
        self._count = count
        self._probes = _read_probes(path)[:count]
        self._deadline_s = deadline_s
        self._is_off = count == 0

    async def ask(self, score: Score, answers: Sequence[Answer], *, step: int) -> None:
        """Ask about the chosen tokens, and write the answers down.

        Args:
            score: Asks an engine with the policy's weights of now.
            answers: Of the validation, from which a run's first probes are chosen.
            step: Optimizer steps done.
        """
        if self._is_off:
            return
        asking = asyncio.ensure_future(self._ask(score, answers, step=step))
        try:
            await asyncio.wait([asking], timeout=self._deadline_s)
        except asyncio.CancelledError:
            asking.cancel()
            raise
        error = _error_of(asking, self._deadline_s)
        if error is not None:
            self._is_off = True
            log.warning("probes_failed", error=error)

    async def _ask(self, score: Score, answers: Sequence[Answer], *, step: int) -> None:
        if not self._probes:
            self._probes = await self._choose(score, answers)
        if not self._probes:
            return
        found = await score([np.asarray(one.ids, dtype=np.int32) for one in self._probes], CANDIDATES)
        if found.scores and not self._is_off:
            self._write(found, step=step)

    async def _choose(self, score: Score, answers: Sequence[Answer]) -> list[TokenProbe]:
        """Of the first problems' responses, the tokens of which the policy is least sure, at most two of each."""
        rows = [one.trajectory for one in first_answers(one for one in answers if one.failure is None)]
        rows = [row for row in rows if len(row.input_ids) <= MAX_TOKENS and row.loss_mask.any()][: self._count]
        found = await score([row.input_ids for row in rows], 1) if rows else None
        if found is None or not found.scores:
            return []
        ranked = []
        for row, scores in zip(rows, found.scores, strict=True):
            sampled = np.flatnonzero(row.loss_mask)
            sampled = sampled[sampled > 0]
            likeliest = scores.logprobs[sampled, 1]
            for rank, place in enumerate(sampled[np.argsort(likeliest, kind="stable")][:2].tolist()):
                ranked.append((rank, float(scores.logprobs[place, 1]), row, place))
        ranked.sort(key=lambda one: one[:2])  # of each response its least sure token first
        return [
            TokenProbe(
                name=f"{row.prompt_uid}/{place - row.num_prompt_tokens}",
                ids=tuple(row.input_ids[: place + 1].tolist()),
                num_prompt_tokens=row.num_prompt_tokens,
            )
            for _, _, row, place in ranked[: self._count]
        ]

    def _write(self, found: PolicyScores, *, step: int) -> None:
        writer = JsonLinesWriter(self._path)
        try:
            for probe, scores in zip(self._probes, found.scores, strict=True):
                ids, logprobs = scores.token_ids[-1].tolist(), scores.logprobs[-1].tolist()
                sides = probe.ids[: probe.num_prompt_tokens], probe.ids[probe.num_prompt_tokens :]
                prompt, response = self._tokenizer.decode(sides, skip_special_tokens=False)
                tokens = self._tokenizer.decode([[token] for token in ids], skip_special_tokens=False)
                writer.append(
                    {
                        "step": step,
                        "policy_version": found.version,
                        "probe": probe.name,
                        "prompt": prompt,
                        "response": response,
                        "position": probe.position,
                        "token": tokens[0],
                        "logprob": logprobs[0],
                        "candidates": list(zip(tokens[1:], logprobs[1:], strict=True)),
                        "ids": probe.ids,
                        "num_prompt_tokens": probe.num_prompt_tokens,
                    }
                )
        finally:
            writer.close()


def _error_of(asking: "asyncio.Future[None]", deadline_s: float) -> str | None:
    """Why nothing was learnt; None where something was.

    What takes too long is left to itself: to cancel it might break off something that others need, such as the restart
    of a role that died meanwhile.
    """
    if not asking.done():
        asking.add_done_callback(lambda late: late.cancelled() or late.exception())
        return f"no answer within {deadline_s:g} s"
    if asking.cancelled():
        return "who was asked gave up"
    error = asking.exception()
    return None if error is None else f"{type(error).__name__}: {error}"


def _read_probes(path: Path) -> list[TokenProbe]:
    """Those of the file, in their order; none where it is missing, and no line that holds none."""
    probes: dict[str, TokenProbe] = {}
    try:
        for row in read_json_lines(path):
            probe = _probe_of(row)
            if probe is not None:
                probes.setdefault(probe.name, probe)
    except OSError:
        return []
    return list(probes.values())


def _probe_of(row: Mapping[str, Any]) -> TokenProbe | None:
    name, ids, num_prompt_tokens = row.get("probe"), row.get("ids"), row.get("num_prompt_tokens")
    if not isinstance(name, str) or not isinstance(ids, list) or type(num_prompt_tokens) is not int:
        return None
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        return None
    if not 0 < num_prompt_tokens < len(ids) <= MAX_TOKENS:
        return None
    return TokenProbe(name=name, ids=tuple(ids), num_prompt_tokens=num_prompt_tokens)
