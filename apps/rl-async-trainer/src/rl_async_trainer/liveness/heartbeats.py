"""Heartbeats: every role is asked again and again; one that is silent for too long is killed, and then healed."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rl_core.cluster import Role
from rl_core.errors import DeadlineError, NotReadyError, RoleDiedError

MOST_S = 15.0
"""Longest time from an answer to the next question."""


class Link(Protocol):
    """The controller's end of a role."""

    @property
    def is_started(self) -> bool:
        """False while what is heavy in it starts: it may then be deaf for long."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Heart:
    """A role that is asked.

    Attributes:
        role: Its `report` is called.
        link: Knows whether it is started.
    """

    role: Role
    link: Link


class Heartbeats:
    """Asks roles what they do; for those in processes of their own.

    A process that is stopped, starved, or whose event loop hangs would otherwise be waited for until a deadline of the
    work itself, which is long.
    """

    def __init__(
        self,
        hearts: Mapping[str, Heart],
        *,
        deadline_s: float,
        say: Callable[..., None],
        progress: Callable[[str], None],
    ) -> None:
        """Ask nobody yet.

        Args:
            hearts: Who is asked, by name.
            deadline_s: Longest silence.
            say: Writes an event.
            progress: Told when a role has done something since it was asked last.
        """
        self._hearts = hearts
        self._deadline_s = deadline_s
        self._say = say
        self._progress = progress

    async def run(self) -> None:
        """Ask until this is cancelled."""
        await asyncio.gather(*(self._ask(name, heart) for name, heart in self._hearts.items()))

    async def _ask(self, name: str, heart: Heart) -> None:
        before: Mapping[str, float] = {}
        while True:
            await asyncio.sleep(min(MOST_S, self._deadline_s / 4))
            if not heart.link.is_started:
                continue
            incarnation = heart.role.incarnation
            try:
                view = await heart.role.call("report", deadline_s=self._deadline_s)
            except (RoleDiedError, NotReadyError):
                continue  # who works with it brings it back
            except DeadlineError:
                if heart.role.incarnation == incarnation and heart.link.is_started:
                    self._say("role_silent", role=name, silent_s=self._deadline_s)
                    await heart.role.fail(f"did not answer for {self._deadline_s:g} s, and was killed")
                continue
            if view.counts != before:
                before = view.counts
                self._progress(f"{name} works")
