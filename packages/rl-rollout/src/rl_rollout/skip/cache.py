"""The skip cache: it stores new rollouts and replays stored ones instead of generating."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from rl_core.data import Json, Prompt
from rl_core.errors import BrokenEntryError, CacheError, CacheMismatchError
from rl_core.files.array_entries import EntryTooLargeError
from rl_core.images import ImageStore
from rl_core.record_fields import record
from rl_rollout.rollout import GroupResult
from rl_rollout.skip.entries import EntryKey, EntryStore, Manifest, StoredEntry
from rl_rollout.skip.fingerprint import (
    ESSENTIAL,
    Difference,
    RolloutOrigin,
    compare,
    make_fingerprint,
    unusable_parts,
)
from rl_rollout.skip.options import SkipOptions, StepSelection
from rl_rollout.skip.rows import TOKEN_DTYPES

log = structlog.get_logger(__name__)

MAX_SHOWN = 12
SEARCH_DEADLINE_S = 120.0
"""Maximum search time for an entry. The search repeats only while other processes remove the listed entries."""
TRAIN = "train"

OnEvent = Callable[..., None]
"""Receives an event's name and fields, for example `EventLog.write`."""
Generate = Callable[[], Awaitable[Sequence[GroupResult]]]


@record
class StepRollouts:
    """The rollouts of a step and their source.

    Attributes:
        groups: The generated or stored groups.
        source: Key of the entry from which they were loaded; None if they were generated now.
        load_s: Loading time in seconds; 0 if they were generated now.
        generate_s: Generation time in seconds; for replayed rollouts, that of the original generation.
        differences: Accepted differences between the entry's circumstances and the current ones.
    """

    groups: tuple[GroupResult, ...]
    source: EntryKey | None = None
    load_s: float = 0.0
    generate_s: float = 0.0
    differences: tuple[Difference, ...] = ()

    @property
    def is_replayed(self) -> bool:
        """True if the rollouts were loaded from an entry."""
        return self.source is not None


