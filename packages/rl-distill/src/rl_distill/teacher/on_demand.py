"""A teacher that starts when it is first asked: where all of its scores are stored, no process of it ever runs."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import SettingsError
from rl_distill.teacher.protocol import Teacher
from rl_distill.teacher.scores import TeacherRow, TeacherScores


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What a model folder says of a teacher that has not started.

    Attributes:
        vocab_size: Its token ids are below this.
        hidden_size: Width of its hidden states.
        max_tokens: Positions that it has.
    """

    vocab_size: int
    hidden_size: int
    max_tokens: int


def model_traits(folder: Path) -> ModelTraits:
    """Read what a folder's `config.json` says.

    Raises:
        SettingsError: It cannot be read, or lacks one of the three.
    """
    names = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "max_tokens": "max_position_embeddings"}
    try:
        config = json.loads((folder / "config.json").read_text())
        found = {ours: config[theirs] for ours, theirs in names.items()}
        if not all(type(value) is int and value > 0 for value in found.values()):
            raise ValueError(f"they must be whole numbers of at least 1; found {found}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise SettingsError(
            f"{folder / 'config.json'} must say {', '.join(names.values())} of a teacher with stored scores "
            f"({type(error).__name__}: {error})."
        ) from None
    return ModelTraits(**found)


class OnDemandTeacher:
    """A `Teacher` in front of another, which is started, or woken, by the first `score` that needs it."""

    def __init__(self, teacher: Teacher, traits: ModelTraits) -> None:
        """Take a teacher that is not started.

        Args:
            teacher: Closed with this.
            traits: What is known of it before it starts.
        """
        self._teacher = teacher
        self._traits = traits
        self._lock = asyncio.Lock()
        self._is_started = False
        self._is_awake = False

    @property
    def is_started(self) -> bool:
        """True once somebody asked it."""
        return self._is_started

    @property
    def name(self) -> str:
        """See `Teacher.name`."""
        return self._teacher.name

    @property
    def num_replicas(self) -> int:
        """See `Teacher.num_replicas`."""
        return self._teacher.num_replicas

    @property
    def at_once(self) -> int:
        """See `Teacher.at_once`."""
        return self._teacher.at_once

    @property
    def max_tokens(self) -> int:
        """See `Teacher.max_tokens`."""
        return self._teacher.max_tokens if self._is_started else self._traits.max_tokens

    @property
    def vocab_size(self) -> int:
        """See `Teacher.vocab_size`."""
        return self._teacher.vocab_size if self._is_started else self._traits.vocab_size

    @property
    def hidden_size(self) -> int | None:
        """See `Teacher.hidden_size`."""
        return self._teacher.hidden_size if self._is_started else self._traits.hidden_size

    @property
    def num_restarts(self) -> int:
        """See `Teacher.num_restarts`."""
        return self._teacher.num_restarts

    @property
    def busy_s(self) -> float:
        """See `Teacher.busy_s`."""
        return self._teacher.busy_s

    async def start(self) -> None:
        """Nothing: `score` starts it."""

    async def score(self, rows: Sequence[TeacherRow]) -> list[TeacherScores]:
        """See `Teacher.score`; starts or wakes it where it has to."""
        async with self._lock:
            if not self._is_started:
                await self._teacher.start()
                self._is_started = self._is_awake = True
            elif not self._is_awake:
                await self._teacher.wake()
                self._is_awake = True
        return await self._teacher.score(rows)

    async def wake(self) -> None:
        """Nothing: `score` wakes it."""

    async def sleep(self) -> None:
        """See `Teacher.sleep`."""
        async with self._lock:
            if self._is_awake:
                self._is_awake = False
                await self._teacher.sleep()

    async def close(self) -> None:
        """See `Teacher.close`."""
        await self._teacher.close()
