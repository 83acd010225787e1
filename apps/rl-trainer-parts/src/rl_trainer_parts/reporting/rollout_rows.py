"""rollouts.jsonl: which trajectories of a step are recorded, and with which fields."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from rl_core import Batch
from rl_core.data import ImageSpan, IntArray, Json
from rl_distill.teacher import TEACHER_PROMPT
from rl_metrics.run_files import FLOAT_COLUMNS, RolloutLog, RolloutRow
from rl_rollout.prompts import PromptTokenizer
from rl_trainer_parts.rollouts.image_texts import decode_shown, image_labels, prompt_and_response
from rl_trainer_parts.rollouts.setup import EXTRA, WORK, problem_id
from rl_trainer_parts.settings.schema import Settings

MAX_EXTRAS = 4096
"""Maximum number of characters of a trajectory's other extras."""

COLUMNS = {"versions": "policy_versions"} | {name: name for name in FLOAT_COLUMNS}
"""Columns of a batch by their name in the file."""

log = structlog.get_logger(__name__)


RolloutDraft = tuple[tuple[int, ...], RolloutRow]
"""A trajectory to record, without its texts, because the learner may not have a tokenizer."""


def draft_rollouts(settings: Settings, batch: Batch, *, step: int, version: int) -> list[RolloutDraft]:
    """Draft the records of some of a step's trajectories; see `choose_rows`.

    Args:
        settings: The run's settings.
        batch: The step's trained batch, with the update's per-token results.
        step: Step number, from 1.
        version: Policy version at the start of the step.
    """
    metrics = settings.metrics
    if not metrics.log_rollouts or not len(batch):
        return []
    chosen = choose_rows(
        batch,
        count=metrics.log_rollouts,
        max_tokens=metrics.log_rollout_tokens,
        seed=(settings.run.seed << 32) + step,
    )
    return list(draft_rows(batch.select(chosen), step=step, version=version))


def draft_rows(batch: Batch, *, step: int, version: int) -> Iterator[RolloutDraft]:
    """Draft the records of all rows; see `draft_rollouts`."""
    ids, mask = batch.ragged("input_ids"), batch.ragged("loss_mask")
    present = {name: batch.ragged(column) for name, column in COLUMNS.items() if column in batch}
    rewards = batch.dense("reward") if "reward" in batch else np.full(len(batch), np.nan)
    starts = batch.dense("num_prompt_tokens").tolist()
    rows = zip(batch.keys, batch.extras, batch.images, starts, strict=True)
    for index, (key, extras, images, start) in enumerate(rows):
        columns = {name: tuple(column[index][start:].tolist()) for name, column in present.items()}
        turns = RolloutRow.turns_in(extras)
        left_out = (EXTRA, TEACHER_PROMPT, "images", *(["turns"] if turns else []))
        row = RolloutRow(
            step=step,
            time=math.nan,
            prompt_uid=key.prompt_uid,
            session=key.session_index,
            output=key.output_index,
            prompt="",
            response="",
            reward=float(rewards[index]),
            policy_version=version,
            mask=tuple(mask[index][start:].tolist()),
            columns={"token_ids": tuple(ids[index][start:].tolist()), **columns},
            extras=bounded({name: value for name, value in extras.items() if name not in left_out}),
            turns=turns,
            images=images,
            **({"problem": problem_id(ids[index][:start])} | _record_fields(extras)),
        )
        yield tuple(ids[index][:start].tolist()), row


class RolloutWriter:
    """Adds texts to drafts and writes them. A failure causes one warning and never stops a run."""

    def __init__(self, path: Path, tokenizer: PromptTokenizer) -> None:
        """Set the file, which is created with the first trajectory.

        Args:
            path: Path of rollouts.jsonl in the run's folder.
            tokenizer: The policy's tokenizer.
        """
        self._path = path
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        self._label = image_labels(tokenizer)
        self._log: RolloutLog | None = None
        self._is_off = False
        self._held: list[RolloutDraft] = []

    def hold(self, drafts: Sequence[RolloutDraft]) -> None:
        """Keep trajectories of the current step until its others are written, or until the end."""
        self._held += drafts

    def write(self, drafts: Sequence[RolloutDraft]) -> None:
        """Write one step's trajectories."""
        drafts, self._held = [*drafts, *self._held], []
        if self._is_off or not drafts:
            return
        try:
            if self._log is None:
                self._log = RolloutLog(self._path)
            self._log.write(self._rows(drafts))
        except Exception as error:  # from the disk or the user's tokenizer
            log.warning("rollout_log_failed", path=str(self._path), error=f"{type(error).__name__}: {error}")
            self.close()

    def close(self) -> None:
        """Close the file and ignore later writes. Can be called twice."""
        if self._held and not self._is_off:
            self.write([])
        self._is_off = True
        if self._log is not None:
            self._log.close()
            self._log = None

    def _rows(self, drafts: Sequence[RolloutDraft]) -> list[RolloutRow]:
        sides = [
            prompt_and_response([*prompt_ids, *map(int, row.columns["token_ids"])], row.images, len(prompt_ids))
            for prompt_ids, row in drafts
        ]
        texts = decode_shown(self._tokenizer, [side for pair in sides for side in pair], skip_special_tokens=False)
        return [
            replace(row, prompt=prompt, response=response, tokens=self._texts(*sampled))
            for (_, row), (_, sampled), prompt, response in zip(drafts, sides, texts[::2], texts[1::2], strict=True)
        ]

    def _texts(self, ids: IntArray | Sequence[int], images: Sequence[ImageSpan]) -> tuple[str, ...]:
        """The text of each token on its own. An image's first token has the text of the image, and the others none."""
        new = [token for token in dict.fromkeys(ids) if token not in self._pieces]
        texts = self._tokenizer.decode([[token] for token in new], skip_special_tokens=False)
        self._pieces |= dict(zip(new, texts, strict=True))
        shown = [self._pieces[token] for token in ids]
        for span in images:
            shown[span.start : span.start + span.length] = [self._label(span.digest), *[""] * (span.length - 1)]
        return tuple(shown)


