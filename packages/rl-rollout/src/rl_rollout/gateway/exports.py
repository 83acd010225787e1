"""Exports finished sessions as JSON lines or Parquet, or puts them into a queue."""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from rl_core.errors import AlreadySettledError, DataError, DeadlineError, RLError, SettingsError
from rl_core.files import sync_file
from rl_core.queue import TransferQueue
from rl_core.terminal_text import printable, table_lines, write_out
from rl_rollout.gateway.journal import FINISHED, OPEN, QUEUED, read_session, session_files

log = structlog.get_logger(__name__)

FOUND = 1
PUT_DEADLINE_S = 5.0
ROWS_AT_ONCE = 256
LISTED = ("session", "state", "prompt_uid", "session_index", "turns", "forks", "tokens", "reward", "failure")
TEXT, INT, FLOAT = pa.string(), pa.int32(), pa.float64()
TOKENS = {"input_ids": INT, "loss_mask": pa.bool_(), "rollout_logprobs": pa.float32(), "policy_versions": INT}
OF_ROW = {"prompt_uid": TEXT, "session_index": INT, "output_index": INT, "parent": INT, "num_prompt_tokens": INT}
OF_ROW |= {"finish_reason": TEXT, "reward": FLOAT}
JSON = ("images", "reward_components", "metadata")
"""Columns that are objects or lists in JSON lines and JSON strings in Parquet."""


def run_list(arguments: Namespace) -> int:
    """Run `sessions list`: print one line per session, with the reason if it cannot train."""
    rows = []
    for file in session_files(_folder(arguments), OPEN, FINISHED, QUEUED):
        try:
            session, _ = read_session(file)
        except DataError as error:
            rows.append([file.stem, file.suffix[1:], *[""] * 6, str(error)])
            continue
        failure = session.result().failure if session.is_finished else session.failure
        counts = [session.counts[name] for name in ("turns", "forks", "sampled_tokens")]
        about = [session.prompt_uid, session.session_index, *counts, session.reward, failure]
        shown = ("" if value is None else printable(str(value)) for value in about)
        rows.append([file.stem, file.suffix[1:], *shown])
    write_out("".join(f"{line}\n" for line in table_lines(LISTED, rows, right=LISTED[3:8])))
    return 0


def run_export(arguments: Namespace) -> int:
    """Run `sessions export`."""
    counts, unreadable = export_sessions(_folder(arguments), arguments.to)
    lines = [f"{arguments.to}: {counts['trajectories']} trajectories of {counts['sessions']} sessions"]
    if counts["failed"]:
        lines.append(f"left out: {counts['failed']} failed sessions; `sessions list` shows the reasons")
    lines += [f"left out: {printable(why, width=None)}" for why in unreadable]
    write_out("\n".join([*lines, ""]))
    return FOUND if unreadable else 0


def export_sessions(folder: Path, target: Path) -> tuple[Counter[str], list[str]]:
    """Write the trajectories of all finished sessions that did not fail. The file appears complete or not at all.

    Args:
        folder: Folder of the sessions; a running gateway may be using it.
        target: Path of the file, with the suffix .jsonl or .parquet.

    Returns:
        Counts of exported "sessions" and "trajectories" and of skipped "failed" sessions; errors of unreadable files.

    Raises:
        SettingsError: The target has another suffix.
    """
    if target.suffix not in (".jsonl", ".parquet"):
        raise SettingsError(f"the export must end in .jsonl or .parquet; found {target.name!r}.")
    counts, unreadable = Counter[str](), list[str]()
    rows = _rows(folder, counts, unreadable)
    part = target.with_name(f".{target.name}.part")
    try:
        if target.suffix == ".jsonl":
            with part.open("wb") as stream:
                stream.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
        else:
            _write_parquet(part, rows)
        sync_file(part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return counts, unreadable


class QueueFeed:
    """Puts each finished session into a queue exactly once."""

    def __init__(self, folder: Path, queue: TransferQueue) -> None:
        """Set the folder and the queue.

        Args:
            folder: Folder of the sessions.
            queue: The queue in which the sessions' groups were issued.
        """
        self._folder, self._queue = folder, queue
        self._refused: set[str] = set()

    def put_all(self) -> None:
        """Put all finished sessions. A session that the queue refuses is logged, and retried after the next start."""
        for file in session_files(self._folder, FINISHED):
            try:
                if file.stem not in self._refused:
                    self._put(file)
            except DeadlineError:
                return  # the queue is full
            except (RLError, OSError) as error:
                self._refused.add(file.stem)
                log.error("gateway_session_not_queued", session=file.stem, error=str(error))

    def _put(self, file: Path) -> None:
        session, _ = read_session(file)
        name, result = (session.prompt_uid, session.session_index), session.result()
        try:
            if result.failure is not None:
                self._queue.fail(*name, reason=result.failure)
            else:
                self._queue.put(*name, result.trajectories, deadline_s=PUT_DEADLINE_S)
        except AlreadySettledError as error:
            log.info("gateway_session_was_queued", session=session.session_id, reason=str(error))
        file.rename(file.with_suffix(QUEUED))


def _folder(arguments: Namespace) -> Path:
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise SettingsError(f"{folder} is not a folder. Give the folder from `rl-rollout serve --sessions`.")
    return folder


def _rows(folder: Path, counts: Counter[str], unreadable: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of an export and update the counts."""
    for file in session_files(folder, FINISHED, QUEUED):
        try:
            session, _ = read_session(file if file.exists() else file.with_suffix(QUEUED))
        except DataError as error:
            unreadable.append(str(error))
            continue
        result = session.result()
        counts["sessions" if result.failure is None else "failed"] += 1
        for row in () if result.failure is not None else result.trajectories:
            counts["trajectories"] += 1
            yield {
                "session": session.session_id,
                **{name: getattr(row, name) for name in OF_ROW},
                **{name: getattr(row, name).tolist() for name in TOKENS},
                "images": [[one.digest, one.start, one.length] for one in row.images],
                "reward_components": dict(row.reward_components),
                "metadata": session.metadata,
            }


def _write_parquet(file: Path, rows: Iterator[dict[str, Any]]) -> None:
    tokens = {name: pa.list_(kind) for name, kind in TOKENS.items()}
    schema = pa.schema({"session": TEXT, **OF_ROW, **tokens, **dict.fromkeys(JSON, TEXT)})
    with pq.ParquetWriter(file, schema) as writer:
        while some := list(islice(rows, ROWS_AT_ONCE)):
            plain = [{**row, **{name: msgspec.json.encode(row[name]).decode() for name in JSON}} for row in some]
            writer.write_batch(pa.RecordBatch.from_pylist(plain, schema=schema))
