"""Read trackers' files as their own programs do."""

import html
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_core.testing import wait_until


def wandb_attempts(folder: Path) -> list[Path]:
    """Wait until wandb's process has written a run's attempts, which `finish` does not await, and return their folders.

    Raises:
        TimeoutError: wandb has not written an attempt after 60 s.
    """
    import wandb

    attempts = sorted((folder / "wandb").glob("offline-run-*"))
    wait_until(lambda: all(map(_is_finished, attempts)), "wandb to write how each attempt ended", deadline_s=60)
    wandb.teardown()
    return attempts


def _is_finished(attempt: Path) -> bool:
    """Return True if the last record, the run's exit, can be read."""
    from google.protobuf.message import DecodeError

    try:
        return any(record.HasField("exit") for record in wandb_records(attempt))
    except (DecodeError, ValueError):  # no file yet, or half a record
        return False


def wandb_records(attempt: Path) -> Iterator[Any]:
    """Read wandb's log: seven bytes, then blocks of 32 KiB as in LevelDB; a record may be split."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = attempt.glob("*.wandb")
    content = file.read_bytes()
    position, parts = 7, []
    while position + 7 <= len(content):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts.append(content[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or last part
            yield Record.FromString(b"".join(parts))
            parts = []


def wandb_history(attempt: Path) -> list[dict[str, Any]]:
    """Return the rows; a nested value has the keys of both levels: "val/generations|path"."""
    rows = (record.history.item for record in wandb_records(attempt) if record.HasField("history"))
    return [{"|".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items} for items in rows]


def tensorboard_events(directory: Path) -> Any:
    """Events, read as by TensorBoard's pages."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    events.Reload()
    return events


def tensorboard_series(directory: Path, tag: str) -> list[tuple[int, Any]]:
    """Return (step, value) of a tag."""
    from tensorboard.util.tensor_util import make_ndarray

    events = tensorboard_events(directory).Tensors(tag)
    return [(event.step, make_ndarray(event.tensor_proto).item()) for event in events]


def table_cells(page: str) -> list[list[str]]:
    """Return the texts of a table's rows, as a browser shows them."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, flags=re.S)
    return [[html.unescape(cell) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", row, flags=re.S)] for row in rows]
