"""Asynchronous runs that are killed: their processes by role, and checks afterwards."""

import contextlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from async_roles import FAULT_VARIABLE, PIDS, DigestPolicy, response_of
from tiny_run import GROUP_SIZE, PROMPTS_PER_STEP, TinyRun
from train_process import TrainProcess

from rl_async_trainer.record import FILE as RECORD
from rl_async_trainer.record import read_history
from rl_async_trainer.training_run import QUEUE
from rl_core.data.records import Prompt
from rl_core.queue.journal.inspection import inspect_journal
from rl_metrics.run_files.events import read_events
from rl_metrics.trackers.jsonl import read_metrics
from rl_rollout.loops.protocol import stable_seed
from rl_rollout.prompts import PromptOptions, PromptSource, PromptTokenizer, load_prompts

SUPPORT = Path(__file__).parent
SOON_S = 2.0
"""Maximum time from a kill to one that hits the recovery from it."""
MOST_LINES = 25
"""Maximum number of record lines from one kill to the next: about three steps."""
ROLES = ("rollouter", "learner", "server", "controller")
SETTINGS: dict[str, Any] = {
    "roles__placement": "process",
    "roles__hang_deadline_s": 60.0,
    "rollout__max_response_tokens": 16,
    "schedule__max_staleness": 2,
    "trainer__checkpoint_every": 3,
    "trainer__validate_every": 5,
    "trainer__canary_prompts": 1,
    **{f"roles__{role}_restarts": 100 for role in ("rollouter", "learner", "teacher", "controller")},
}


@contextmanager
def scripted_training(run: TinyRun, *words: str, fault: str = "", **settings: Any) -> Iterator[TrainProcess]:
    """A run with scripted roles under its supervisor; killed at the end if it still runs.

    Args:
        run: Its inputs.
        words: Further arguments, such as "--resume".
        fault: See `async_roles.faulty`.
        settings: Settings that differ from `SETTINGS`, such as trainer__steps=3.
    """
    process = start_scripted(run, *words, environment={FAULT_VARIABLE: fault}, **settings)
    try:
        yield process
    finally:
        process.end()


def start_scripted(run: TinyRun, *words: str, environment: Mapping[str, str], **settings: Any) -> TrainProcess:
    """Return the process of `scripted_training`, with further variables."""
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, **environment}
    if sys.dont_write_bytecode:  # otherwise, each of many processes would compile its imports
        environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(run.folder.parent / "bytecode")}
    return TrainProcess(
        run.train_words(*words, **{**SETTINGS, **settings}),
        output=run.folder / f"output-{len(list(run.folder.glob('output-*.txt')))}.txt",
        environment=environment,
        module="async_driver",
    )


def num_record_lines(run: TinyRun) -> int:
    """Return the number of lines in a run's record."""
    file = run.run_folder / RECORD
    return file.read_bytes().count(b"\n") if file.exists() else 0


def server_pid(directory: Path) -> int | None:
    """Return the process that has a queue's directory open; None without one."""
    inode = (directory / "lock").stat().st_ino if (directory / "lock").exists() else None
    for line in Path("/proc/locks").read_text().splitlines():  # "3: FLOCK  ADVISORY  WRITE 28756 fe:00:2238836 0 EOF"
        words = line.split()
        if words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
            return int(words[4])
    return None


def pid_of(run: TinyRun, role: str) -> int | None:
    """Return the current process of a role; None without one."""
    if role == "server":
        return server_pid(run.run_folder / QUEUE)
    file = run.run_folder / ".lock" if role == "controller" else run.run_folder / PIDS / role
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):
        return None


