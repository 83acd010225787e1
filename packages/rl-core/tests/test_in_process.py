"""The in-process queue: the conformance suite, the backend's journal, and specific checks."""

import itertools
import pickle
import threading
import time
from dataclasses import replace

import pytest
from queue_conformance import QueueConformance
from queue_conformance.calls import CallChecks

from rl_core import InProcessQueue, QueueOptions, TaskSpec
from rl_core.errors import DataError, DeadlineError, OutdatedLeaseError, SettingsError
from rl_core.testing import FakeClock, QueueBackendConformance, make_prompts, make_trajectory

TRAIN = TaskSpec(name="train", needs=frozenset({"reward"}))


class TestInProcessQueue(QueueConformance):
    def make_queue(self, tasks, *, options, clock):
        return InProcessQueue(tasks, options=options, clock=clock)


def test_waiting_on_a_clock_that_stands_still_does_not_spin():
    clock = FakeClock()
    queue = InProcessQueue([TRAIN], clock=clock)
    queue.issue(make_prompts(1), num_sessions=1)
    queue.put("p0", 0, [make_trajectory("p0", 0)])
    queue.lease("train", groups=1, lease_s=1e-6)
    before = clock.num_reads
    with pytest.raises(DeadlineError, match=r"for 0\.3 s"):
        queue.lease("train", groups=1, deadline_s=0.3)
    assert clock.num_reads - before < 200  # a busy loop reads it a hundred thousand times


def test_a_result_that_was_acked_already_has_nothing_left_to_do():
    queue = InProcessQueue([TRAIN])
    queue.issue(make_prompts(1), num_sessions=1)
    queue.put("p0", 0, [make_trajectory("p0", 0)])
    lease = queue.lease("train", groups=1, lease_s=60)
    queue.ack(lease)
    with pytest.raises(OutdatedLeaseError, match=r"it was acked\. No action is needed\."):
        queue.ack(lease)


def test_it_cannot_go_to_another_process():
    with pytest.raises(DataError, match="an InProcessQueue cannot be sent to another process"):
        pickle.dumps(InProcessQueue([TRAIN]))


def test_a_lease_that_runs_out_in_real_time_wakes_its_waiter():
    queue = InProcessQueue([TRAIN])
    queue.issue(make_prompts(1), num_sessions=1)
    queue.put("p0", 0, [make_trajectory("p0", 0)])
    queue.lease("train", groups=1, lease_s=0.05)
    started = time.monotonic()
    assert queue.lease("train", groups=1, deadline_s=600).prompts[0].uid == "p0"
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("capacity_rows", [0, -1])
def test_a_queue_needs_room_for_a_row(capacity_rows):
    with pytest.raises(SettingsError, match=rf"capacity_rows .* at least 1 or None; found {capacity_rows}"):
        InProcessQueue([TRAIN], options=QueueOptions(capacity_rows=capacity_rows))


def test_tasks_need_names_of_their_own():
    with pytest.raises(SettingsError, match="task names must be unique"):
        InProcessQueue([TRAIN, TRAIN])


def test_tasks_need_columns_that_something_gives():
    late = TaskSpec(name="late", needs=frozenset({"values"}))
    with pytest.raises(SettingsError, match=r"'late' needs \['values'\]"):
        InProcessQueue([TRAIN, late])
    loop = [
        TaskSpec(name="a", needs=frozenset({"values"}), gives=frozenset({"returns"})),
        TaskSpec(name="b", needs=frozenset({"returns"}), gives=frozenset({"values"})),
    ]
    with pytest.raises(SettingsError, match=r"'a' needs .*'b' needs"):
        InProcessQueue(loop)
    with pytest.raises(DataError, match="unknown column 'reference_logprob'"):
        InProcessQueue([TaskSpec(name="reference", needs=frozenset(), gives=frozenset({"reference_logprob"}))])


@pytest.mark.one_python("it measures an algorithm")
def test_thousands_of_groups_cost_each_put_the_same():
    """Eight times as many groups take about eight times the processor time, not 64 times."""
    few, many = _time_puts(100), _time_puts(800)
    assert many / few < 8 * 4


def _time_puts(num_groups):
    queue = InProcessQueue([TRAIN], options=QueueOptions(capacity_rows=8 * num_groups))
    queue.issue(make_prompts(num_groups), num_sessions=8)
    rows = [(f"p{i}", s, [make_trajectory(f"p{i}", s)]) for i in range(num_groups) for s in range(8)]
    leases = []
    consumer = threading.Thread(target=lambda: leases.append(queue.lease("train", groups=num_groups, deadline_s=60)))
    consumer.start()
    started = time.process_time()
    for row in rows:
        queue.put(*row)
    consumer.join(60)
    spent = time.process_time() - started
    assert len(leases[0].batch) == 8 * num_groups
    return spent


class TestInProcessQueueWithAJournal(QueueBackendConformance, CallChecks):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folders = (tmp_path / str(number) for number in itertools.count())

    def make_queue(self, tasks, *, options, clock):
        return InProcessQueue(tasks, options=replace(options, directory=next(self.folders)), clock=clock)
