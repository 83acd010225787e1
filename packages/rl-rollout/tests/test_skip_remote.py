"""Skip caches on object stores: on fsspec's `memory://`, and on a store as simple as S3 that can fail."""

import asyncio
import threading
from collections.abc import Iterator
from uuid import uuid4

import fsspec
import pytest
from flat_store import FlatStore
from skip_groups import assert_same_groups, make_groups, make_prompts_of

from rl_core.errors import BrokenEntryError, CacheError
from rl_core.files.array_entries import SUFFIX
from rl_rollout.skip import EntryKey, EntryStore, RolloutOrigin, SkipCache, SkipOptions

KEY, OTHER = EntryKey(step=7), EntryKey(step=8)
FLAT = "flat://bucket/cache"
OBJECT = f"bucket/cache/{KEY.name}{SUFFIX}"


@pytest.fixture(params=["flat", "memory"])
def url(request) -> Iterator[str]:
    FlatStore.reset()
    yield f"{request.param}://bucket-{uuid4().hex}/cache"
    FlatStore.reset()


@pytest.fixture
def flat() -> Iterator[FlatStore]:
    FlatStore.reset()
    yield FlatStore()
    FlatStore.reset()


def write(store: EntryStore, key: EntryKey = KEY, *, seed: int = 1, replace: bool = False):
    return store.write(key, make_groups(seed=seed), fingerprint={"seed": seed}, generate_s=1.5, replace=replace)


