"""Skip caches on object stores: on fsspec's `memory://`, and on a store as simple as S3 that can fail."""

import asyncio
import threading
from collections.abc import Iterator
from uuid import uuid4

import fsspec
import pytest
from flat_store import FlatStore
from rl_rollout.skip.manifest import MANIFEST
from rl_rollout.skip.remote_folder import LEFT_AFTER_S
from rl_rollout.skip.store import open_folder
from skip_groups import assert_same_groups, make_groups, make_prompts_of

from rl_core.errors import BrokenEntryError, CacheError, MissingExtraError
from rl_rollout.skip import EntryKey, EntryStore, RolloutOrigin, SkipCache, SkipOptions

KEY, OTHER = EntryKey(step=7), EntryKey(step=8)
ORPHAN = f"{KEY.name}/arrays-{'0' * 16}"


@pytest.fixture(params=["flat", "memory"])
def url(request) -> Iterator[str]:
    FlatStore.reset()
    yield f"{request.param}://bucket-{uuid4().hex}/cache"
    FlatStore.reset()


@pytest.fixture
def flat() -> FlatStore:
    FlatStore.reset()
    return FlatStore()


FLAT = "flat://bucket/cache"


def write(store: EntryStore, key: EntryKey = KEY, *, seed: int = 1, replace: bool = False):
    return store.write(key, make_groups(seed=seed), fingerprint={"seed": seed}, generate_s=1.5, replace=replace)


def paths_below(url: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(url)
    return sorted(path.removeprefix(f"{root}/") for path in fs.find(root))


def put(url: str, path: str, content: bytes) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/{path}", content)


def chunk_of(url: str) -> str:
    return next(path for path in paths_below(url) if path.endswith("input_ids/c/0"))


def test_an_entry_comes_back_as_it_was_written(url):
    store = EntryStore(url)
    assert store.entries() == []
    assert not store.folder.exists()
    assert store.read(KEY) is None
    manifest = write(store)
    entry = EntryStore(url).read(KEY)
    assert_same_groups(entry.groups, make_groups(seed=1))
    assert entry.manifest == manifest
    assert store.entries() == [KEY]
    assert store.folder.exists()
    assert set(paths_below(url)) == {f"{KEY.name}/{path}" for path in (MANIFEST, *manifest.files())}


def test_a_url_with_slashes_at_its_end_is_the_same_place(url):
    write(EntryStore(f"{url}//"))
    assert EntryStore(url).entries() == [KEY]
    assert EntryStore(f"{url}/").folder.path_of(KEY.name) == f"{url}/{KEY.name}"


def test_the_first_writer_stays_and_nothing_of_the_second_is_left(url):
    store = EntryStore(url)
    write(store, seed=1)
    before = paths_below(url)
    assert write(store, seed=2) is None
    assert paths_below(url) == before
    assert_same_groups(store.read(KEY).groups, make_groups(seed=1))


def test_a_replaced_entry_is_the_new_one_whole_and_its_old_arrays_go(url):
    store = EntryStore(url)
    write(store, seed=1)
    manifest = write(store, seed=2, replace=True)
    assert_same_groups(store.read(KEY).groups, make_groups(seed=2))
    assert len(paths_below(url)) == 1 + len(manifest.files())


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


def test_a_writer_that_meets_another_at_the_last_moment_steps_back(flat):
    """Both writers see no manifest, and the store accepts only one of theirs."""
    store = EntryStore(FLAT)
    with store.folder.begin(KEY.name) as writer:
        writer.write("arrays-0/x", b"loser")
        writer._tree.has = lambda name: False
        write(store, seed=1)
        seen = iter([False, True])
        writer._tree.has = lambda name: next(seen)
        assert not writer.publish(b"{}", replace=False)
    assert_same_groups(store.read(KEY).groups, make_groups(seed=1))
    assert not any("arrays-0/" in path for path in paths_below(FLAT))


def test_a_store_that_cannot_put_only_where_there_is_none_still_stores(flat):
    FlatStore.knows_create = False
    assert write(EntryStore(FLAT)) is not None
    assert_same_groups(EntryStore(FLAT).read(KEY).groups, make_groups(seed=1))


def test_a_put_that_was_sent_twice_finds_itself(flat):
    store = EntryStore(FLAT)
    with store.folder.begin(KEY.name) as writer:
        put(FLAT, f"{KEY.name}/{MANIFEST}", b"mine")
        seen = iter([False, True])
        writer._tree.has = lambda name: next(seen)
        assert writer.publish(b"mine", replace=False)


def test_a_writer_that_dies_before_the_manifest_leaves_no_visible_entry(url):
    put(url, f"{ORPHAN}/input_ids/c/0", b"torn")
    store = EntryStore(url)
    assert store.entries() == []
    assert store.read(KEY) is None
    assert store.manifest(KEY) is None
    assert write(store) is not None
    assert_same_groups(store.read(KEY).groups, make_groups(seed=1))


def test_a_writer_whose_body_fails_leaves_nothing(url):
    def fail() -> None:
        with EntryStore(url).folder.begin(KEY.name) as writer:
            writer.write(f"arrays-{'1' * 16}/x/c/0", b"x")
            raise KeyError("stopped")

    with pytest.raises(KeyError):
        fail()
    assert paths_below(url) == []


@pytest.mark.parametrize("name", ["input_ids/c/0", "records/zarr.json", "offsets/c/0"])
def test_a_missing_object_is_named(url, name):
    store = EntryStore(url)
    manifest = write(store)
    fs, root = fsspec.core.url_to_fs(url)
    path = f"{KEY.name}/{manifest.arrays_folder}/{name}"
    fs.rm_file(f"{root}/{path}")
    with pytest.raises(BrokenEntryError, match="it is missing") as raised:
        store.read(KEY)
    assert raised.value.path == f"{url}/{path}"


def test_an_object_that_goes_between_listing_and_reading_is_named(flat):
    store = EntryStore(FLAT)
    write(store)
    with store.folder.open(KEY.name) as files:
        sizes = files.sizes()
        chunk = chunk_of(FLAT).removeprefix(f"{KEY.name}/")
        flat.rm_file(f"bucket/cache/{KEY.name}/{chunk}")
        with pytest.raises(BrokenEntryError, match="it is missing"):
            files.read(chunk, sizes[chunk])


@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b"x", lambda raw: b""])
def test_a_changed_size_is_refused(url, change):
    store = EntryStore(url)
    write(store)
    fs, root = fsspec.core.url_to_fs(url)
    chunk = chunk_of(url)
    size = len(fs.cat_file(f"{root}/{chunk}"))
    put(url, chunk, change(fs.cat_file(f"{root}/{chunk}")))
    with pytest.raises(BrokenEntryError, match=f"it must have {size} bytes"):
        store.read(KEY)
    with store.folder.open(KEY.name) as files, pytest.raises(BrokenEntryError, match=f"must have {size} bytes"):
        files.read(chunk.removeprefix(f"{KEY.name}/"), size)