def choose_rows(batch: Batch, *, count: int, max_tokens: int, seed: int) -> list[int]:
    """Choose rows to record: the worst, the slowest, the best in the worst one's group, then random pairs.

    Each row brings along the other trajectories of its session, because a report shows them as a tree.

    Args:
        batch: A step's batch.
        count: Maximum number of rows.
        max_tokens: Maximum number of their tokens; at least one row is chosen.
        seed: Seed of the random choice.

    Returns:
        Row numbers in ascending order.
    """
    lengths = batch.ragged("input_ids").lengths - batch.dense("num_prompt_tokens")
    slowest = int(np.argmax([_took_s(extras) for extras in batch.extras]))
    first = [slowest]
    if "reward" in batch and not np.isnan(rewards := batch.dense("reward")).all():
        worst = int(np.nanargmin(rewards))
        group = np.flatnonzero(batch.keys.prompts == batch.keys.prompts[worst])
        first = [worst, slowest, int(group[np.nanargmax(rewards[group])])]
    drawn = np.argsort(np.random.Philox(key=seed % 2**64).random_raw(len(batch)), kind="stable")
    chosen: list[int] = []
    left = max_tokens
    for row in dict.fromkeys([*first, *_whole_sessions(batch, [*first, *_by_pairs(batch, drawn.tolist())])]):
        if len(chosen) == count:
            break
        if not chosen or lengths[row] <= left:
            chosen.append(row)
            left -= int(lengths[row])
    return sorted(chosen)


def _by_pairs(batch: Batch, drawn: Sequence[int]) -> Iterator[int]:
    """The rows in random order, each followed by another row of its group, because a report shows pairs."""
    prompts = batch.keys.prompts.tolist()
    waiting: dict[int, list[int]] = {}
    for row in reversed(drawn):
        waiting.setdefault(prompts[row], []).append(row)
    for row in drawn:
        of_group = waiting[prompts[row]]
        if of_group and of_group[-1] == row:
            yield of_group.pop()
            if of_group:
                yield of_group.pop()


def _whole_sessions(batch: Batch, rows: Sequence[int]) -> Iterator[int]:
    """Rows together with all rows of their sessions."""
    sessions = list(zip(batch.keys.prompts.tolist(), batch.keys.sessions.tolist(), strict=True))
    of_session: dict[tuple[int, int], list[int]] = {}
    for row, session in enumerate(sessions):
        of_session.setdefault(session, []).append(row)
    for row in rows:
        yield from of_session[sessions[row]]


def bounded(extras: Mapping[str, Json]) -> dict[str, Json]:
    """Extras limited to about `MAX_EXTRAS` characters of JSON; longer values are cut and become text."""
    written = {name: json.dumps(value, ensure_ascii=False) for name, value in extras.items()}
    kept: dict[str, Json] = {}
    left = MAX_EXTRAS
    for name in sorted(written, key=lambda name: len(written[name])):
        text, left = written[name], left - len(name)
        if left > 0:
            kept[name] = extras[name] if len(text) <= left else f"{text[:left]}... ({len(text):,} characters)"
        left -= len(text)
    return {name: kept[name] for name in extras if name in kept}


def _record_fields(extras: Mapping[str, Json]) -> dict[str, Any]:
    """The fields that `rollout_extras` added; empty for rows from a run that records no rollouts."""
    fields = extras.get(EXTRA)
    return fields if isinstance(fields, dict) else {}


def _took_s(extras: Mapping[str, Json]) -> float:
    """Seconds that a row's session took; 0 for rows from a run that records no rollouts."""
    timings = _record_fields(extras).get("timings", {})
    return math.fsum(timings.get(name, 0.0) for name in WORK)
