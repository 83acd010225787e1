"""Finished sessions for other stacks: as JSON lines, as Parquet, or put into a queue."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from rl_core.data import IntArray, Json, Trajectory
from rl_core.errors import AlreadySettledError, DataError, DeadlineError, RLError, SettingsError
from rl_core.files import sync_file
from rl_core.queue import TransferQueue
from rl_core.record_fields import record
from rl_rollout.gateway.journal import FINISHED, OPEN, QUEUED, read_session, session_files
from rl_rollout.gateway.sessions import Session

log = structlog.get_logger(__name__)

PUT_DEADLINE_S = 5.0
RETRY_S = 1.0
ROWS_AT_ONCE = 256
ARRAYS = {
    "input_ids": pa.int32(),
    "loss_mask": pa.bool_(),
    "rollout_logprobs": pa.float32(),
    "policy_versions": pa.int32(),
}
COLUMNS = {
    "session": pa.string(),
    "prompt_uid": pa.string(),
    "session_index": pa.int32(),
    "output_index": pa.int32(),
    "parent": pa.int32(),
    **{name: pa.list_(kind) for name, kind in ARRAYS.items()},
    "num_prompt_tokens": pa.int32(),
    "finish_reason": pa.string(),
    "reward": pa.float64(),
    "reward_components": pa.map_(pa.string(), pa.float64()),
    "metadata": pa.string(),
}
TEXTS = {"prompt": pa.string(), "completion": pa.string()}
Decode = Callable[[Sequence[IntArray]], list[str]]


@record
class Exported:
    """What an export wrote.

    Attributes:
        sessions: That are in the file.
        trajectories: Its rows.
        failed: Sessions that have a reason instead, and are left out.
        unreadable: Why files of sessions were left out.
    """

    sessions: int
    trajectories: int
    failed: int
    unreadable: tuple[str, ...]


def export_sessions(folder: Path, target: Path, *, decode: Decode | None = None) -> Exported:
    """Write the trajectories of all finished sessions that have a reward; the file appears whole or not at all.

    Args:
        folder: Of the sessions; a gateway may be at work in it.
        target: Ends in .jsonl or .parquet.
        decode: Adds the texts `prompt` and `completion`.

    Raises:
        SettingsError: The target has another end.
    """
    if target.suffix not in (".jsonl", ".parquet"):
        raise SettingsError(f"the export must end in .jsonl or .parquet; found {target.name!r}.")
    part = target.with_name(f".{target.name}.part")
    counts, unreadable = [0, 0, 0], []
    try:
        with part.open("wb") as stream:
            write = _jsonl(stream) if target.suffix == ".jsonl" else _parquet(stream, has_texts=decode is not None)
            next(write)
            for file in session_files(folder, FINISHED, QUEUED):
                try:
                    session = read_session(file if file.exists() else file.with_suffix(QUEUED))[0]
                except DataError as error:
                    unreadable.append(str(error))
                    continue
                result = session.result()
                if result.failure is None:
                    write.send([_row(session, row, decode) for row in result.trajectories])
                    counts[0], counts[1] = counts[0] + 1, counts[1] + len(result.trajectories)
                counts[2] += result.failure is not None
            write.close()
        sync_file(part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return Exported(sessions=counts[0], trajectories=counts[1], failed=counts[2], unreadable=tuple(unreadable))


def list_sessions(folder: Path) -> Iterator[dict[str, Json]]:
    """What there is in a folder of sessions, one by one; a failure says why a session cannot train."""
    for file in session_files(folder, OPEN, FINISHED, QUEUED):
        about: dict[str, Json] = {"session": file.stem, "state": file.suffix[1:]}
        try:
            session, _ = read_session(file)
        except DataError as error:
            yield {**about, "failure": str(error)}
            continue
        counts = session.counts
        yield {
            **about,
            "prompt_uid": session.prompt_uid,
            "session_index": session.session_index,
            "turns": counts["turns"],
            "forks": counts["forks"],
            "tokens": counts["sampled_tokens"],
            "reward": session.reward,
            "failure": session.result().failure if session.is_finished else session.failure,
        }


class QueueFeed:
    """Puts each finished session into a queue, once: what the queue has already is not put again."""

    def __init__(self, folder: Path, queue: TransferQueue) -> None:
        """Nothing is put yet.

        Args:
            folder: Of the sessions.
            queue: Whoever feeds it prompts has issued the sessions' groups.
        """
        self.news = asyncio.Event()
        self._folder, self._queue = folder, queue
        self._refused: set[str] = set()

    async def run(self) -> None:
        """Put what there is, and whatever is finished, until this is cancelled."""
        while True:
            await self.put_all()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), RETRY_S)
            self.news.clear()

    async def put_all(self) -> None:
        """Put what there is; what the queue refuses is named in the log, and stays for the next start."""
        for file in session_files(self._folder, FINISHED):
            if file.stem in self._refused:
                continue
            try:
                await asyncio.to_thread(self._put, file)
            except DeadlineError:
                return  # the queue is full
            except (RLError, OSError) as error:
                self._refused.add(file.stem)
                log.error("gateway_session_not_queued", session=file.stem, error=str(error))

    def _put(self, file: Path) -> None:
        session, _ = read_session(file)
        result = session.result()
        try:
            if result.failure is not None:
                self._queue.fail(session.prompt_uid, session.session_index, reason=result.failure)
            else:
                rows = result.trajectories
                self._queue.put(session.prompt_uid, session.session_index, rows, deadline_s=PUT_DEADLINE_S)
        except AlreadySettledError as error:
            log.info("gateway_session_was_queued", session=session.session_id, reason=str(error))
        file.rename(file.with_suffix(QUEUED))


def _row(session: Session, row: Trajectory, decode: Decode | None) -> dict[str, Any]:
    texts: dict[str, str] = {}
    if decode is not None:
        start = row.num_prompt_tokens
        texts = dict(zip(TEXTS, decode([row.input_ids[:start], row.input_ids[start:]]), strict=True))
    return {
        "session": session.session_id,
        **{name: getattr(row, name) for name in COLUMNS if name not in ("session", "metadata", *ARRAYS)},
        **{name: getattr(row, name).tolist() for name in ARRAYS},
        "metadata": dict(session.metadata),
        **texts,
    }


def _jsonl(stream: BinaryIO) -> Any:
    while True:
        for row in (yield):
            stream.write(msgspec.json.encode(row) + b"\n")


def _parquet(stream: BinaryIO, *, has_texts: bool) -> Any:
    schema, rows = pa.schema({**COLUMNS, **(TEXTS if has_texts else {})}), []
    with pq.ParquetWriter(stream, schema) as writer:
        try:
            while True:
                rows += yield
                if len(rows) >= ROWS_AT_ONCE:
                    writer.write_batch(_batch(rows, schema))
                    rows = []
        finally:
            writer.write_batch(_batch(rows, schema))


def _batch(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = [
        {
            **row,
            "reward_components": list(row["reward_components"].items()),
            "metadata": msgspec.json.encode(row["metadata"]).decode(),
        }
        for row in rows
    ]
    return pa.RecordBatch.from_pylist(columns, schema=schema)
