"""Fuzz every file format that we read; run as a program, one format in a process with bounded memory."""

import json
import os
import resource
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from file_mutation import Format, run_cases, watch
from model_formats import (
    adapter_config,
    adapter_header,
    adapter_tensors,
    chat_template,
    engine_config,
    learner_header,
    made,
    manifest,
    policy_config,
    prompts_arrow,
    prompts_jsonl,
    prompts_parquet,
    safetensors,
    safetensors_header,
    safetensors_index,
    tensor_file,
    tensor_index,
    tokenizer,
    trainer_state,
    vocabulary,
    written,
)

MOST_BYTES = 1 << 32


def settings_toml(folder: Path) -> Format:
    """A trainer's settings."""
    from rl_trainer_parts.settings.schema import Settings
    from rl_trainer_parts.settings.sources import load_settings

    text = b'[policy]\npath = "p"\n[prompts]\ntrain = "t.jsonl"\n[trainer]\nsteps = 3\n[rollout]\ngroup_size = 4\n'
    text += b'loop_options = { a.b = [1, 2.5, "x"] }\n[reward]\nfunction = "r.py:f"\n'
    return Format(
        written(folder / "settings.toml", text), lambda: load_settings(folder / "settings.toml", (), {}, kind=Settings)
    )


def workload_toml(folder: Path) -> Format:
    """A simulated workload."""
    from rl_rollout.simulation.workload import BUILT_IN, read_workload

    text = BUILT_IN.read_bytes()
    return Format(written(folder / "w.toml", text), lambda: read_workload(folder / "w.toml"))


def hang_report(folder: Path) -> Format:
    """hang.json."""
    from rl_metrics.hang import read_hang_report

    return _of_run(folder, "hang.json", lambda _: read_hang_report(folder / "hang.json"), HANG)


HANG = {
    "at": "2026-01-01T00:00:00",
    "run": "r",
    "no_progress_s": 2.5,
    "roles": [{"name": "learner", "rank": 0}],
    "queue": {"rows": 3.0},
    "causes": ["x"],
    "format": "rl-hang-2",
}


def _of_run(folder: Path, name: str, read: Callable[[Any], object], content: object = None) -> Format:
    from invented_runs import InventedRun

    from rl_metrics.run_files import open_run

    InventedRun(steps=2, trajectories=2).write(folder)
    if content is not None or not (folder / name).exists():
        written(folder / name, content)

    def read_or_refuse() -> None:
        read(open_run(folder))

    return Format(folder / name, read_or_refuse)


def health(folder: Path) -> Format:
    """health.json, as a resumed trainer reads it."""
    from rl_trainer_parts.reporting.health import _findings_before

    finding = {"rule": "a", "severity": "warning", "step": 1, "text": "x"}
    return _of_run(folder, "health.json", lambda run: (run.health, _findings_before(folder)), {"findings": [finding]})


def schedule_record(folder: Path) -> Format:
    """record.jsonl of the asynchronous trainer."""
    from rl_async_trainer.record import read_history

    lines: list[dict[str, Any]] = [
        {"at": 0, "what": "issued", "uids": ["a", "b"]},
        {"at": 1, "what": "started", "uids": ["a"], "version": 0},
        {"at": 2, "what": "settled", "uid": "a", "oldest": 0, "newest": None, "started": 0},
        {"at": 3, "what": "failed", "uid": "b", "reason": "x"},
        {"at": 4, "what": "step", "step": 1, "uids": ["a"]},
        {"at": 5, "what": "published", "version": 1, "step": 1},
    ]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return Format(written(folder / "record.jsonl", content), lambda: read_history(folder).steps_after(0))


def trl_state(folder: Path) -> Format:
    """trainer_state.json of TRL."""
    from rl_metrics.importers.trl import import_trl

    rows = [{"step": step, "loss": 0.5, "reward": 1.0} for step in (1, 2)]
    file = written(folder / "trainer_state.json", {"log_history": rows})
    return Format(file, lambda: import_trl([file], Path(tempfile.mkdtemp(dir=folder)) / "into"))