class SkipCache:
    """Serves the steps that its options select. Several runs may share its directory."""

    def __init__(
        self, options: SkipOptions, *, on_event: OnEvent | None = None, images: ImageStore | None = None
    ) -> None:
        """Open the directory and remove the leftovers of dead writers.

        Args:
            options: Options of the cache.
            on_event: Receives `skip_hit`, `skip_miss`, `skip_stored`, `skip_not_stored`, `skip_mismatch`, `skip_broken`
                and `skip_removed`. `size_bytes` is the size of an entry's file.
            images: The run's images; entries carry those of their rollouts, and replays put them there.

        Raises:
            SettingsError: An option has an invalid value.
            CacheError: The directory cannot be created or read.
            MissingExtraError: zarr or a package that the URL needs is not installed.
        """
        options.check()
        self._options = options
        self._steps = StepSelection.parse(options.steps)
        self._on_event = on_event or (lambda *_, **__: None)
        self._warned: set[str] = set()
        if options.enabled:  # a cache that is not needs no storage library, and serves nothing
            self._store = EntryStore(options.directory, compress=options.compress, images=images)
            self._store.folder.prepare()
            self._store.entries()

    def serves(self, key: EntryKey) -> bool:
        """Return True if the cache stores or replays rollouts of this key.

        Kinds other than "train" need the option `validation`. Step 0 (before the first step) counts as step 1.
        """
        is_kind = key.kind == TRAIN or self._options.validation
        return self._options.enabled and is_kind and (max(key.step, 1) in self._steps or self._repeats(key))

    def _repeats(self, key: EntryKey) -> bool:
        """Return True if the key only repeats earlier steps: a training step after the last one of `steps`."""
        return self._options.action == "repeat" and key.kind == TRAIN and key.step > self._steps.last

    def needs_earlier(self, key: EntryKey) -> bool:
        """Return True if the steps before the key must be stored before `find` can choose its entry."""
        return self._options.action == "repeat_last" or self._repeats(key)

    def _stored_as(self, key: EntryKey) -> EntryKey:
        """Return the key under which new rollouts of a key are stored.

        A step that repeats an earlier one is generated only if a kill, a limit or a broken file lost the entry of the
        earlier one; it then stores that entry.
        """
        if not self._repeats(key):
            return key
        return EntryKey(step=self._steps.repeated(key.step - self._steps.last - 1), part=key.part)

    async def rollouts(
        self, key: EntryKey, prompts: Sequence[Prompt], circumstances: RolloutOrigin, generate: Generate
    ) -> StepRollouts:
        """Return stored rollouts, or generate new ones and store them.

        Args:
            key: Key of the rollouts. Calls with different keys may overlap.
            prompts: Current prompts. A replay only compares them with the stored ones.
            circumstances: Current circumstances.
            generate: Generates the rollouts.

        Raises:
            CacheMismatchError: The entry's circumstances differ and `on_mismatch` is "error", or its columns differ.
            BrokenEntryError: The entry is broken and `on_broken` is "error".
            CacheError: New rollouts could not be stored, or every listed entry was removed before it could be opened.
            DataError: A prompt or a part of the circumstances is not JSON.
        """
        if not self.serves(key):
            return await _generated(generate)
        found = await asyncio.to_thread(self.find, key, prompts, circumstances)
        if found is not None:
            return found
        new = await _generated(generate)
        await asyncio.to_thread(self.keep, key, new, prompts, circumstances)
        return new

    def find(self, key: EntryKey, prompts: Sequence[Prompt], circumstances: RolloutOrigin) -> StepRollouts | None:
        """Return stored rollouts for a key; None if they must be generated. See `rollouts`."""
        live = make_fingerprint(circumstances, prompts, columns=TOKEN_DTYPES)
        started = time.perf_counter()
        while time.perf_counter() - started < SEARCH_DEADLINE_S:
            source = self._choose(key)
            if source is None:
                self._on_event("skip_miss", entry=key.name)
                return None
            try:
                manifest = self._store.describe(source)
                if manifest is None:
                    continue  # removed since it was chosen
                differences = self._differences(key, manifest, live)
                if differences is None:
                    return None
                entry = self._store.read(source)
            except BrokenEntryError as error:
                self._set_aside(source, error)
                continue
            if entry is not None:
                return self._replayed(key, entry, prompts, differences, load_s=time.perf_counter() - started)
        raise CacheError(
            f"no entry for {key.name} in {self._options.directory} could be opened within {SEARCH_DEADLINE_S:g} s; all "
            "were removed after they were listed. Check whether another process keeps removing entries, or whether the "
            "store lists deleted objects."
        )

    def _choose(self, key: EntryKey) -> EntryKey | None:
        """Return the key of the entry to replay: the step's own, or one of another step if the action allows it.

        Only training rollouts are taken from another step: a validation would report another policy's results.
        """
        entries, own = self._store.entries(), self._stored_as(key)
        if own in entries:
            return own
        stored = [each for each in entries if (each.kind, each.part) == (key.kind, 0)]
        if self._options.action != "repeat_last" or key.kind != TRAIN or not stored:
            return None
        # A broken entry counts as the newest, so that it is read and reported.
        newest = max(stored, key=lambda each: (self._store.created_at(each, if_broken=math.inf), each.step))
        source = EntryKey(step=newest.step, part=key.part)
        return source if source in entries else None

    def _differences(self, key: EntryKey, manifest: Manifest, live: dict[str, Json]) -> tuple[Difference, ...] | None:
        """Return the accepted differences; None if the step must be generated again."""
        is_strict = self._options.action == "cache" or key.kind != TRAIN
        parts = None if is_strict else ESSENTIAL
        unusable = unusable_parts(manifest, live) if key.kind == TRAIN else ()
        found = unusable + tuple(
            each
            for each in compare(manifest.fingerprint, live, parts=parts)
            if self._options.rewards == "stored" or not each.name.startswith("reward")
        )
        if not found:
            return ()
        shown = [str(difference) for difference in found]
        on_mismatch = self._options.on_mismatch
        if key.kind != TRAIN and on_mismatch == "accept":
            on_mismatch = "regenerate"  # never report another policy's validation as this one's
        self._on_event(
            "skip_mismatch", entry=manifest.key.name, wanted=key.name, differences=shown, on_mismatch=on_mismatch
        )
        is_usable = not unusable and not any(difference.name.startswith("columns") for difference in found)
        if on_mismatch == "regenerate":
            return None
        if on_mismatch == "accept" and is_usable:
            self._warn(manifest.key, found)
            return found
        rest = [f"and {len(shown) - MAX_SHOWN} more"] if len(shown) > MAX_SHOWN else []
        accept = '"accept" to train on them anyway or ' if is_usable else ""
        raise CacheMismatchError(
            f"{self._store.folder.path_of(manifest.key.name)} was generated with different inputs or settings:\n  "
            + "\n  ".join([*shown[:MAX_SHOWN], *rest])
            + f'\nSet rollout_cache.on_mismatch = {accept}"regenerate" to replace them, or choose another '
            "rollout_cache.directory."
        )

    def _warn(self, source: EntryKey, differences: Sequence[Difference]) -> None:
        """Log accepted differences, unless each of these names was logged before."""
        names = {difference.name for difference in differences}
        if not names <= self._warned:
            self._warned |= names
            shown = [str(difference) for difference in differences[:MAX_SHOWN]]
            log.warning("skip_mismatch_accepted", entry=source.name, differences=shown)

    def _replayed(
        self,
        key: EntryKey,
        entry: StoredEntry,
        prompts: Sequence[Prompt],
        differences: tuple[Difference, ...],
        *,
        load_s: float,
    ) -> StepRollouts:
        manifest, groups = entry.manifest, entry.groups
        is_own = manifest.key == key and [group.prompt.uid for group in groups] == [prompt.uid for prompt in prompts]
        if not is_own:
            suffix = f"-r{key.step}" + (f".{key.part}" if key.part else "")
            groups = tuple(renamed(group, f"{group.prompt.uid}{suffix}") for group in groups)
        self._on_event(
            "skip_hit",
            entry=manifest.key.name,
            wanted=key.name,
            size_bytes=entry.size_bytes,
            load_s=round(load_s, 4),
            generate_s=round(manifest.generate_s, 4),
        )
        return StepRollouts(
            groups=groups,
            source=manifest.key,
            load_s=load_s,
            generate_s=manifest.generate_s,
            differences=differences,
        )

    def keep(self, key: EntryKey, new: StepRollouts, prompts: Sequence[Prompt], circumstances: RolloutOrigin) -> None:
        """Store new rollouts of a key. See `rollouts`."""
        key = self._stored_as(key)
        live = make_fingerprint(circumstances, prompts, columns=TOKEN_DTYPES)
        if not any(group.trajectories for group in new.groups):
            self.give_up(key, "no session can train")
            return
        started = time.perf_counter()
        max_bytes = self._options.max_size_bytes
        try:
            size_bytes = self._store.write(
                key,
                new.groups,
                fingerprint=live,
                generate_s=new.generate_s,
                replace=key.kind != TRAIN or self._options.on_mismatch == "regenerate",
                max_bytes=max_bytes,
            )
        except EntryTooLargeError as error:
            self.give_up(key, str(error))
            log.warning("skip_entry_not_stored", reason=str(error))
            return
        if size_bytes is None:
            self.give_up(key, "another writer stored it first")
            return
        store_s = round(time.perf_counter() - started, 4)
        self._on_event("skip_stored", entry=key.name, size_bytes=size_bytes, store_s=store_s)
        if max_bytes is not None:
            for name, removed_bytes in self._store.prune(max_bytes - size_bytes, without={key.name}):
                self._on_event("skip_removed", entry=name, size_bytes=removed_bytes)

    def give_up(self, key: EntryKey, reason: str) -> None:
        """Report that a key's rollouts are not stored."""
        self._on_event("skip_not_stored", entry=key.name, reason=reason)

    def _set_aside(self, key: EntryKey, error: BrokenEntryError) -> None:
        """Report a broken entry, then move it to broken/, or raise the error if `on_broken` is "error"."""
        is_error = self._options.on_broken == "error"
        with suppress(BrokenEntryError):
            if not is_error and self._store.read(key) is not None:
                return  # another run replaced it while it was read
        aside = None if is_error else self._store.folder.set_aside(key.name)
        self._on_event("skip_broken", entry=key.name, path=error.path, reason=error.reason, set_aside_as=aside)
        log.warning("skip_entry_broken", path=error.path, reason=error.reason, set_aside_as=aside)
        if is_error:
            raise error


async def _generated(generate: Generate) -> StepRollouts:
    started = time.perf_counter()
    groups = await generate()
    return StepRollouts(groups=tuple(groups), generate_s=time.perf_counter() - started)


def renamed(group: GroupResult, uid: str) -> GroupResult:
    """Return the group with another uid: a run may replay the same entry several times."""
    sessions = tuple(
        replace(session, trajectories=tuple(replace(row, prompt_uid=uid) for row in session.trajectories))
        for session in group.sessions
    )
    return replace(group, prompt=replace(group.prompt, uid=uid), sessions=sessions)