@dataclass(slots=True)
class Killer:
    """Kills roles of a run at points that a seed chooses.

    Attributes:
        run: The run.
        draw: Random numbers that choose the points.
        kills: Role and number of recorded lines of each kill so far.
    """

    run: TinyRun
    draw: random.Random
    kills: list[tuple[str, int]] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Kills by role."""
        return dict(Counter(role for role, _ in self.kills))

    def wait_for_a_point(self, process: TrainProcess) -> None:
        """Wait for further lines of the record, or sometimes only a moment, during the recovery from the last kill."""
        lines = num_record_lines(self.run) + self.draw.randint(1, MOST_LINES)
        ends_at = monotonic() + self.draw.uniform(0.0, SOON_S) if self.kills and not self.draw.randrange(4) else None
        process.wait_until(
            lambda: num_record_lines(self.run) >= lines or (ends_at is not None and monotonic() > ends_at),
            f"{lines} lines of the record, after kills {self.kills}",
        )

    def kill_one(self, process: TrainProcess, role: str) -> None:
        """Kill a role at a point, as soon as it has a process."""
        self.wait_for_a_point(process)
        killed = False

        def kill() -> bool:
            nonlocal killed
            pid = pid_of(self.run, role)
            if pid in process.children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed = True
            return killed

        process.wait_until(kill, f"a process of the {role}, after kills {self.kills}")
        self.kills.append((role, num_record_lines(self.run)))

    def kill_everything(self, process: TrainProcess) -> None:
        """Kill all processes of a run at a point."""
        self.wait_for_a_point(process)
        process.kill_all()
        self.kills.append(("everything", num_record_lines(self.run)))


def issued_prompts(run: TinyRun, count: int) -> list[Prompt]:
    """The first prompts of a run with seed 0, in the order of the source."""
    tokenizer = PromptTokenizer.load(run.folder / "policy")
    prompts = load_prompts([run.folder / "train.parquet"], tokenizer, PromptOptions(max_tokens=8))
    return PromptSource(prompts, seed=0).next(count)


def assert_trained_exactly_once(run: TinyRun, *, steps: int, misses_metrics: bool = False) -> None:
    """Check that journal, record and checkpoint of a finished run agree, with each prompt once.

    Args:
        run: The run.
        steps: Number of its steps.
        misses_metrics: A disk was full, so metrics of some steps are missing.
    """
    folder = run.run_folder
    journal = inspect_journal(folder / QUEUE)
    assert server_pid(folder / QUEUE) is None
    ledger = journal["prompts"]
    history = read_history(folder)
    assert sorted(history.steps) == list(range(1, steps + 1))
    trained = [uid for _, uids in sorted(history.steps.items()) for uid in uids]
    assert len(trained) == len(set(trained)) == steps * PROMPTS_PER_STEP
    assert {prompt["uid"] for prompt in ledger if prompt["state"] == "done"} == set(trained)
    assert journal["acks"]["train"] == journal["counts"]["acks/train"] == len(trained), "acked more than once"
    assert [prompt["uid"] for prompt in ledger if prompt["state"] not in ("done", "dropped")] == []
    assert all(prompt["reason"] for prompt in ledger if prompt["state"] == "dropped")
    source = issued_prompts(run, len(ledger))
    assert [prompt["uid"] for prompt in ledger] == [prompt.uid for prompt in source], "a prompt was skipped"
    rows = [row.step for row in read_metrics(folder / "metrics.jsonl")]
    assert rows == list(range(steps + 1)) or (misses_metrics and rows == sorted(set(rows)))
    saved = json.loads((folder / "checkpoints" / f"step_{steps}" / "digest.json").read_text())
    assert saved == {"step": steps, "digest": digest_of(source, history.steps).hex()}


def digest_of(prompts: list[Prompt], steps: dict[int, tuple[str, ...]]) -> bytes:
    """Return the digest of a learner that trained exactly these steps."""
    by_uid = {prompt.uid: prompt for prompt in prompts}
    policy = DigestPolicy()
    for step, uids in sorted(steps.items()):
        policy.learn(step, [row for uid in uids for row in rows_of(by_uid[uid])])
    return policy.digest


def rows_of(prompt: Prompt) -> list[Any]:
    """Return the rows of a group, in the form of `DigestPolicy.learn`."""
    seed = stable_seed(0, prompt.uid)
    shown = prompt.input_ids.tolist()
    rows = []
    for index in range(GROUP_SIZE):
        response = response_of(prompt.input_ids, seed + index)[: SETTINGS["rollout__max_response_tokens"]]
        rows.append(((prompt.uid, index, 0), shown + response, [False] * len(shown) + [True] * len(response)))
    return rows


def restarts_of(run: TinyRun) -> dict[str, int]:
    """Return how often roles were restarted, from the run's metrics."""
    events = read_events(run.run_folder / "events.jsonl")
    died = Counter(event["role"] for event in events if event["event"] == "role_died")
    return {**died, "controller": sum(event["event"] == "run_resumed" for event in events)}
