"""Heartbeats: every role is polled; one that is silent for too long is killed and restarted."""

import asyncio
from collections.abc import Callable, Mapping

from rl_core.cluster import Role
from rl_core.errors import DeadlineError, NotReadyError, RoleDiedError

MOST_S = 15.0
"""Maximum time between an answer and the next poll."""


async def ask_roles(
    roles: Mapping[str, Role],
    *,
    is_started: Callable[[str], bool],
    deadline_s: float,
    say: Callable[..., None],
    progress: Callable[[str], None],
) -> None:
    """Poll roles in separate processes until cancelled.

    Without this, a stopped or starved process, or one whose event loop hangs, would block until the much longer
    deadline of its work.

    Args:
        roles: Roles by name.
        is_started: False for a role whose models are loading: it may not answer for long.
        deadline_s: Maximum silence.
        say: Logs an event.
        progress: Called when a role has done something since the last poll.
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
                continue  # the link that calls it restarts it
            except DeadlineError:
                if role.incarnation == incarnation and is_started(name):
                    say("role_silent", role=name, silent_s=deadline_s)
                    await role.fail(f"did not answer for {deadline_s:g} s and was killed")
                continue
            if view.counts != before:
                before = view.counts
                progress(f"{name} works")

    await asyncio.gather(*(ask(name, role) for name, role in roles.items()))
