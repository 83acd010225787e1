"""probes.jsonl: the policy's alternatives at a few fixed tokens, at each validation."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import structlog

from rl_core import Trajectory
from rl_core.data import IntArray
from rl_core.errors import DataError
from rl_core.record_fields import record
from rl_metrics.run_files import JsonLinesWriter, read_json_lines
from rl_rollout.prompts import PromptTokenizer
from rl_rollout.rollouter import PolicyScores
from rl_trainer_parts.rollouts.answers import Answer, first_answers
from rl_trainer_parts.rollouts.inputs import named_tokens
from rl_trainer_parts.settings.schema import Settings

CANDIDATES = 5
"""Number of alternatives recorded."""

DEADLINE_S = 120.0
"""Maximum time for the probes; after a timeout there are no more."""

MAX_TOKENS = 2048
"""Maximum context of a probed token; longer ones are not probed."""

OCCURRENCES = 2
"""Maximum number of places at which a named token is probed."""

NAMED = re.compile(r".*/[0-9]+=(?P<token>[0-9]+)", re.DOTALL)
"""Pattern of the name of a probe of a named token."""

log = structlog.get_logger(__name__)


Score = Callable[[Sequence[IntArray], int], Awaitable[PolicyScores]]
"""Scores sequences with the current weights, and returns the top alternatives per token."""


@record
class TokenProbe:
    """A response token that is probed at every validation.

    Attributes:
        name: The problem's name and the token's position, and for a named token its id.
        ids: [T] tokens of prompt and response before the probed token.
        num_prompt_tokens: Number of prompt tokens in `ids`.
    """

    name: str
    ids: tuple[int, ...]
    num_prompt_tokens: int

    @property
    def position(self) -> int:
        """Position of the token in the response, from 0."""
        return len(self.ids) - self.num_prompt_tokens - 1

    @property
    def named(self) -> int | None:
        """Id of the named token; None if the token was chosen because it was uncertain."""
        match = NAMED.fullmatch(self.name)
        return None if match is None else int(match["token"])


class TokenProbes:
    """Chooses the least certain and the named tokens at a run's first validation, and probes them at every validation.

    A named token is probed where the first validation's responses have it, or else as the first token of a response. A
    resumed run continues with the tokens in the file. If the engine fails or takes too long, or the file cannot be
    written, one warning is logged and probing stops; the run continues.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: PromptTokenizer,
        *,
        count: int,
        named: Sequence[int] = (),
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Set the file, which is created with the first probe.

        Args:
            path: Path of probes.jsonl in the run's folder.
            tokenizer: The policy's tokenizer.
            count: Number of the least certain tokens to probe.
            named: Ids of further tokens to probe.
            deadline_s: Maximum time per validation.
        """
        self._path = path
        self._tokenizer = tokenizer
        self._count = count
        before = _read_probes(path)
        self._probes = [one for one in before if one.named is None][:count]
        self._named = tuple(dict.fromkeys(named))
        self._named_probes = [one for one in before if one.named in self._named]
        self._deadline_s = deadline_s
        self._is_off = count == 0 and not named

    @classmethod
    def of_run(cls, settings: Settings, folder: Path, tokenizer: PromptTokenizer) -> "TokenProbes":
        """The probes that the settings select, in a run's folder."""
        named, count = named_tokens(settings, tokenizer), settings.metrics.probes
        return cls(folder / "probes.jsonl", tokenizer, count=count, named=named)

    async def ask(self, score: Score, answers: Sequence[Answer], *, step: int) -> None:
        """Probe the chosen tokens and record the result.

        Args:
            score: Scores with the policy's current weights.
            answers: The validation's answers, from which a new run chooses its tokens; not those with images.
            step: Number of optimizer steps.
        """
        if self._is_off:
            return
        without_images = [answer for answer in answers if not answer.trajectory.images]
        asking = asyncio.ensure_future(self._ask(score, without_images, step=step))
        try:
            await asyncio.wait([asking], timeout=self._deadline_s)
        except asyncio.CancelledError:
            asking.cancel()
            raise
        if error := _error_of(asking, self._deadline_s):
            self._is_off = True
            log.warning("probes_failed", error=error)

    async def _ask(self, score: Score, answers: Sequence[Answer], *, step: int) -> None:
        if not self._probes:
            self._probes = await self._choose(score, answers)
        missing = [token for token in self._named if token not in {one.named for one in self._named_probes}]
        rows = _probeable(answers) if missing else []
        self._named_probes += [probe for token in missing for probe in _places_of(token, rows)]
        probes = [*self._probes, *self._named_probes]
        if not probes:
            return
        found = await score([np.asarray(one.ids, dtype=np.int32) for one in probes], CANDIDATES)
        if found.scores and not self._is_off:
            self._write(probes, found, step=step)

    async def _choose(self, score: Score, answers: Sequence[Answer]) -> list[TokenProbe]:
        """The least certain tokens of the first problems' responses, at most two per response."""
        rows = _probeable(answers)[: self._count]
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
        ranked.sort(key=lambda one: one[:2])  # the least certain token of each response first
        return [_probe_at(place, row) for _, _, row, place in ranked[: self._count]]

    def _write(self, probes: Sequence[TokenProbe], found: PolicyScores, *, step: int) -> None:
        writer = JsonLinesWriter(self._path)
        try:
            for probe, scores in zip(probes, found.scores, strict=True):
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


