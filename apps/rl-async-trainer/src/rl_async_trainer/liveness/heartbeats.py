"""Heartbeats: every role is asked again and again; one that is silent for too long is killed, and then healed."""

import asyncio
from collections.abc import Callable, Mapping

from rl_core.cluster import Role
from rl_core.errors import DeadlineError, NotReadyError, RoleDiedError

MOST_S = 15.0
"""Longest time from an answer to the next question."""


async def ask_roles(
    roles: Mapping[str, Role],
    *,
    is_started: Callable[[str], bool],
    deadline_s: float,
    say: Callable[..., None],
    progress: Callable[[str], None],
) -> None:
    """Ask roles what they do, until this is cancelled; for those in processes of their own.

    A process that is stopped, starved, or whose event loop hangs would otherwise be waited for until a deadline of the
    work itself, which is long.

    Args:
        roles: Who is asked, by name.
        is_started: False of a role whose models are being loaded: it may then be deaf for long.
        deadline_s: Longest silence.
        say: Writes an event.
        progress: Told when a role has done something since it was asked last.
    """

    async def ask(name: str, role: Role) -> None:
        before: Mapping[str, float] = {}
        while True:
            await asyncio.sleep(min(MOST_S, deadline_s / 4))
            if not is_started(name):
                continue
            incarnation = role.incarnation
            try:
                view = await role.call("report", deadline_s=deadline_s)
            except (RoleDiedError, NotReadyError):
                continue  # who works with it brings it back
            except DeadlineError:
                if role.incarnation == incarnation and is_started(name):
                    say("role_silent", role=name, silent_s=deadline_s)
                    await role.fail(f"did not answer for {deadline_s:g} s, and was killed")
                continue
            if view.counts != before:
                before = view.counts
                progress(f"{name} works")

    await asyncio.gather(*(ask(name, role) for name, role in roles.items()))