def paths_below(url: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(url)
    return sorted(path.removeprefix(f"{root}/") for path in fs.find(root))


def change(url: str, make) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    path = f"{root}/{KEY.name}{SUFFIX}"
    fs.pipe_file(path, make(fs.cat_file(path)))


def flipped(raw: bytes) -> bytes:
    return raw[:600] + bytes([raw[600] ^ 1]) + raw[601:]


def test_an_entry_is_one_object_and_comes_back_as_it_was_written(url):
    store = EntryStore(url)
    assert (store.entries(), store.folder.exists(), store.read(KEY)) == ([], False, None)
    size = write(store)
    entry = EntryStore(f"{url}//").read(KEY)
    assert_same_groups(entry.groups, make_groups(seed=1))
    assert (entry.size_bytes, entry.manifest.fingerprint) == (size, {"seed": 1})
    assert paths_below(url) == [f"{KEY.name}{SUFFIX}"]
    assert (store.entries(), store.folder.exists()) == ([KEY], True)
    assert EntryStore(f"{url}/").folder.path_of(KEY.name) == f"{url}/{KEY.name}{SUFFIX}"


def test_the_first_writer_stays_unless_it_is_replaced(url):
    store = EntryStore(url)
    write(store, seed=1)
    assert write(store, seed=2) is None
    assert_same_groups(store.read(KEY).groups, make_groups(seed=1))
    assert write(store, seed=2, replace=True) is not None
    assert_same_groups(store.read(KEY).groups, make_groups(seed=2))
    assert paths_below(url) == [f"{KEY.name}{SUFFIX}"]


@pytest.mark.parametrize("replace", [False, True])
def test_of_writers_at_once_one_wins_whole(url, replace):
    seeds = range(6)
    barrier = threading.Barrier(len(seeds))
    stored: dict[int, bool] = {}

    def run(seed: int) -> None:
        barrier.wait(timeout=30)
        stored[seed] = write(EntryStore(url), seed=seed, replace=replace) is not None

    threads = [threading.Thread(target=run, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    entry = EntryStore(url).read(KEY)
    winner = entry.manifest.fingerprint["seed"]
    assert_same_groups(entry.groups, make_groups(seed=winner))
    assert stored[winner]
    assert len(stored) == len(seeds)


CHANGES = {
    "cut": lambda raw: raw[:-1],
    "empty": lambda raw: b"",
    "flipped": flipped,
    "no zip": lambda raw: b"torn",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_object_is_broken(url, name):
    store = EntryStore(url)
    write(store)
    change(url, CHANGES[name])
    with pytest.raises(BrokenEntryError) as raised:
        store.read(KEY)
    assert raised.value.path.startswith(store.folder.path_of(KEY.name))


def test_markers_of_folders_and_the_prefix_itself_are_no_entries(flat):
    store = EntryStore(FLAT)
    write(store)
    FlatStore.markers |= {"bucket/cache/", "bucket/cache/broken/", f"bucket/cache/{OTHER.name}{SUFFIX}/"}
    flat.pipe_file(f"bucket/cache-two/{OTHER.name}{SUFFIX}", b"of a neighbour whose name begins the same")
    flat.pipe_file(f"bucket/cache/below/{OTHER.name}{SUFFIX}", b"of a folder below")
    assert store.entries() == [KEY]
    assert store.folder.broken() == {}
    assert_same_groups(store.read(KEY).groups, make_groups(seed=1))


def test_entries_of_an_earlier_format_are_refused_by_its_number(flat):
    flat.pipe_file(f"bucket/cache/{OTHER.name}/manifest.json", b"{}")
    with pytest.raises(CacheError, match=f"has entries of format 1, such as {OTHER.name}; this version reads format 2"):
        EntryStore(FLAT).entries()


def test_a_url_that_names_an_object_has_no_entries(flat):
    flat.pipe_file("bucket/cache", b"an object")
    assert EntryStore(FLAT).entries() == []
    write(EntryStore("flat://bucket/other"))
    assert EntryStore(f"flat://bucket/other/{KEY.name}{SUFFIX}").entries() == []


@pytest.mark.parametrize("operation", ["ls", "info", "cat_file"])
def test_a_store_that_fails_is_no_broken_entry(flat, operation):
    store = EntryStore(FLAT)
    write(store)
    FlatStore.failing[operation] = ConnectionError("no route")
    with pytest.raises(CacheError, match=r"bucket/cache.* cannot be .*: ConnectionError: no route") as raised:
        store.read(KEY) if operation != "ls" else store.entries()
    assert not isinstance(raised.value, BrokenEntryError)
    FlatStore.failing.clear()
    assert store.entries() == [KEY]


def test_an_object_of_unknown_size_cannot_be_read(flat):
    store = EntryStore(FLAT)
    write(store)
    FlatStore.sizes_unknown.add(OBJECT)
    with pytest.raises(CacheError, match="cannot be read"):
        store.read(KEY)
    assert store.folder.sizes() == {KEY.name: 0}


def test_an_object_that_goes_while_it_is_read_is_an_error_and_none_before(flat, monkeypatch):
    store = EntryStore(FLAT)
    write(store)

    def gone(self, path, **_):
        raise FileNotFoundError(path)

    monkeypatch.setattr(FlatStore, "cat_file", gone)
    with pytest.raises(CacheError, match="cannot be read: FileNotFoundError"):
        store.read(KEY)
    flat.rm_file(OBJECT)
    assert store.read(KEY) is None
    assert store.describe(KEY) is None


def test_an_entry_that_cannot_be_looked_up_is_not_written_over(flat):
    write(EntryStore(FLAT))
    before = dict(FlatStore.objects)
    FlatStore.failing["info"] = ConnectionError("no route")
    with pytest.raises(CacheError, match="could not be stored: ConnectionError: no route"):
        write(EntryStore(FLAT), seed=2)
    assert FlatStore.objects == before


@pytest.mark.parametrize("error", [PermissionError("denied"), RuntimeError("no credentials")])
def test_what_cannot_be_put_says_where(flat, error):
    FlatStore.failing["put_file"] = error
    with pytest.raises(CacheError, match=rf"{FLAT}/{KEY.name}\.zarr\.zip could not be stored: .*{error}"):
        write(EntryStore(FLAT))
    assert FlatStore.objects == {}


def test_an_entry_set_aside_is_whole_below_broken_and_no_entry_any_more(url):
    store = EntryStore(url)
    size = write(store)
    write(store, OTHER)
    aside = store.folder.set_aside(KEY.name)
    assert aside.startswith(f"{url}/broken/{KEY.name}-")
    (name,) = store.folder.broken()
    assert paths_below(url) == [f"broken/{name}{SUFFIX}", f"{OTHER.name}{SUFFIX}"]
    assert store.entries() == [OTHER]
    assert store.folder.broken() == {name: size}
    assert store.folder.set_aside(KEY.name) is None
    store.folder.remove(f"broken/{name}")
    assert store.folder.broken() == {}


def test_prune_takes_what_was_set_aside_and_then_the_oldest(url):
    store = EntryStore(url)
    keys = [EntryKey(step=step) for step in (3, 1, 2)]  # in order of creation
    room = [write(store, key) for key in keys][-1]
    write(store, OTHER)
    store.folder.set_aside(OTHER.name)
    planned = store.prune(room, is_dry_run=True)
    assert len(store.entries()) == 3
    assert store.prune(room) == planned
    assert [name.partition("-0")[0] for name, _ in planned] == ["broken/train", "train", "train"]
    assert [name for name, _ in planned[1:]] == [keys[0].name, keys[1].name]
    assert store.entries() == [keys[2]]
    assert_same_groups(store.read(keys[2]).groups, make_groups(seed=1))


def test_names_of_entries_take_few_listings_however_many_there_are(flat):
    store = EntryStore(FLAT)
    for step in range(1, 6):
        write(store, EntryKey(step=step))
    FlatStore.calls.clear()
    assert len(store.entries()) == 5
    assert set(FlatStore.calls) == {"ls"}
    assert len(FlatStore.calls) <= 2


def test_a_skip_cache_stores_replays_and_sets_aside_on_an_object_store(url):
    circumstances = RolloutOrigin(policy={"weights": "w"}, tokenizer="t", sampling={}, group_size=2, loop="l")
    groups = make_groups(seed=4)
    events: list[str] = []
    options = SkipOptions(enabled=True, directory=url)
    cache = SkipCache(options, on_event=lambda event, **fields: events.append(event))
    num_generated = 0

    async def generate():
        nonlocal num_generated
        num_generated += 1
        return groups

    def run():
        found = asyncio.run(cache.rollouts(KEY, make_prompts_of(groups), circumstances, generate))
        assert_same_groups(found.groups, groups)
        return found.is_replayed

    assert (run(), run(), num_generated) == (False, True, 1)
    change(url, flipped)
    assert (run(), run(), num_generated) == (False, True, 2)
    assert events == ["skip_miss", "skip_stored", "skip_hit", "skip_broken", "skip_miss", "skip_stored", "skip_hit"]
    assert len(cache._store.folder.broken()) == 1
