"""Which life of a role one speaks to, and whether it was that one that died."""

import asyncio

from rl_core.cluster import Role
from rl_core.errors import DeadlineError, RoleDiedError

NEWS_DEADLINE_S = 60.0


def require_life(role: Role, life: int) -> None:
    """Refuse to speak to another life than the one that was started: it knows nothing yet.

    Raises:
        RoleDiedError: That one has ended.
    """
    if role.incarnation != life or role.state != "serving":
        raise role.death or RoleDiedError(f"{role.spec} died.", role=role.spec.name, rank=role.spec.rank)


def require_own_death(role: Role, error: RoleDiedError) -> None:
    """Raise an error that tells of another role's death, which this one only passed on."""
    if error.role not in (None, role.spec.name):
        raise error


async def next_life(role: Role, life: int, error: Exception) -> int:
    """Wait until a role that a call found dead is started again; gives the number of its new life.

    Args:
        role: Which.
        life: The number of the life that ended.
        error: What the call got.

    Raises:
        RoleDiedError: It is not started again.
        DeadlineError: Nobody noticed its death.
    """
    try:
        async with asyncio.timeout(NEWS_DEADLINE_S):
            while role.state == "serving" and role.incarnation == life:  # a call hears of a death before the role does
                await role.changed()
    except TimeoutError:
        raise DeadlineError(f"{role.spec} gave no answer as if it were dead, but runs on: {error}") from error
    while role.state == "restarting":  # its restarts are counted, and each has its deadline
        await role.changed()
    if role.state in ("dead", "closed"):
        raise role.death or error
    return role.incarnation
