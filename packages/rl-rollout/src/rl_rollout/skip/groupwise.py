"""A skip cache for groups that are generated one by one: each entry has all groups of a step."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rl_rollout.rollout import GroupResult
from rl_rollout.skip.cache import SkipCache, StepRollouts, renamed
from rl_rollout.skip.entries import EntryKey
from rl_rollout.skip.fingerprint import RolloutOrigin


@dataclass(slots=True, kw_only=True)
class _Step:
    """A step in progress.

    Attributes:
        found: Its stored rollouts; None if its groups are generated.
        began: Its start, on the monotonic clock.
        seen: Indices of the groups requested so far.
        groups: Generated groups by index.
        num_served: Number of replayed groups.
        is_over: Set once the step is replayed, stored or given up.
    """

    found: "asyncio.Task[StepRollouts | None]"
    began: float = field(default_factory=time.monotonic)
    seen: set[int] = field(default_factory=set)
    groups: dict[int, GroupResult] = field(default_factory=dict)
    num_served: int = 0
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class GroupwiseCache:
    """Replays single groups from the entries of their steps, and stores a step once all its groups are generated.

    A group's place is its position, from 0, in the order of training: place p is in step p // groups_per_step + 1.
    Places are requested in ascending order. A replacement takes the place of the group that it replaces.
    """

    def __init__(
        self,
        cache: SkipCache,
        circumstances: Callable[[], Awaitable[RolloutOrigin]],
        *,
        groups_per_step: int,
        replaces_failed: bool,
        score_again: Callable[[Sequence[GroupResult]], Awaitable[Sequence[GroupResult]]] | None = None,
    ) -> None:
        """Set the cache.

        Args:
            cache: The cache of whole steps.
            circumstances: Returns the current circumstances. Their `source` is set, and their policy is a mapping.
            groups_per_step: Number of groups in each step.
            replaces_failed: True if another group replaces one whose sessions all failed.
            score_again: Scores replayed groups again.
        """
        self._cache = cache
        self._circumstances = circumstances
        self._groups_per_step = groups_per_step
        self._replaces_failed = replaces_failed
        self._score_again = score_again
        self._steps: dict[int, _Step] = {}
        self._given_up: set[int] = set()
        self._replaced: set[int] = set()

    async def find(self, place: int, uid: str) -> GroupResult | None:
        """Return the stored group of a place, with the uid of the prompt that it stands in for.

        Returns None if the group must be generated. Groups of the same step are returned in the order of the calls, and
        after those of earlier steps.

        Raises:
            CacheError: See `SkipCache.rollouts`.
        """
        number, index = self._where(place)
        key = EntryKey(step=number)
        if not self._cache.serves(key) or place in self._replaced or number in self._given_up:
            return None
        self._give_up_before(number)
        if number not in self._steps:
            self._steps[number] = _Step(found=asyncio.create_task(self._find(key)))
        step = self._steps[number]
        step.seen.add(index)
        found = await asyncio.shield(step.found)
        if found is None:
            return None
        step.num_served += 1
        if step.num_served >= self._groups_per_step:
            self._end(number)
        return renamed(found.groups[index], uid)

    async def settled(self, place: int, group: GroupResult, *, is_refused: bool, is_replayed: bool) -> None:
        """Note the outcome of a group before it is used; the last one of a step stores the step.

        Raises:
            CacheError: The step could not be stored.
        """
        number, index = self._where(place)
        is_replaced = is_refused or (self._replaces_failed and not group.trajectories)
        step = self._steps.get(number)
        if is_replayed and is_replaced:
            self._replaced.add(place)  # the entry has no other group for this place
        if is_replayed or is_replaced or step is None:
            return
        step.groups[index] = group
        if len(step.groups) < self._groups_per_step:
            return
        groups = tuple(step.groups[each] for each in range(self._groups_per_step))
        rollouts = StepRollouts(groups=groups, generate_s=time.monotonic() - step.began)
        circumstances = _with_versions(await self._circumstances(), groups)
        prompts = [each.prompt for each in groups]
        await asyncio.to_thread(self._cache.keep, EntryKey(step=number), rollouts, prompts, circumstances)
        self._end(number)

    def give_up_rest(self) -> None:
        """Report that the steps that lack groups are not stored, because the run ends."""
        for number, step in sorted(self._steps.items()):
            count = f"{len(step.groups)} of its {self._groups_per_step} groups"
            self._give_up(number, f"the run ended when {count} were generated", step.found)

    def _where(self, place: int) -> tuple[int, int]:
        return place // self._groups_per_step + 1, place % self._groups_per_step

    async def _find(self, key: EntryKey) -> StepRollouts | None:
        earlier = [step for number, step in self._steps.items() if number < key.step]
        await asyncio.gather(*(step.found for step in earlier))
        if self._cache.needs_earlier(key):
            await asyncio.gather(*(step.is_over.wait() for step in earlier))
        circumstances = await self._circumstances()
        found = await asyncio.to_thread(self._cache.find, key, (), circumstances)
        if found is None:
            return None
        if key.step in self._steps:
            self._steps[key.step].is_over.set()
        if self._score_again is None:
            return found
        return replace(found, groups=tuple(await self._score_again(found.groups)))

    def _give_up_before(self, number: int) -> None:
        """Wait no longer for earlier steps that lack groups: they were settled before this process started."""
        for earlier in [each for each in self._steps if each < number]:
            step = self._steps[earlier]
            if len(step.seen) == self._groups_per_step:
                continue
            self._end(earlier)
            count = f"{len(step.seen)} of its {self._groups_per_step} groups"
            reason = f"only {count} were generated after the rollouter's start"
            if step.found.done():
                self._give_up(earlier, reason, step.found)
            else:
                step.found.add_done_callback(partial(self._give_up, earlier, reason))

    def _give_up(self, number: int, reason: str, found: "asyncio.Task[StepRollouts | None]") -> None:
        """Store a step no more, unless it is replayed."""
        if found.done() and not found.cancelled() and found.exception() is None and found.result() is None:
            self._given_up.add(number)
            self._cache.give_up(EntryKey(step=number), reason)

    def _end(self, number: int) -> None:
        if number in self._steps:
            self._steps.pop(number).is_over.set()


def _with_versions(circumstances: RolloutOrigin, groups: Sequence[GroupResult]) -> RolloutOrigin:
    """Add the oldest and the newest policy version that sampled a token of the groups."""
    sampled = [row.policy_versions[row.loss_mask] for group in groups for row in group.trajectories]
    versions = [int(value) for each in sampled if len(each) for value in (each.min(), each.max())]
    policy = {**circumstances.policy, "versions": [min(versions), max(versions)] if versions else None}
    return replace(circumstances, policy=policy)
