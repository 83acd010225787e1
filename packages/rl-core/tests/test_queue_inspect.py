"""`rl-core queue inspect`: its output and errors, and that it leaves the queue unchanged."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from rl_core import InProcessQueue, QueueOptions, TaskSpec
from rl_core.cli import main
from rl_core.errors import JournalError
from rl_core.queue.journal import inspection
from rl_core.queue.journal.database import DATABASE
from rl_core.queue.journal.inspection import inspect_journal
from rl_core.terminal_text import printable
from rl_core.testing import make_prompt, make_prompts, make_trajectory
from rl_core.testing.fixtures import ragged_like

NEEDS = frozenset({"input_ids", "reward"})
SCORE = TaskSpec(name="score", needs=NEEDS, gives=frozenset({"values"}), order="issue", max_staleness=3)
TRAIN = TaskSpec(name="train", needs=NEEDS | {"values"})
TRAIN_ALONE = TaskSpec(name="train", needs=frozenset({"reward"}))
GUIDE = Path(__file__).parents[3] / "docs/guides/transfer-queue.md"
LONG = 20_000
"""Tokens of a trajectory whose segment is too large for the database, so that it gets a slot."""

OTHER_PROCESS = """
import os, signal, sys
from pathlib import Path
from rl_core import InProcessQueue, QueueOptions, TaskSpec
from rl_core.testing import make_prompt, make_prompts, make_trajectory

queue = InProcessQueue(
    [TaskSpec(name="train", needs=frozenset({"reward"}))], options=QueueOptions(directory=Path(sys.argv[1]))
)
queue.issue(make_prompts(4), num_sessions=1)
for uid in ("p0", "p1"):
    queue.put(uid, 0, [make_trajectory(uid, 0, num_response_tokens=20_000)])