def _probeable(answers: Sequence[Answer]) -> list[Trajectory]:
    """First responses to the problems, without failed and long ones."""
    rows = [one.trajectory for one in first_answers(one for one in answers if one.failure is None)]
    return [row for row in rows if len(row.input_ids) <= MAX_TOKENS and row.loss_mask.any()]


def _places_of(token: int, rows: Sequence[Trajectory]) -> list[TokenProbe]:
    """Probes of a token in the first responses that have it, or else as the first token of a response."""
    places = [(row, np.flatnonzero(row.loss_mask & (row.input_ids == token))) for row in rows]
    found = [_probe_at(int(where[0]), row, named=token) for row, where in places if len(where)][:OCCURRENCES]
    return found or [_probe_at(row.num_prompt_tokens, row, named=token) for row in rows[:1]]


def _probe_at(place: int, row: Trajectory, *, named: int | None = None) -> TokenProbe:
    """The probe at one place of a trajectory: of its own token, or of another in its place."""
    name = f"{row.prompt_uid}/{place - row.num_prompt_tokens}"
    return TokenProbe(
        name=name if named is None else f"{name}={named}",
        ids=(*row.input_ids[:place].tolist(), int(row.input_ids[place]) if named is None else named),
        num_prompt_tokens=row.num_prompt_tokens,
    )


def _error_of(asking: "asyncio.Future[None]", deadline_s: float) -> str | None:
    """Why the probes failed; None if they succeeded.

    A call that takes too long is left running: cancelling it could break something that others need, such as the
    restart of a role that has died.
    """
    if not asking.done():
        asking.add_done_callback(lambda late: late.cancelled() or late.exception())
        return f"no answer within {deadline_s:g} s"
    if asking.cancelled():
        return "the call was cancelled"
    error = asking.exception()
    return None if error is None else f"{type(error).__name__}: {error}"


def _read_probes(path: Path) -> list[TokenProbe]:
    """Records in the file, in order; empty if it is missing, and without unreadable lines."""
    probes: dict[str, TokenProbe] = {}
    with suppress(OSError):
        for row in read_json_lines(path):
            with suppress(KeyError, DataError):
                probe = TokenProbe(name=row["probe"], ids=row["ids"], num_prompt_tokens=row["num_prompt_tokens"])
                is_whole = 0 < probe.num_prompt_tokens < len(probe.ids) <= MAX_TOKENS
                if is_whole and all(0 <= token < 2**31 for token in probe.ids):  # an engine takes no others
                    probes.setdefault(probe.name, probe)
    return list(probes.values())
