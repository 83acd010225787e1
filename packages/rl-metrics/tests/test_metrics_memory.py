import json
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from rl_metrics.memory import MemoryWatch, can_count_objects, count_objects, memory_metrics, memory_of
from rl_metrics.table import DEFINITIONS


def test_what_linux_says(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 4194304 kB\nMemFree: 1 kB\nMemAvailable: 1048576 kB\nHugePages: 0\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Name:\tpython\nVmRSS:\t  524288 kB\n")
    assert memory_metrics(tmp_path) == {
        "perf/cpu_memory_used_gb": 3.0,
        "perf/cpu_memory_total_gb": 4.0,
        "perf/process_memory_gb": 0.5,
    }


def test_without_proc_there_is_nothing(tmp_path):
    assert memory_metrics(tmp_path / "missing") == {}


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_this_process():
    metrics = memory_metrics()
    assert 0.01 < metrics["perf/process_memory_gb"] < 1000
    for name in metrics:
        DEFINITIONS.lookup(name)


def test_a_process_and_its_children():
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(2**26); print(); input()"], stdin=PIPE, stdout=PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()  # it has its memory now
        metrics = memory_of("trainer")
        assert 0.005 < metrics["memory/trainer_gb"] < 1000
        assert metrics["memory/trainer_children_gb"] >= 2**26 / 2**30
        alone = memory_of("engine", pid=child.pid)
        assert alone.keys() == {"memory/engine_gb"}
        assert alone["memory/engine_gb"] >= 2**26 / 2**30
    finally:
        child.communicate(b"\n")
    assert memory_of("engine", pid=child.pid) == {}


def test_objects_are_counted_by_type():
    before = count_objects(10_000).get(f"{__name__}.Leaked", 0)
    held = [Leaked() for _ in range(100)]
    assert count_objects(10_000)[f"{__name__}.Leaked"] == before + len(held)
    assert len(count_objects(3)) == 3


class Leaked:
    """Something that can be counted."""

    def __init__(self) -> None:
        self.more: list[Leaked] = []


def test_a_watch_measures_when_it_is_due():
    said: list[tuple[str, int, str]] = []
    watch = MemoryWatch(
        "trainer", say=lambda event, *, step, role, **_: said.append((event, step, role)), every=2, objects_every=3
    )
    measured = [step for step in range(11, 18) if watch.step(step)]
    assert measured == [11, 13, 15, 17]
    assert said == [("memory_objects", step, "trainer") for step in (11, 14, 17)]


def test_a_watch_can_be_off():
    watch = MemoryWatch("trainer", say=None, every=0)
    assert [watch.step(step) for step in range(3)] == [{}, {}, {}]


def test_the_lines_that_made_what_is_there():
    said: dict[str, Any] = {}
    watch = MemoryWatch("trainer", say=lambda event, **fields: said.update({event: fields}), is_traced=True)
    try:
        held = [bytes(2**20 + index) for index in range(16)]
        watch.step(1)
    finally:
        tracemalloc.stop()
    first = said["memory_lines"]["lines"][0]
    assert first["line"].startswith(__file__)
    assert first["size_bytes"] >= sum(map(len, held))
    json.dumps(said)


def test_objects_are_not_counted_while_another_thread_is_inside_of_torch():
    said, began, ends = [], threading.Event(), threading.Event()

    def compute():
        began.set()
        ends.wait(30)

    def layer():  # a frame that looks like one of torch's, below one that does not
        exec("inside()", {"__name__": "torch.nn.modules", "inside": compute})

    thread = threading.Thread(target=layer)
    watch = MemoryWatch("trainer", say=lambda event, **fields: said.append((event, fields["step"])), objects_every=2)
    thread.start()
    try:
        assert began.wait(30)
        assert not can_count_objects()
        watch.step(1)
    finally:
        ends.set()
        thread.join(30)
    assert can_count_objects()
    for step in (2, 3, 4, 5):
        watch.step(step)
    assert said == [("memory_objects", 2), ("memory_objects", 4)]
