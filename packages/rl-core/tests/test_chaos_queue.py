"""A queue with 8 producers, 3 consumers and a server under random faults neither loses nor duplicates groups."""

import signal
import time
from pathlib import Path

import pytest
from chaos import SITE, Chaos, Clock, is_running, small_disk
from queue_processes import Worker

from rl_core import QueueOptions, TaskSpec
from rl_core.errors import JournalError
from rl_core.queue.shared_memory.queue import SharedMemoryQueue
from rl_core.testing import make_prompts, wait_until

TASKS = (
    TaskSpec(name="reference", needs=frozenset({"input_ids"}), gives=frozenset({"reference_logprobs"})),
    TaskSpec(name="teacher", needs=frozenset({"input_ids"}), gives=frozenset({"teacher_logprobs"})),
    TaskSpec(name="train", needs=frozenset({"reference_logprobs", "teacher_logprobs"})),
)
NAMES = [task.name for task in TASKS]
ROLES = ("producer",) * 8 + ("reference", "teacher", "train")
NUM_SESSIONS = 2
DEADLINE_S = 60.0
REOPEN_S = 5.0
"""Time after which a queue whose server failed to start, such as on a full disk, is reopened."""
DISK_MIB = 64
TICK_S = 0.02


class QueueUnderFaults:
    """A queue, its workers, and a record of every process and folder that it used."""

    def __init__(self, directory: Path, *, num_groups: int, chaos: Chaos) -> None:
        self.chaos, self.num_groups = chaos, num_groups
        self._options = QueueOptions(directory=directory, capacity_rows=num_groups // 2 * NUM_SESSIONS)
        self.workers: list[Worker] = []
        self.everyone: list[Worker] = []
        self.servers: set[int] = set()
        self.addresses: set[str] = set()
        self.num_reopened = 0
        self.queue = self._open()
        self.ask("issue", make_prompts(num_groups), num_sessions=NUM_SESSIONS)
        self.workers = [self._start(role) for role in ROLES]

    def _open(self) -> SharedMemoryQueue:
        queue = SharedMemoryQueue(TASKS, options=self._options)
        self.servers.add(queue.server_pid)
        self.addresses.add(queue.address)
        return queue

    def _start(self, role: str) -> Worker:
        worker = Worker(role, self.queue.address)
        self.everyone.append(worker)
        return worker

    def ask(self, call: str, *arguments: object, **options: object) -> object:
        """Call a method of the queue; retry while the journal fails, and reopen the queue after REOPEN_S."""
        ends_at = time.monotonic() + REOPEN_S
        while True:
            try:
                found = getattr(self.queue, call)(*arguments, **options)
            except JournalError:
                if time.monotonic() < ends_at:
                    continue
                self._reopen()
                ends_at = time.monotonic() + REOPEN_S
            else:
                self.servers.add(self.queue.server_pid)
                return found

    def _reopen(self) -> None:
        self.chaos.end_all()
        for worker in self.workers:
            worker.kill()
        self.queue.close()
        self.queue = self._open()
        self.num_reopened += 1
        self.workers = [self._start(worker.role) for worker in self.workers]

    def num_acks(self) -> float:
        """Return the number of acks over all tasks."""
        signal.sigtimedwait([], TICK_S)  # polling without a pause would starve the server
        stats = self.ask("stats")
        return sum(stats.get(f"acks/{name}", 0.0) for name in NAMES)

    def strike(self) -> None:
        """Inject one fault into the server, a worker, the clock or the disk."""
        kind = self.chaos.draw_kind()
        victim = self.chaos.draw.randrange(len(self.workers) + 2)  # the server is hit as often as two workers
        if kind in ("clock", "disk"):
            self.chaos.make(kind)
        elif victim >= len(self.workers):
            self.chaos.make(kind, self.queue.server_pid, "server")
        else:
            worker = self.workers[victim]
            self.chaos.make(kind, worker.process.pid, "producer" if worker.role == "producer" else "consumer")
            if kind == "kill":
                worker.end()
                self.workers[victim] = self._start(worker.role)

    def close(self) -> None:
        """End the faults, the workers and the queue."""
        self.chaos.end_all()
        for worker in self.workers:
            worker.kill()
        self.queue.close()

    def check(self) -> str:
        """Check for lost or duplicate groups and for leftover processes and files; return a one-line summary."""
        stats, ledger = self.ask("stats"), self.ask("ledger")
        self.close()
        acked = {name: int(stats[f"acks/{name}"]) for name in NAMES}
        num_lost = sum(entry.state != "done" or entry.acked_by != set(NAMES) for entry in ledger)
        num_doubled = sum(max(count - self.num_groups, 0) for count in acked.values())
        for name in NAMES:
            lines = [line for worker in self.everyone if worker.role == name for line in worker.lines]
            assert not [line for line in lines if line.startswith("wrong")]
            uids = [uid for line in lines if line.startswith("acked") for uid in line.split()[1:]]
            num_doubled += len(uids) - len(set(uids))
        pids = {worker.process.pid for worker in self.everyone} | self.servers
        left = [pid for pid in pids if is_running(pid)]
        shared = [address for address in self.addresses if Path(address).exists()]
        line = (
            f"seed {self.chaos.seed}: {len(self.chaos.faults)} faults {self.chaos.counts}, reopened "
            f"{self.num_reopened} times; {len(ledger)} groups of {NUM_SESSIONS} rows issued, acked {acked}, {num_lost} "
            f"lost, {num_doubled} doubled; {len(left)} processes and {len(shared)} folders of shared memory left"
        )
        assert (len(ledger), num_lost, num_doubled, left, shared) == (self.num_groups, 0, 0, [], []), line
        assert set(acked.values()) == {self.num_groups}, line
        assert stats.get("rows", 0) == 0, line
        return line


def run_chaos(seed: int, folder: Path, *, num_faults: int, num_groups: int) -> str:
    """Process all groups of a queue while faults, spread over the acks, hit it; return the summary."""
    clock = Clock(folder / "clock")
    with small_disk(folder / "disk", size_mib=DISK_MIB) as disk, pytest.MonkeyPatch.context() as patch:
        for name, value in clock.environment.items():
            patch.setenv(name, value)
        patch.syspath_prepend(SITE)  # workers and the server inherit the path
        chaos = Chaos(seed, clock=clock, disk=disk)
        run = QueueUnderFaults(folder / "disk" / "queue", num_groups=num_groups, chaos=chaos)
        try:
            while len(chaos.faults) < num_faults:
                acked = run.num_acks()
                share = (3 * num_groups - acked) / (num_faults - len(chaos.faults) + 1)
                wanted = acked + max(1.0, share * chaos.draw.uniform(0.2, 1.4))
                ends_at = time.monotonic() + chaos.draw.uniform(0.1, 1.5)  # often amid recovery from the last fault
                wait_until(
                    lambda wanted=wanted, ends_at=ends_at: run.num_acks() >= wanted or time.monotonic() > ends_at,
                    "a point",
                    deadline_s=2 * DEADLINE_S,
                )
                run.strike()
            chaos.end_all()
            before = -1.0
            while (acked := run.num_acks()) < 3 * num_groups:
                assert acked > before, f"seed {seed}, {chaos.faults}: {run.ask('stats')}"
                before = acked
                wait_until(lambda seen=acked: run.num_acks() > seen, "an ack", deadline_s=2 * DEADLINE_S)
            return run.check()
        finally:
            run.close()


@pytest.mark.one_python("10 random faults; test_queue_kills.py has them one by one")
def test_random_faults_lose_nothing_and_count_nothing_twice(tmp_path: Path, seed: int) -> None:
    print(run_chaos(seed, tmp_path, num_faults=10, num_groups=150))  # noqa: T201


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(10))
def test_transfer_survives_chaos_without_loss(tmp_path: Path, seed: int, turn: int) -> None:
    print(run_chaos(seed + turn, tmp_path, num_faults=100, num_groups=1_500))  # noqa: T201
