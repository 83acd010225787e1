"""Hostile journals, refused before any of their content is executed, awaited or trusted."""

import os
import shutil
import sqlite3
import subprocess
import sys

import pytest

from rl_core import InProcessQueue, QueueOptions, TaskSpec
from rl_core.errors import DataError, JournalError
from rl_core.queue.group import MAX_SESSIONS
from rl_core.queue.journal.database import DATABASE
from rl_core.queue.journal.inspection import inspect_journal
from rl_core.testing import make_prompts, make_trajectory

TRAIN = TaskSpec(name="train", needs=frozenset({"reward"}))
TRIGGER = "CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM groups; END"
HIGHEST = (1 << 63) - 1


def open_queue(directory):
    return InProcessQueue([TRAIN], options=QueueOptions(directory=directory))


@pytest.fixture
def directory(tmp_path):
    queue = open_queue(tmp_path / "queue")
    queue.issue(make_prompts(3), num_sessions=2)
    queue.put("p0", 0, [make_trajectory("p0", 0)])
    queue.close()
    return tmp_path / "queue"


def alter(directory, *statements):
    connection = sqlite3.connect(directory / DATABASE)
    connection.execute("PRAGMA writable_schema = ON")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def with_record(field, value):
    return f"UPDATE groups SET record = CAST(json_set(record, '$.{field}', {value}) AS BLOB)"


@pytest.mark.parametrize(
    "statement",
    [
        TRIGGER,
        TRIGGER.replace("INSERT ON meta", "UPDATE ON groups"),
        "CREATE VIEW endless AS WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n FROM c",
        "CREATE INDEX slow ON groups (state)",
        "ALTER TABLE groups ADD COLUMN twice GENERATED ALWAYS AS (state || state)",
        "CREATE TABLE others (a)",
        "UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '') WHERE name = 'groups'",
    ],
)
def test_a_journal_whose_schema_is_not_ours_is_refused_and_left_alone(directory, statement):
    alter(directory, statement)
    before = (directory / DATABASE).read_bytes()
    with pytest.raises(JournalError, match="differ from the schema"):
        open_queue(directory)
    with pytest.raises(JournalError, match="differ from the schema"):
        inspect_journal(directory)
    assert (directory / DATABASE).read_bytes() == before


@pytest.mark.parametrize(
    "statement",
    [
        with_record("num_sessions", 10**12),
        with_record("num_sessions", 0),
        with_record("attempt", -5),
        with_record("settled", "json_object('99999999999999999999', 'a')"),
        with_record("acked", f"json_object('train', {HIGHEST})"),
        f"UPDATE groups SET number = {HIGHEST} WHERE uid = 'p2'",
        "UPDATE groups SET number = -1 WHERE uid = 'p0'",
        f"UPDATE segments SET number = {HIGHEST}",
        "UPDATE groups SET record = CAST(printf('%.*c', 200000, '[') AS BLOB)",
        "UPDATE groups SET prompt = 5",
        "UPDATE segments SET place = 'text'",
        "UPDATE meta SET value = 1000000000000 WHERE key = 'format'",
        "UPDATE meta SET value = CAST(printf('%.*c', 5000, '9') AS BLOB) WHERE key = 'format'",
        f"UPDATE meta SET value = CAST('{HIGHEST}' AS BLOB) WHERE key = 'epoch'",
        "UPDATE meta SET value = CAST('[5]' AS BLOB) WHERE key = 'tasks'",
        "UPDATE meta SET value = CAST('{\"policy_version\":1e999}' AS BLOB) WHERE key = 'counts'",
    ],
)
def test_records_that_cannot_be_are_refused(directory, statement):
    alter(directory, statement)
    with pytest.raises(JournalError):
        open_queue(directory)
    if "'epoch'" not in statement and "prompt" not in statement:  # inspection ignores these fields
        with pytest.raises(JournalError):
            inspect_journal(directory)


def test_a_pipe_in_place_of_a_file_is_refused_at_once(directory, tmp_path):
    folders = [tmp_path / name for name in ("queue", "wal", "shm", "journal")]
    for folder in folders[1:]:
        shutil.copytree(directory, folder)
    for folder, suffix in zip(folders, ("", "-wal", "-shm", "-journal"), strict=True):
        path = folder / f"{DATABASE}{suffix}"
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    code = (
        "import sys; from itertools import product; from pathlib import Path; from rl_core.errors import JournalError\n"
        "from rl_core.queue.journal.inspection import inspect_journal\n"
        "from rl_core import InProcessQueue, QueueOptions, TaskSpec\n"
        "task = TaskSpec(name='train', needs=frozenset({'reward'}))\n"
        "reads = inspect_journal, lambda d: InProcessQueue([task], options=QueueOptions(directory=d))\n"
        "for folder, read in product(sys.argv[1:], reads):\n"
        "    try: read(Path(folder))\n"
        "    except JournalError as error: assert 'must be a regular file' in str(error), error\n"
        "    else: raise SystemExit(f'nothing was refused: {folder}')\n"
    )
    subprocess.run([sys.executable, "-c", code, *folders], check=True, timeout=60)


def test_a_page_that_is_used_twice_is_refused(directory):
    content = bytearray((directory / DATABASE).read_bytes())
    page = int.from_bytes(content[16:18], "big")
    content[2 * page : 3 * page] = content[page : 2 * page]
    (directory / DATABASE).write_bytes(bytes(content))
    with pytest.raises(JournalError):
        open_queue(directory)


def test_more_sessions_than_a_journal_takes_are_refused_when_they_are_issued(tmp_path):
    queue = open_queue(tmp_path / "queue")
    with pytest.raises(DataError, match="num_sessions must be from 1 to 4096"):
        queue.issue(make_prompts(1), num_sessions=MAX_SESSIONS + 1)
    queue.issue(make_prompts(1), num_sessions=MAX_SESSIONS)
    queue.close()
    open_queue(tmp_path / "queue").close()
