"""The reader of write-ahead logs, compared with SQLite."""

import random
import shutil
import sqlite3
import struct

import pytest

from rl_core.queue.journal.wal import FRAME_HEADER, WAL_HEADER, _sums, read_wal

PAGE_BYTES = 512
FRAME_BYTES = FRAME_HEADER.size + PAGE_BYTES


def open_database(path):
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("CREATE TABLE IF NOT EXISTS rows (number INTEGER PRIMARY KEY, text BLOB)")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    return connection


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """Return a database without rows, and a log with one transaction per row, each of one or more pages."""
    folder = tmp_path_factory.mktemp("wal")
    connection = open_database(folder / "db")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for number in range(7):
        connection.execute("INSERT INTO rows VALUES (?, ?)", (number, b"x" * (number % 4 * 700)))
    content = (folder / "db").read_bytes(), (folder / "db-wal").read_bytes()
    connection.close()
    return content


def frames_of(log):
    """Return the end of each frame, and whether it commits a transaction."""
    ends = range(WAL_HEADER.size + FRAME_BYTES, len(log) + 1, FRAME_BYTES)
    return [(end, FRAME_HEADER.unpack_from(log, end - FRAME_BYTES)[1] != 0) for end in ends]


def rows_seen(folder, database, log):
    """Return the number of rows that SQLite reads."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "db").write_bytes(database)
    (folder / "db-wal").write_bytes(log)
    connection = sqlite3.connect(folder / "db")
    try:
        return connection.execute("SELECT count(*) FROM rows").fetchone()[0]
    finally:
        connection.close()


def report_of(folder, log):
    path = folder / "log"
    path.write_bytes(log)
    return read_wal(path)


def test_a_missing_log_and_an_empty_one_hold_nothing(tmp_path):
    assert read_wal(tmp_path / "none") == (0, 0)
    assert report_of(tmp_path, b"") == (0, 0)


def test_a_whole_log_has_every_transaction(tmp_path, database):
    assert report_of(tmp_path, database[1]) == (7, 0)
    assert rows_seen(tmp_path / "copy", *database) == 7
    assert len(frames_of(database[1])) > 14


def test_a_log_cut_at_any_frame_holds_what_sqlite_sees(tmp_path, database):
    log = database[1]
    for end, _ in [(WAL_HEADER.size, False), *frames_of(log)]:
        for length in (end - 1, end, end + 1, end + FRAME_HEADER.size, end + PAGE_BYTES):
            cut = log[:length]
            assert report_of(tmp_path, cut)[0] == rows_seen(tmp_path / "copy", database[0], cut), length


def test_bytes_after_the_last_whole_transaction_are_torn(tmp_path, database):
    log = database[1]
    commits = [end for end, is_commit in frames_of(log) if is_commit]
    for length in [*range(0, len(log), 37), *commits, len(log)]:
        whole = [end for end in commits if end <= length]
        kept = whole[-1] if whole else WAL_HEADER.size if length >= WAL_HEADER.size else 0
        assert report_of(tmp_path, log[:length]) == (len(whole), length - kept), length


def test_altered_bytes_end_the_log_where_sqlite_ends_it(tmp_path, database):
    rng = random.Random(0)
    for _ in range(150):
        log = bytearray(database[1])
        log[rng.randrange(len(log))] ^= 1 << rng.randrange(8)
        num_transactions, torn_bytes = report_of(tmp_path, bytes(log))
        assert num_transactions == rows_seen(tmp_path / "copy", database[0], bytes(log))
        assert 0 <= torn_bytes <= len(log)


def test_frames_of_an_earlier_turn_of_the_log_are_not_torn(tmp_path):
    connection = open_database(tmp_path / "db")
    for number in range(12):
        connection.execute("INSERT INTO rows VALUES (?, ?)", (number, b"x" * 900))
    connection.execute("PRAGMA wal_checkpoint(RESTART)")
    before = (tmp_path / "db").read_bytes()
    for number in range(12, 14):
        connection.execute("INSERT INTO rows VALUES (?, ?)", (number, b"y"))
    log = (tmp_path / "db-wal").read_bytes()
    connection.close()
    assert report_of(tmp_path, log) == (2, 0)
    assert rows_seen(tmp_path / "copy", before, log) == 14
    ends = [end for end, is_commit in frames_of(log)[:20] if is_commit]
    torn = log[: ends[1] - 10] + bytes(10) + log[ends[1] :]
    assert report_of(tmp_path, torn) == (1, ends[1] - ends[0])
    assert rows_seen(tmp_path / "copy", before, torn) == 13


def test_checksums_may_be_taken_in_the_other_byte_order(tmp_path, database):
    log = bytearray(database[1])
    magic = struct.unpack_from(">I", log)[0]
    order = "<" if magic & 1 else ">"
    struct.pack_into(">I", log, 0, magic ^ 1)
    sums = _sums((0, 0), bytes(log[:24]), order)
    struct.pack_into(">2I", log, 24, *sums)
    for end, _ in frames_of(log):
        start = end - FRAME_BYTES
        sums = _sums(
            _sums(sums, bytes(log[start : start + 8]), order), bytes(log[start + FRAME_HEADER.size : end]), order
        )
        struct.pack_into(">2I", log, start + 16, *sums)
    assert report_of(tmp_path, bytes(log)) == (7, 0)
    assert rows_seen(tmp_path / "copy", database[0], bytes(log)) == 7


@pytest.mark.parametrize("content", [b"\0" * 32, b"\xff" * 5000, b"SQLite format 3\0" * 100])
def test_what_is_no_log_holds_nothing(tmp_path, content):
    assert report_of(tmp_path, content) == (0, len(content))
