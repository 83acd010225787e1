"""The scheduler: which prompts start, which groups make a step, and when weights are published.

It is pure: no clock, no queue, no tensors. The controller reports events to it and carries out its decisions.
`simulate` and the replay of a recorded run use the same class.

The bound. Let B be the groups of a step, k the steps of a version (`sync_every`), G = k B, and s `max_staleness`. A
group started under version v may train until the learner's version is v + s: that is its deadline. Two
rules keep every group within it, so that no group is dropped for its age:

1. While version v is served, at most (v + s + 1) G groups have been started and not failed.
2. A step takes the ready groups with the earliest deadlines, and only if the others can still be trained in time. For
   each version w, at most (w + 1) G groups minus those already trained may have a deadline up to w. Otherwise the
   learner waits for the slow groups among them.

Rule 1 guarantees that rule 2 can always be satisfied by waiting. Dropping late groups would bias training towards short
responses. If engines serve older weights than reported, more groups may be ready than can be trained in time, and
waiting does not help. The step is then taken, and groups past their deadline are generated again.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rl_core.record_fields import settings_record


@settings_record
class ScheduleOptions:
    """What the schedule depends on.

    Attributes:
        groups_per_step: Groups that a step trains.
        num_steps: Steps of the run.
        max_staleness: Versions that a group's oldest token may be behind the weights that it trains.
        sync_every: Learner steps of one policy version.
        max_inflight_groups: Most groups generated at once; None leaves it to the bound of staleness.
    """

    groups_per_step: int
    num_steps: int
    max_staleness: int = 1
    sync_every: int = 1
    max_inflight_groups: int | None = None

    @property
    def is_on_policy(self) -> bool:
        """True where every step trains what the very weights of that step have generated."""
        return self.max_staleness == 0 and self.sync_every == 1

    @property
    def groups_per_version(self) -> int:
        """Groups that are trained in one version."""
        return self.groups_per_step * self.sync_every

    @property
    def num_groups(self) -> int:
        """Groups that the run trains."""
        return self.groups_per_step * self.num_steps

    def version_after(self, step: int) -> int:
        """Policy version of the weights after so many steps: that of the last update; the last step ends one."""
        return -(-step // self.sync_every) if step >= self.num_steps else step // self.sync_every


@dataclass(slots=True, kw_only=True)
class _Group:
    order: int
    deadline: int | None = None
    arrival: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blockage:
    """Why the learner has no step yet.

    Attributes:
        num_ready: Groups that are there.
        num_wanted: Groups of the step.
        awaited: Groups that must be in the step or in one soon after it, in the order in which they were started;
            empty where any others would do.
    """

    num_ready: int
    num_wanted: int
    awaited: tuple[str, ...]


@dataclass(slots=True)
class Scheduler:
    """See the module's words.

    Attributes:
        options: What it was made with.
        num_trained: Groups trained so far.
        num_spent: Groups that failed and are not replaced, because their step is on policy.
        num_steps: Steps done.
        served_version: Version that the engines serve.
    """

    options: ScheduleOptions
    num_trained: int = 0
    num_spent: int = 0
    num_steps: int = 0
    served_version: int = 0
    _groups: dict[str, _Group] = field(default_factory=dict)
    _waiting: deque[str] = field(default_factory=deque)
    _ready: list[tuple[int, int, str]] = field(default_factory=list)
    _inflight: dict[str, None] = field(default_factory=dict)
    _open: Counter[int] = field(default_factory=Counter)
    _forced: deque[tuple[str, ...]] = field(default_factory=deque)
    _unsaved: deque[dict[str, _Group]] = field(default_factory=deque)
    _num_issued: int = 0
    _num_arrived: int = 0

    # -- what happened

    def issued(self, uids: Iterable[str]) -> None:
        """Prompts were entered, in this order; they wait to be started."""
        for uid in uids:
            self._groups[uid] = _Group(order=self._num_issued)
            self._num_issued += 1
            self._waiting.append(uid)

    def passed_over(self, count: int) -> None:
        """Prompts that an earlier launch issued, and that are done with."""
        self._num_issued += count

    def order_of(self, uid: str) -> int:
        """A prompt's place in the order of issue, from 0."""
        return self._groups[uid].order

    def started(self, uids: Iterable[str]) -> None:
        """Waiting prompts were given to the rollouter, under the served version."""
        for uid in uids:
            self._waiting.remove(uid)
            self._inflight[uid] = None
            self._set_deadline(uid, self.served_version)

    def settled(self, uid: str, *, oldest_version: int | None) -> None:
        """A group is there, whole.

        Args:
            uid: Its prompt; it may be one that was settled by an earlier launch of the run.
            oldest_version: Of its tokens; None where no policy sampled them.
        """
        if uid in self._inflight:
            del self._inflight[uid]
        else:
            self._waiting.remove(uid)
        group = self._groups[uid]
        self._set_deadline(uid, self.served_version if oldest_version is None else oldest_version)
        group.arrival = self._num_arrived
        self._num_arrived += 1
        insort(self._ready, (group.deadline or 0, group.arrival, uid))

    def returned(self, uids: Iterable[str]) -> None:
        """Groups in flight were lost with who generated them; they wait to be started again, before all others."""
        lost = sorted(uids, key=lambda uid: self._groups[uid].order)
        for uid in reversed(lost):
            del self._inflight[uid]
            self._clear_deadline(uid)
            self._waiting.appendleft(uid)

    def failed(self, uid: str, *, is_refused: bool = False) -> None:
        """A group is gone: all its sessions failed, or a filter refused it.

        Another prompt takes its place, except where sessions failed on policy: there the step goes without it, as a
        synchronous one does. A step that was to be these very groups, and those after it, are made of what is there.
        """
        without = next((index for index, step in enumerate(self._forced) if uid in step), len(self._forced))
        while len(self._forced) > without:
            self._forced.pop()
        if uid in self._inflight:
            del self._inflight[uid]
        elif uid in self._waiting:
            self._waiting.remove(uid)
        else:
            self._ready.remove(self._entry(uid))
        self._clear_deadline(uid)
        del self._groups[uid]
        if self.options.is_on_policy and not is_refused:
            self.num_spent += 1

    def reissued(self, uid: str) -> None:
        """A ready group was thrown away, and is to be generated again."""
        self._ready.remove(self._entry(uid))
        self._clear_deadline(uid)
        self._groups[uid].arrival = None
        self._waiting.appendleft(uid)

    def trained(self, uids: Sequence[str]) -> None:
        """A step was done with these groups."""
        self._unsaved.append({})
        for uid in uids:
            self._ready.remove(self._entry(uid))
            deadline = self._groups[uid].deadline
            self._clear_deadline(uid)
            group = self._groups.pop(uid)
            group.deadline = deadline
            self._unsaved[-1][uid] = group
        if self._forced:
            self._forced.popleft()
        self.num_trained += len(uids)
        self.num_steps += 1

    def published(self, version: int) -> None:
        """The engines serve this version now."""
        self.served_version = version

    def saved(self, step: int) -> tuple[str, ...]:
        """A checkpoint has the first so many steps; gives the groups of those that no earlier one had."""
        kept: list[str] = []
        while len(self._unsaved) > self.num_steps - step:
            kept.extend(self._unsaved.popleft())
        return tuple(kept)

    @property
    def unsaved(self) -> tuple[str, ...]:
        """Groups that were trained, and that no checkpoint has."""
        return tuple(uid for step in self._unsaved for uid in step)

    def rewind(self) -> None:
        """The learner went back to its last checkpoint: the same groups are trained again, in the same steps."""
        while self._unsaved:
            step = self._unsaved.pop()
            for uid, group in step.items():
                self._groups[uid] = group
                deadline = group.deadline or 0
                self._open[deadline] += 1
                insort(self._ready, (deadline, group.arrival or 0, uid))
            self._forced.appendleft(tuple(step))
            self.num_trained -= len(step)
            self.num_steps -= 1

    def force(self, steps: Iterable[Sequence[str]]) -> None:
        """The next steps are these, whatever else is ready: a run that is resumed or replayed takes them again."""
        self._forced.extend(tuple(step) for step in steps)

    # -- what to do

    @property
    def learner_version(self) -> int:
        """Version of the weights that the next step trains."""
        return self.num_steps // self.options.sync_every

    @property
    def is_done(self) -> bool:
        """True when all steps are."""
        return self.num_steps >= self.options.num_steps

    @property
    def is_without_groups(self) -> bool:
        """True when every group of an on-policy step failed."""
        return not self.is_done and not self._forced and self._num_wanted() <= 0

    def is_open(self, uid: str) -> bool:
        """True for a group that is generated now, or waits to be."""
        return uid in self._inflight or uid in self._waiting

    @property
    def num_inflight(self) -> int:
        """Groups that are generated now."""
        return len(self._inflight)

    @property
    def num_ready(self) -> int:
        """Groups that are there and not trained."""
        return len(self._ready)

    @property
    def num_waiting(self) -> int:
        """Prompts that were issued and are not started."""
        return len(self._waiting)

    @property
    def inflight(self) -> tuple[str, ...]:
        """Groups that are generated now, in the order in which they were started."""
        return tuple(self._inflight)

    def num_to_start(self) -> int:
        """How many more prompts may be started now; those that wait come first, then new ones."""
        options = self.options
        horizon = (self.served_version + options.max_staleness + 1) * options.groups_per_version
        allowed = min(horizon, options.num_groups) - self._num_counted
        if options.max_inflight_groups is not None:
            allowed = min(allowed, options.max_inflight_groups - len(self._inflight))
        return max(allowed, 0)

    def to_start(self) -> tuple[list[str], int]:
        """Which waiting prompts to start now, and how many new ones to issue and start behind them."""
        count = self.num_to_start()
        waiting = [self._waiting[index] for index in range(min(count, len(self._waiting)))]
        return waiting, count - len(waiting)

    def next_step(self) -> tuple[str, ...] | None:
        """The groups of the next step in the order of issue, or None while it has to wait."""
        if self.is_done:
            return None
        if self._forced:
            step = self._forced[0]
            return step if all(self._is_ready(uid) for uid in step) else None
        wanted = self._num_wanted()
        if not wanted or len(self._ready) < wanted:
            return None
        chosen = self._ready[:wanted]
        if self._awaited(chosen):
            return None
        return tuple(sorted((uid for _, _, uid in chosen), key=lambda uid: self._groups[uid].order))

    def blockage(self) -> Blockage | None:
        """Why there is no next step; None when there is one, or none is wanted."""
        if self.is_done or self.next_step() is not None:
            return None
        if self._forced:
            step = self._forced[0]
            missing = tuple(uid for uid in step if not self._is_ready(uid))
            return Blockage(num_ready=len(step) - len(missing), num_wanted=len(step), awaited=missing)
        wanted = self._num_wanted()
        awaited = self._awaited(self._ready[:wanted])
        return Blockage(num_ready=len(self._ready), num_wanted=wanted, awaited=awaited)

    def stale(self) -> tuple[str, ...]:
        """Ready groups past their deadline: after a resume with other settings, or from engines with older weights."""
        return tuple(uid for deadline, _, uid in self._ready if deadline < self.learner_version)

    # -- inside

    @property
    def _num_counted(self) -> int:
        return self.num_trained + self.num_spent + len(self._ready) + len(self._inflight)

    def _num_wanted(self) -> int:
        """Groups of the next step: fewer where some of an on-policy step failed."""
        if not self.options.is_on_policy:
            return self.options.groups_per_step
        return (self.num_steps + 1) * self.options.groups_per_step - self.num_trained - self.num_spent

    def _awaited(self, chosen: Sequence[tuple[int, int, str]]) -> tuple[str, ...]:
        """Groups in flight that a step of these would leave too late."""
        late = self._first_late(chosen)
        if late is None:
            return ()
        return tuple(uid for uid in self._inflight if (self._groups[uid].deadline or 0) <= late)

    def _first_late(self, chosen: Sequence[tuple[int, int, str]]) -> int | None:
        """The first version whose groups could not all be trained in time after a step of these; None if all can."""
        left = self._open.copy()
        left.subtract(deadline for deadline, _, _ in chosen)
        trained = self.num_trained + self.num_spent + len(chosen)
        before = 0
        for deadline in sorted(left):
            before += left[deadline]
            capacity = min((deadline + 1) * self.options.groups_per_version, self.options.num_groups)
            if before and before > capacity - trained:
                return deadline
        return None

    def _is_ready(self, uid: str) -> bool:
        group = self._groups.get(uid)
        return group is not None and group.arrival is not None

    def _entry(self, uid: str) -> tuple[int, int, str]:
        group = self._groups[uid]
        return group.deadline or 0, group.arrival or 0, uid

    def _set_deadline(self, uid: str, version: int) -> None:
        self._clear_deadline(uid)
        group = self._groups[uid]
        group.deadline = version + self.options.max_staleness
        self._open[group.deadline] += 1

    def _clear_deadline(self, uid: str) -> None:
        group = self._groups[uid]
        if group.deadline is not None:
            self._open[group.deadline] -= 1
            if not self._open[group.deadline]:
                del self._open[group.deadline]
        group.deadline = None
