"""Cause of a hang, found by following the waits between roles; pure functions of the roles' reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_core.cluster import RoleReport, Wait
from rl_metrics.hang.report import GroupRow
from rl_metrics.hang.stack_places import is_in_collective, place_of

GROUPS, QUEUE = "groups", "queue"
MAX_CHAINS = 5


def judge_hang(
    roles: Sequence[RoleReport], queue_stats: Mapping[str, float], groups: Sequence[GroupRow]
) -> tuple[str, tuple[str, ...]]:
    """Return who waits for whom, in words, and where these waits end.

    Follows each role's longest wait from role to role, until one that does not answer, is dead, computes, or depends on
    something outside the run. A circle of waits is a deadlock.

    Args:
        roles: Report of each role; the verdict starts with the first ones.
        queue_stats: `TransferQueue.stats`; empty if the queue did not answer.
        groups: Unfinished groups.

    Returns:
        The verdict in sentences, and the causes alone, most important first. Both say if no cause is known.
    """
    scene = _Scene(roles, queue_stats, groups)
    chains = _chains(scene)
    told = {name for chain in chains for name in chain.path}
    sentences = [chain.sentence for chain in chains]
    causes = [chain.cause for chain in chains]
    for role in roles:
        trouble = _trouble(role)
        if trouble and role.name not in told:
            sentences.append(f"{trouble}.")
            causes.append(trouble)
    for apart in _ranks_apart(roles).values():
        if apart not in causes:
            sentences.append(f"{apart}.")
            causes.append(apart)
    if not causes:
        unknown = "no role has a known wait, and all answer: see their stacks"
        return f"{unknown}.", (unknown,)
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences), tuple(dict.fromkeys(causes))


@dataclass(slots=True)
class _Chain:
    """Waits that depend on one another."""

    path: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    cause: str = ""
    is_merged: bool = False

    @property
    def sentence(self) -> str:
        return f"{'; '.join([*self.steps, self.cause])}."


@dataclass(frozen=True, slots=True)
class _Step:
    """One wait: its description, the next role, and without a next role the cause."""

    words: str
    next: RoleReport | None = None
    cause: str = ""


class _Scene:
    """The roles by name, the queue and the groups."""

    def __init__(
        self, roles: Sequence[RoleReport], queue_stats: Mapping[str, float], groups: Sequence[GroupRow]
    ) -> None:
        self.roles = roles
        self.queue_stats = queue_stats
        self.groups = groups
        self.apart = _ranks_apart(roles)

    def find(self, name: str) -> RoleReport | None:
        """Return a role by name; for the name of all its ranks, a rank in trouble, else the first."""
        for role in self.roles:
            if role.name == name:
                return role
        ranks = [role for role in self.roles if _base(role.name) == name]
        return next((rank for rank in ranks if _trouble(rank)), ranks[0] if ranks else None)

    def awaited_by(self, role: RoleReport) -> set[str]:
        """Return the roles that a role waits for, including those that hold a group for it."""
        steps = [self.step(role, wait).next for wait in role.waits]
        return {wait.on for wait in role.waits} | {one.name for one in steps if one is not None}

    def step(self, role: RoleReport, wait: Wait) -> _Step:
        words = f"{role.name} has waited {wait.since_s:.0f} s for {wait.what}"
        found = self.find(wait.on)
        if found is not None:
            return _Step(f"{words} from {found.name}", found)
        if wait.on == QUEUE and not self.queue_stats:
            return _Step(words, cause="the queue does not answer")
        if wait.on == QUEUE and self.queue_stats.get("waiting/put", 0.0) > 0:
            return self._room(role, words)
        if wait.on in (GROUPS, QUEUE):
            return self._ready(role, words)
        return _Step(
            f"{words} from {wait.on}", cause=f"{wait.on} has not answered {role.name} for {wait.since_s:.0f} s"
        )

    def _room(self, role: RoleReport, words: str) -> _Step:
        """Explain a wait for capacity of a full queue."""
        full = f"the queue is full ({self.queue_stats.get('rows', 0.0):.0f} rows)"
        others = [other for other in self.roles if other.name != role.name]
        for other in others:
            if other.leases:
                return _Step(f"{words}; {full}, and {other.name} has leased {len(other.leases)} of its groups", other)
        for other in others:
            if any(wait.on in (GROUPS, QUEUE) for wait in other.waits):
                return _Step(f"{words}; {full}, and {other.name}, which should lease groups, has none", other)
        return _Step(words, cause=f"{full}, and no role leases from it")

    def _ready(self, role: RoleReport, words: str) -> _Step:
        """Explain a wait for groups that are not ready."""
        unsettled = sorted((group for group in self.groups if group.missing), key=lambda group: -group.age_s)
        if unsettled:
            oldest = unsettled[0]
            words = f"{words} ({len(unsettled)} are not settled; the oldest, {_describe(oldest)})"
            return self._held(
                oldest, words, f"no role generates {oldest.uid}, which was issued {oldest.age_s:.0f} s ago"
            )
        settled = sorted((group for group in self.groups if group.state == "settled"), key=lambda one: -one.age_s)
        elsewhere = [group for group in settled if group.holder not in (None, role.name)]
        if elsewhere:
            return self._held(elsewhere[0], f"{words}; all are settled", "")
        if settled:
            return _Step(
                words,
                cause=f"{len(settled)} groups are settled and no role holds them: they lack columns, or {role.name} "
                f"does not lease them",
            )
        return _Step(words, cause="no group is in flight and none is issued: nothing can become ready")

    def _held(self, group: GroupRow, words: str, cause: str) -> _Step:
        if group.holder is None:
            return _Step(words, cause=cause)
        holder = self.find(group.holder)
        if holder is None:
            return _Step(words, cause=f"{group.uid} is held by {group.holder}, which is unknown")
        return _Step(f"{words}; {group.uid} is held by {holder.name}", holder)


def _chains(scene: _Scene) -> list[_Chain]:
    """Return the chains of waits, starting with roles that no other role waits for."""
    waiting = [role for role in scene.roles if role.waits and not _trouble(role)]
    awaited = {name for role in waiting for name in scene.awaited_by(role) if name != role.name}
    told: set[str] = set()
    chains: list[_Chain] = []
    for role in sorted(waiting, key=lambda one: one.name in awaited or _base(one.name) in awaited):
        if role.name in told or len(chains) == MAX_CHAINS:
            continue
        chain = _follow(scene, role, told)
        told |= set(chain.path)
        if not chain.is_merged:
            chains.append(chain)
    return chains


def _follow(scene: _Scene, start: RoleReport, told: set[str]) -> _Chain:
    chain, role = _Chain(), start
    while True:
        if role.name in told:
            chain.is_merged = True
            return chain
        if role.name in chain.path:
            chain.cause = _describe_circle(chain.path[chain.path.index(role.name) :])
            return chain
        chain.path.append(role.name)
        apart = scene.apart.get(_base(role.name), "")
        chain.cause = _trouble(role) or ("" if role.waits else apart or _describe_work(role))
        if chain.cause:
            return chain
        step = scene.step(role, max(role.waits, key=lambda wait: wait.since_s))
        chain.steps.append(step.words)
        if step.next is None:
            chain.cause = step.cause
            return chain
        role = step.next


def _trouble(role: RoleReport) -> str:
    """Return why a role cannot make progress; empty if it serves."""
    if not role.is_answering:
        place = place_of(role.stack)
        where = f", it is in {place}" if place else ""
        return f"{role.name} does not answer (for {role.since_s:.0f} s{where})"
    if role.state != "serving":
        return f"{role.name} is {role.state} (for {role.since_s:.0f} s)"
    return ""


def _describe_work(role: RoleReport) -> str:
    place = place_of(role.stack)
    doing = f"is in {place}" if place else "has no running call"
    return f"{role.name} answers, waits for no other role, and {doing}"


def _describe_circle(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"deadlock: {names[0]} waits for itself"
    pairs = zip(names, [*names[1:], names[0]], strict=True)
    return f"deadlock: {', '.join(f'{one} waits for {other}' for one, other in pairs)}"


def _describe(group: GroupRow) -> str:
    sessions = ", ".join(map(str, group.missing[:8]))
    more = " and more" if len(group.missing) > 8 else ""
    again = f", attempt {group.attempt}" if group.attempt > 1 else ""
    return f"{group.uid}, {group.age_s:.0f} s old{again}, lacks sessions {sessions}{more}"


def _base(name: str) -> str:
    return name.partition("[")[0]


def _ranks_apart(roles: Sequence[RoleReport]) -> dict[str, str]:
    """Return, for each role with ranks in a collective, where its other ranks are."""
    found: dict[str, str] = {}
    ranks_of: dict[str, list[RoleReport]] = {}
    for role in roles:
        if "[" in role.name and role.stack:
            ranks_of.setdefault(_base(role.name), []).append(role)
    for base, ranks in ranks_of.items():
        inside = [rank for rank in ranks if is_in_collective(rank.stack)]
        outside = [rank for rank in ranks if rank not in inside]
        if inside and outside:
            where = "; ".join(f"{one.name} is in {place_of(one.stack) or 'no call'}" for one in outside[:4])
            found[base] = (
                f"{inside[0].name} waits in a collective, {place_of(inside[0].stack)}, which not all ranks have "
                f"reached: {where}"
            )
        elif len({place_of(rank.stack, depth=1) for rank in inside}) > 1:
            where = "; ".join(f"{one.name} in {place_of(one.stack)}" for one in inside[:4])
            found[base] = f"deadlock: the ranks of {base} wait in different collectives: {where}"
    return found