queue.ack(queue.lease("train", groups=1))
queue.lease("train", groups=1)
print("ready", flush=True)
sys.stdin.readline()
queue.put("p2", 0, [make_trajectory("p2", 0)])
print("went on", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def make_queue(directory: Path, tasks=(SCORE, TRAIN)) -> InProcessQueue:
    return InProcessQueue(tasks, options=QueueOptions(directory=directory))


def fill(directory: Path) -> None:
    """Add a prompt in each state: p0 done, p1 settled and scored, p2 partly put, p3 dropped, p4 reissued."""
    queue = make_queue(directory)
    queue.issue(make_prompts(5), num_sessions=2)
    for uid in ("p0", "p1"):
        for session in range(2):
            queue.put(uid, session, [make_trajectory(uid, session, num_response_tokens=LONG)])
    queue.put("p2", 0, [make_trajectory("p2", 0)])
    for session in range(2):
        queue.fail("p3", session, reason="the engine fell")
    queue.drop("p4", reason="unsafe: by hand", reissue=True)
    lease = queue.lease("score", groups=2)
    queue.ack(lease, {"values": ragged_like(lease.batch, "values", [0.0] * 4)})
    queue.ack(queue.lease("train", groups=1))
    queue.close()


def files_of(directory: Path) -> dict[str, bytes]:
    """Return all files except the index, which SQLite rebuilds when it reads a log."""
    found = (path for path in sorted(directory.rglob("*")) if path.is_file() and not path.name.endswith("-shm"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def start_other(directory: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def let_go_on(process: "subprocess.Popen[str]") -> None:
    """Let the process put once more, after which it kills itself."""
    said, _ = process.communicate("go on\n", timeout=60)
    assert said == "went on\n"
    assert process.returncode == -signal.SIGKILL


def execute(directory: Path, *statements: str) -> None:
    connection = sqlite3.connect(directory / DATABASE)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def test_it_says_where_each_prompt_stands(tmp_path):
    fill(tmp_path / "queue")
    report = inspect_journal(tmp_path / "queue")
    assert report["states"] == {"done": 1, "settled": 1, "issued": 2, "dropped": 1}
    assert report["acks"] == {"score": 2, "train": 1}
    assert report["drops"] == {"no rows": 1, "unsafe": 1}
    assert report["counts"]["reissued"] == 1
    assert msgspec.convert(report["tasks"], list[TaskSpec]) == [SCORE, TRAIN]
    assert (report["num_rows"], report["num_tokens"]) == (3, 2 * (LONG + 2) + 5)
    done, scored, partly, dropped, again = (SimpleNamespace(**prompt) for prompt in report["prompts"])
    assert (done.uid, done.state, done.acked_by, done.num_rows) == ("p0", "done", ["score", "train"], 0)
    assert (scored.state, scored.acked_by, [*scored.policy_versions]) == ("settled", ["score"], [0, 0])
    assert (partly.sessions_settled, partly.sessions_missing, partly.num_tokens) == (1, [1], 5)
    assert (dropped.state, dropped.reason) == ("dropped", "no rows: the engine fell")
    assert dropped.sessions_failed == {"0": "the engine fell", "1": "the engine fell"}
    assert (again.state, again.attempt, again.reason) == ("issued", 2, "unsafe: by hand")
    oldest_s = time.time() - partly.issued_at
    assert abs(report["oldest_issued_s"] - oldest_s) < 5


def test_the_table_has_a_line_for_each_prompt(tmp_path, capsys):
    fill(tmp_path / "queue")
    assert main(["queue", "inspect", str(tmp_path / "queue")]) == 0
    text = capsys.readouterr().out
    assert "prompts         5: 2 issued, 1 settled, 1 done, 1 dropped\n" in text
    assert "score: needs input_ids, reward; gives values; order issue; max_staleness 3\n" in text
    head, *rows = text.partition("\n\n")[2].splitlines()
    assert head.split()[:3] == ["uid", "state", "attempt"]
    cells = [row.split() for row in rows]
    assert cells[0] == ["p0", "done", "1", "2/2", "0", "0", "0", "0", "-", "score,train", "-"]
    assert cells[2] == ["p2", "issued", "1", "1/2", "0", "1", "1", "5", "0", "-", "-"]
    assert cells[3][:6] == ["p3", "dropped", "1", "2/2", "2", "0"]


def test_the_json_is_the_report(tmp_path, capsys):
    fill(tmp_path / "queue")
    assert main(["queue", "inspect", str(tmp_path / "queue"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    report = inspect_journal(tmp_path / "queue")
    assert found | {"oldest_issued_s": 0} == json.loads(json.dumps(report | {"oldest_issued_s": 0}))
    assert found["tasks"][0]["needs"] == ["input_ids", "reward"]
    assert len(found["prompts"]) == 5


@pytest.mark.skipif(not GUIDE.is_file(), reason="docs/ is in the checkout only")
def test_the_guide_has_every_key_of_the_json(tmp_path):
    fill(tmp_path / "queue")
    make_queue(tmp_path / "queue").close()  # so that there is a recovery
    report = inspect_journal(tmp_path / "queue")
    named = set(re.findall(r"`(\w+)`", GUIDE.read_text()))
    parts = (report, report["prompts"][0], report["tasks"][0], report["recovery"])
    assert set().union(*parts) - named == set()


def test_a_closed_queue_is_left_as_it_was(tmp_path):
    fill(tmp_path / "queue")
    names = {path.name for path in (tmp_path / "queue").iterdir()}
    before = files_of(tmp_path / "queue")
    inspect_journal(tmp_path / "queue")
    assert {path.name for path in (tmp_path / "queue").iterdir()} == names
    assert files_of(tmp_path / "queue") == before


def test_a_queue_that_another_process_has_open(tmp_path):
    process = start_other(tmp_path / "queue")
    before = files_of(tmp_path / "queue")
    assert inspect_journal(tmp_path / "queue")["states"] == {"done": 1, "settled": 1, "issued": 2}
    assert files_of(tmp_path / "queue") == before
    let_go_on(process)


def test_a_queue_that_is_opened_during_the_read_is_refused(tmp_path, monkeypatch):
    fill(tmp_path / "queue")
    read = inspection.read_journal

    def read_after_an_opening(*where):
        make_queue(tmp_path / "queue").close()
        return read(*where)

    monkeypatch.setattr(inspection, "read_journal", read_after_an_opening)
    with pytest.raises(JournalError, match=r"opened .*queue during the read\. Try again"):
        inspect_journal(tmp_path / "queue")


def test_a_queue_that_was_killed(tmp_path):
    let_go_on(start_other(tmp_path / "queue"))
    before = files_of(tmp_path / "queue")
    assert inspect_journal(tmp_path / "queue")["states"] == {"done": 1, "settled": 2, "issued": 1}
    assert files_of(tmp_path / "queue") == before
    queue = make_queue(tmp_path / "queue", [TaskSpec(name="train", needs=frozenset({"reward"}))])
    assert queue.stats()["groups/settled"] == 2
    queue.close()


def test_a_torn_log_is_read_up_to_its_last_whole_transaction(tmp_path):
    let_go_on(start_other(tmp_path / "queue"))
    log = tmp_path / "queue" / f"{DATABASE}-wal"
    os.truncate(log, log.stat().st_size - 100)
    assert inspect_journal(tmp_path / "queue")["states"] == {"done": 1, "settled": 1, "issued": 2}


def test_thousands_of_prompts_are_counted_and_a_few_shown(tmp_path, capsys):
    queue = make_queue(tmp_path / "queue")
    queue.issue(make_prompts(5000), num_sessions=8)
    queue.close()
    for arguments, shown in (((), 100), (("--limit", "3"), 3), (("--limit", "0"), 0)):
        assert main(["queue", "inspect", str(tmp_path / "queue"), *arguments]) == 0
        text = capsys.readouterr().out
        assert text.count("0/8") == shown
        assert f"and {5000 - shown} more prompts" in text
        assert "5000 issued" in text
    assert main(["queue", "inspect", str(tmp_path / "queue"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["prompts"]) == 5000


HOSTILE = ["a\nb\r\x1b[2J\x1b]0;title\x07", "\u202egnp", "c\x9b31m\x7f", "z\u0335\u0336", "x" * 500, "", "\N{SNOWMAN}"]


def test_names_of_others_do_not_garble_the_terminal(tmp_path, capsys):
    queue = make_queue(tmp_path / "queue")
    queue.issue([make_prompt(uid) for uid in HOSTILE], num_sessions=1)
    queue.fail(HOSTILE[0], 0, reason=HOSTILE[0])
    queue.close()
    assert main(["queue", "inspect", str(tmp_path / "queue")]) == 0
    text = capsys.readouterr().out
    assert len(text.partition("\n\n")[2].splitlines()) == 1 + len(HOSTILE)
    assert text.replace("\n", "").isprintable()
    assert r"a\nb\r\x1b[2J\x1b]0;title\x07" in text
    assert "x" * 100 not in text
    assert main(["queue", "inspect", str(tmp_path / "queue"), "--json"]) == 0
    text = capsys.readouterr().out
    assert re.fullmatch(r"[ -~\n]+", text)
    assert [prompt["uid"] for prompt in json.loads(text)["prompts"]] == HOSTILE


def test_printable_cuts_what_is_too_long():
    assert printable("abcdef", width=5) == "ab..."
    assert printable("abcde", width=5) == "abcde"
    assert printable("\x1b", width=None) == r"\x1b"


def no_directory(path):
    """Leave the path empty."""


def a_file(path):
    path.write_text("not a folder")


def an_empty_folder(path):
    path.mkdir()


def a_text(path):
    path.mkdir()
    (path / DATABASE).write_text("no database at all " * 100)


def an_empty_file(path):
    path.mkdir()
    (path / DATABASE).touch()


def another_database(path):
    path.mkdir()
    execute(path, "CREATE TABLE meta (key TEXT, value TEXT)", "CREATE TABLE users (name TEXT)")


def another_format(path):
    fill(path)
    execute(path, "UPDATE meta SET value = X'3939' WHERE key = 'format'")


def a_torn_database(path):
    fill(path)
    size = (path / DATABASE).stat().st_size
    os.truncate(path / DATABASE, size // 4096 // 2 * 4096)


def a_record_that_cannot_be_read(path):
    fill(path)
    execute(path, "UPDATE groups SET record = X'7b7b' WHERE uid = 'p1'")


def a_state_that_is_none(path):
    fill(path)
    execute(path, "UPDATE groups SET state = 'eaten' WHERE uid = 'p1'")


def a_segment_that_is_not_listed(path):
    fill(path)
    execute(path, "DELETE FROM segments")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (no_directory, "must be a queue's directory, with queue.sqlite3; found none"),
        (a_file, "must be a queue's directory, with queue.sqlite3; found none"),
        (an_empty_folder, "must be a queue's directory, with queue.sqlite3; found none"),
        (a_text, "cannot be used: file is not a database"),
        (an_empty_file, "cannot be used: no such table: meta"),
        (another_database, "is not a queue's journal: it has the tables ['meta', 'users']"),
        (another_format, "has format 99; expected 4"),
        (a_torn_database, "is malformed"),
        (a_record_that_cannot_be_read, "has an unreadable record"),
        (a_state_that_is_none, "has an unreadable record: row 1 of groups differs from its checksum"),
        (a_segment_that_is_not_listed, "refer to missing segments"),
    ],
)
def test_what_is_no_queue_is_refused_in_one_line(tmp_path, capsys, make, expected):
    make(tmp_path / "queue")
    assert main(["queue", "inspect", str(tmp_path / "queue")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rl-core: ")
    assert captured.err.count("\n") == 1
    assert expected in captured.err
    with pytest.raises(JournalError, match=re.escape(str(tmp_path / "queue"))):
        inspect_journal(tmp_path / "queue")


def test_what_it_refuses_does_not_garble_the_terminal(tmp_path, capsys):
    assert main(["queue", "inspect", f"{tmp_path}/\x1b[2J\n"]) == 2
    assert r"\x1b[2J\n" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["-1", "many"])
def test_a_limit_is_a_number(tmp_path, limit, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["queue", "inspect", str(tmp_path), f"--limit={limit}"])
    assert "--limit" in capsys.readouterr().err


def test_the_command_goes_through_a_pipe_that_is_closed_early(tmp_path):
    queue = make_queue(tmp_path / "queue")
    queue.issue(make_prompts(3000), num_sessions=1)
    queue.close()
    command = [sys.executable, "-m", "rl_core", "queue", "inspect", str(tmp_path / "queue"), "--limit=3000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b"queue ")
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 0
