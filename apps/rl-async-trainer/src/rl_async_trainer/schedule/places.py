"""The place of each prompt in training, if groups train in the order of issue; a skip cache's steps consist of them."""

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush


class Places:
    """Numbers prompts from 0. A replacement takes the place of a group that failed or was refused."""

    def __init__(self, taken: Mapping[str, int]) -> None:
        """Continue after the places that earlier launches gave to groups that were not replaced."""
        self._of = dict(taken)
        used = set(self._of.values())
        self._next = max(used, default=-1) + 1
        self._vacant = sorted(set(range(self._next)) - used)

    def take(self, uids: Iterable[str]) -> dict[str, int]:
        """Return the place of each prompt; a new one gets the first vacant place, or else the next."""
        return {uid: self._of[uid] if uid in self._of else self._give(uid) for uid in uids}

    def vacate(self, uid: str) -> None:
        """Free the place of a group that will be replaced."""
        if uid in self._of:
            heappush(self._vacant, self._of.pop(uid))

    def _give(self, uid: str) -> int:
        if self._vacant:
            place = heappop(self._vacant)
        else:
            place, self._next = self._next, self._next + 1
        self._of[uid] = place
        return place