def verl_log(folder: Path) -> Format:
    """JSON lines of verl's file logger."""
    from rl_metrics.importers.verl import import_verl

    lines = [{"step": step, "data": {"critic/score/mean": 0.5, "timing_s/step": 2.0}} for step in (1, 2)]
    file = written(folder / "verl.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    return Format(file, lambda: import_verl([file], Path(tempfile.mkdtemp(dir=folder)) / "into"))


def _queue(folder: Path) -> Path:
    from rl_core import InProcessQueue, QueueOptions, TaskSpec
    from rl_core.testing import make_prompts, make_trajectory

    task = TaskSpec(name="train", needs=frozenset({"reward"}))
    queue = InProcessQueue([task], options=QueueOptions(directory=folder / "queue"))
    queue.issue(make_prompts(3), num_sessions=2)
    for session in range(2):
        queue.put("p0", session, [make_trajectory("p0", session, num_response_tokens=20_000)])
    queue.fail("p1", 0, reason="x")
    queue.close()
    return folder / "queue"


def segment(folder: Path) -> Format:
    """A segment of rows."""
    from rl_core.data.segment import decode_segment

    file = next((_queue(folder) / "segments").glob("*"))
    file.write_bytes(file.read_bytes()[:6000])
    whole = next((_queue(folder / "again") / "segments").glob("*"))

    def read() -> None:
        content = bytearray(whole.read_bytes())
        content[: len(head)] = (head := file.read_bytes()[:6000])
        decode_segment(bytes(content))

    return Format(file, read)


def journal_record(folder: Path) -> Format:
    """The record of a group in a queue's journal."""
    from rl_core.queue.journal.records import read_journal

    source = sqlite3.connect(_queue(folder) / "queue.sqlite3")
    connection = sqlite3.connect(":memory:", isolation_level=None)
    source.backup(connection)
    source.close()
    (record,) = connection.execute("SELECT record FROM groups WHERE uid = 'p0'").fetchone()
    file = written(folder / "record", record)

    def read() -> None:
        connection.execute("UPDATE groups SET record = ? WHERE uid = 'p0'", (file.read_bytes(),))
        groups, _, _ = read_journal(connection, file.parent)
        assert all(len(group.missing_sessions) <= group.num_sessions for group in groups)

    return Format(file, read)


def journal(folder: Path) -> Format:
    """A queue's database, read by SQLite."""
    import shutil

    from rl_core import InProcessQueue, QueueOptions, TaskSpec
    from rl_core.queue.journal.inspection import inspect_journal

    directory = _queue(folder)
    task = TaskSpec(name="train", needs=frozenset({"reward"}))

    def read() -> None:
        shutil.rmtree(folder / "copy", ignore_errors=True)
        shutil.copytree(directory, folder / "copy")
        inspect_journal(folder / "copy")
        queue = InProcessQueue([task], options=QueueOptions(directory=folder / "copy"))
        queue.ledger()
        queue.close()

    return Format(directory / "queue.sqlite3", read, is_others=True)


MAKERS: dict[str, Callable[[Path], Format]] = {
    make.__name__: make
    for make in (
        *(manifest, trainer_state, learner_header, policy_config, engine_config, safetensors_header, safetensors),
        *(safetensors_index, tensor_index, tensor_file, vocabulary, tokenizer, chat_template, prompts_jsonl),
        *(prompts_parquet, prompts_arrow, settings_toml, workload_toml, hang_report, health, schedule_record),
        *(trl_state, verl_log, segment, journal_record, journal, adapter_header, adapter_config, adapter_tensors),
    )
}
RUN_FILES: dict[str, Callable[[Any], object]] = {
    "metrics.jsonl": lambda run: [run.history.values[name] for name in run.history.values],
    "events.jsonl": lambda run: run.events,
    "generations.jsonl": lambda run: run.generations,
    "histograms.jsonl": lambda run: run.histograms,
    "probes.jsonl": lambda run: run.probes,
    "rollouts.jsonl": lambda run: list(run.rollouts()),
    "summary.json": lambda run: run.summary,
}
for _name, _read in RUN_FILES.items():
    MAKERS[_name.partition(".")[0]] = lambda folder, name=_name, read=_read: _of_run(folder, name, read)


def main() -> None:
    """Run cases of one format: NAME CASES SEED."""
    name, cases, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    import structlog

    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with tempfile.TemporaryDirectory(prefix="file-fuzz-", dir="/dev/shm") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        format_ = MAKERS[name](made(Path(folder) / name))
        format_.read()
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        watch()
        run_cases(name, format_, cases=cases, seed=seed)


if __name__ == "__main__":
    main()