def test_a_flipped_bit_is_refused(url):
    store = EntryStore(url)
    write(store)
    fs, root = fsspec.core.url_to_fs(url)
    chunk = chunk_of(url)
    raw = bytearray(fs.cat_file(f"{root}/{chunk}"))
    raw[len(raw) // 2] ^= 1
    put(url, chunk, bytes(raw))
    with pytest.raises(BrokenEntryError):
        store.read(KEY)


def test_markers_of_folders_and_the_prefix_itself_are_no_entries(flat):
    store = EntryStore(FLAT)
    write(store)
    FlatStore.markers |= {"bucket/cache", "bucket/cache/", f"bucket/cache/{KEY.name}/", "bucket/cache/broken/"}
    FlatStore.markers |= {f"bucket/cache/{OTHER.name}/", f"bucket/cache-two/{OTHER.name}/{MANIFEST}"}
    put("flat://bucket/cache-two", f"{OTHER.name}/{MANIFEST}", b"of a neighbour whose name begins the same")
    assert store.entries() == [KEY]
    assert store.folder.set_aside_sizes() == {}
    assert_same_groups(store.read(KEY).groups, make_groups(seed=1))


def test_a_url_that_names_an_object_has_no_entries(flat):
    put("flat://bucket", "cache", b"an object")
    assert EntryStore(FLAT).entries() == []
    assert not EntryStore(FLAT).folder.exists()


def test_an_object_of_unknown_size_is_refused(flat):
    store = EntryStore(FLAT)
    write(store)
    FlatStore.sizes_unknown.add(f"bucket/cache/{chunk_of(FLAT)}")
    with pytest.raises(BrokenEntryError, match="it must be a plain file of a known size"):
        store.read(KEY)


@pytest.mark.parametrize("operation", ["find", "info", "cat_file"])
def test_a_store_that_fails_is_no_broken_entry(flat, operation):
    store = EntryStore(FLAT)
    write(store)
    FlatStore.failing[operation] = ConnectionError("no route")
    with pytest.raises(CacheError, match=r"flat://bucket/cache.* cannot be .*: ConnectionError: no route") as raised:
        store.read(KEY) if operation != "find" else store.entries()
    assert not isinstance(raised.value, BrokenEntryError)
    FlatStore.failing.clear()
    assert store.entries() == [KEY]


@pytest.mark.parametrize("error", [PermissionError("denied"), RuntimeError("no credentials")])
def test_what_cannot_be_put_says_where(flat, error):
    FlatStore.failing["pipe_file"] = error
    with pytest.raises(CacheError, match=rf"flat://bucket/cache/{KEY.name}/arrays-\w+/\S+ cannot be stored: .*{error}"):
        write(EntryStore(FLAT))
    assert FlatStore.objects == {}


def test_what_cannot_be_removed_after_a_failure_hides_no_error(flat):
    FlatStore.failing |= {"pipe_file": ConnectionError("gone"), "rm_file": ConnectionError("gone too")}
    with pytest.raises(CacheError, match="cannot be stored"):
        write(EntryStore(FLAT))


def test_an_entry_set_aside_is_whole_below_broken_and_no_entry_any_more(url):
    store = EntryStore(url)
    manifest = write(store)
    write(store, OTHER)
    aside = store.folder.set_aside(KEY.name)
    assert aside.startswith(f"{url}/broken/{KEY.name}-")
    name = aside.rpartition("/")[2]
    below = {path.removeprefix(f"broken/{name}/") for path in paths_below(url) if path.startswith("broken/")}
    assert below == {MANIFEST, *manifest.files()}
    assert store.entries() == [OTHER]
    assert list(store.folder.set_aside_sizes()) == [name]
    assert store.folder.set_aside_sizes()[name] > manifest.size_bytes
    assert store.folder.set_aside(KEY.name) is None
    store.folder.remove_set_aside(name)
    assert store.folder.set_aside_sizes() == {}


def test_prune_takes_what_was_set_aside_and_then_the_oldest(url):
    store = EntryStore(url)
    keys = [EntryKey(step=step) for step in (3, 1, 2)]  # in order of creation
    for key in keys:
        write(store, key)
    write(store, OTHER)
    store.folder.set_aside(OTHER.name)
    with store.folder.open(keys[2].name) as files:
        room = sum(files.sizes().values())
    planned = store.by_age()[:-1]
    assert len(store.entries()) == 3
    assert store.prune(room) == planned
    assert [name.partition("-0")[0] for name, _ in planned] == ["broken/train", "train", "train"]
    assert [name for name, _ in planned[1:]] == [keys[0].name, keys[1].name]
    assert store.entries() == [keys[2]]
    assert_same_groups(store.read(keys[2]).groups, make_groups(seed=1))


def test_removing_an_entry_leaves_the_arrays_of_a_writer_at_work(url):
    store = EntryStore(url)
    write(store)
    put(url, f"{ORPHAN}/input_ids/c/0", b"at work")
    store.folder.remove(KEY.name)
    assert store.entries() == []
    assert paths_below(url) == [f"{ORPHAN}/input_ids/c/0"]


def test_arrays_that_no_manifest_names_are_left_over_once_they_are_old(flat):
    store = EntryStore(FLAT)
    manifest = write(store)
    alone = f"{OTHER.name}/arrays-{'a' * 16}"
    for path in (ORPHAN, alone):
        put(FLAT, f"{path}/input_ids/c/0", b"12345")
    assert store.folder.leftovers() == {}
    flat.age("arrays-", LEFT_AFTER_S + 60)
    put(FLAT, f"{alone}/records/c/0", b"a writer is at work")
    assert store.folder.leftovers() == {ORPHAN: 5}
    store.folder.remove_leftover(ORPHAN)
    store.folder.remove_leftover(alone)
    store.folder.remove_leftover(f"{KEY.name}/{manifest.arrays_folder}")
    flat.age(alone, LEFT_AFTER_S + 60)
    assert store.folder.leftovers() == {alone: 24}
    assert_same_groups(store.read(KEY).groups, make_groups(seed=1))


def test_arrays_below_a_broken_manifest_are_not_left_over(flat):
    store = EntryStore(FLAT)
    write(store)
    put(FLAT, f"{KEY.name}/{MANIFEST}", b"{torn")
    flat.age("", LEFT_AFTER_S + 60)
    assert store.folder.leftovers() == {}
    assert store.folder.set_aside(KEY.name) is not None
    assert not any(path.startswith(KEY.name) for path in paths_below(FLAT))


def test_names_that_are_patterns_remove_nothing_else(flat):
    store = EntryStore(FLAT)
    for name in ("x*", "x1", "x[12]"):
        put(FLAT, f"broken/{name}/{MANIFEST}", b"1")
    store.folder.remove_set_aside("x*")
    store.folder.remove_set_aside("x[12]")
    assert paths_below(FLAT) == [f"broken/x1/{MANIFEST}"]


@pytest.mark.parametrize("url", ["memory://a/*", "memory://a[1]/b", "flat://b/c?"])
def test_urls_that_are_patterns_are_refused(url):
    with pytest.raises(CacheError, match=r"must not contain"):
        open_folder(url)


def test_an_unknown_scheme_is_refused():
    with pytest.raises(CacheError, match=r"nosuch://x/y cannot be used for a skip cache"):
        open_folder("nosuch://x/y")


def test_a_scheme_whose_package_is_missing_is_named(monkeypatch):
    def missing(url, **kwargs):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(MissingExtraError, match="s3://x needs a package that is not installed: Install s3fs"):
        open_folder("s3://x")


def test_names_of_entries_take_one_listing_however_many_there_are(flat):
    store = EntryStore(FLAT)
    for step in range(1, 6):
        write(store, EntryKey(step=step))
    FlatStore.calls.clear()
    assert len(store.entries()) == 5
    assert FlatStore.calls == ["find"]


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
    chunk = chunk_of(url)
    put(url, chunk, b"torn")
    assert (run(), run(), num_generated) == (False, True, 2)
    assert events == ["skip_miss", "skip_stored", "skip_hit", "skip_broken", "skip_miss", "skip_stored", "skip_hit"]
    assert len(cache._store.folder.set_aside_sizes()) == 1
