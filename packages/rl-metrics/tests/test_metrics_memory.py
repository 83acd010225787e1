import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.reductions.hardware import MemoryWatch, _all_children, memory_metrics, memory_of


def test_what_linux_says(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 4194304 kB\nMemFree: 1 kB\nMemAvailable: 1048576 kB\nHugePages: 0\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Name:\tpython\nVmRSS:\t  524288 kB\n")
    assert memory_metrics(tmp_path) == {
        "perf/cpu_memory_used_gb": 3.0,
        "perf/cpu_memory_total_gb": 4.0,
        "perf/process_memory_gb": 0.5,
    }


@pytest.mark.parametrize("line", ["MemTotal: 4194304 kB", "MemAvailable: 1048576 kB"])
def test_half_of_what_linux_says_is_no_use_of_memory(tmp_path, line):
    (tmp_path / "meminfo").write_text(f"{line}\n")
    assert memory_metrics(tmp_path) == {}


def test_mapped_files_are_no_memory_of_a_process(tmp_path):
    (tmp_path / "7" / "task").mkdir(parents=True)
    sizes = "VmRSS: 4194304 kB\nRssAnon: 1048576 kB\nRssFile: 2621440 kB\nRssShmem: 524288 kB\n"
    (tmp_path / "7" / "status").write_text(sizes)
    assert memory_of("trainer", pid=7, proc=tmp_path) == {"memory/trainer_gb": 1.5}


def test_without_proc_there_is_nothing(tmp_path):
    assert memory_metrics(tmp_path / "missing") == {}


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_this_process_reports_defined_metrics():
    metrics = memory_metrics()
    assert 0.01 < metrics["perf/process_memory_gb"] < 1000
    for name in metrics:
        DEFINITIONS.lookup(name)


def test_children_are_found_without_the_lists_of_linux_too(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=PIPE) as child:
        listed, found = (set(_all_children(proc, os.getpid())) for proc in (Path("/proc"), tmp_path))
        assert child.pid in listed & found
        child.communicate(b"\n")


def test_children_of_children_are_found_too(tmp_path):
    for parent, child in ((7, "8 9"), (8, "10"), (9, ""), (10, "")):
        (tmp_path / str(parent) / "task" / "1").mkdir(parents=True)
        (tmp_path / str(parent) / "task" / "1" / "children").write_text(child)
    assert sorted(_all_children(tmp_path, 7)) == [8, 9, 10]


def test_a_process_is_measured_apart_from_its_children():
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(2**26); print(); input()"], stdin=PIPE, stdout=PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()  # its memory is allocated now
        metrics = memory_of("trainer")
        assert 0.005 < metrics["memory/trainer_gb"] < 1000
        assert metrics["memory/trainer_children_gb"] >= 2**26 / 2**30
        alone = memory_of("engine", pid=child.pid)
        assert alone.keys() == {"memory/engine_gb"}
        assert alone["memory/engine_gb"] >= 2**26 / 2**30
    finally:
        child.communicate(b"\n")
    assert memory_of("engine", pid=child.pid) == {}


def test_a_watch_measures_when_it_is_due_and_traces_only_if_it_is_asked_to():
    watch = MemoryWatch("trainer", say=lambda *_, **__: None, every=2)
    assert not tracemalloc.is_tracing()
    assert [step for step in range(11, 18) if watch.step(step)] == [11, 13, 15, 17]


def test_kept_objects_are_blocks():
    watch = MemoryWatch("trainer", every=1)
    before = watch.step(1)["memory/trainer_python_blocks"]
    kept = [object() for _ in range(10_000)]
    assert watch.step(2)["memory/trainer_python_blocks"] >= before + len(kept)


def test_a_watch_can_be_off():
    watch = MemoryWatch("trainer", say=lambda *_, **__: None, every=0, is_traced=True)
    assert not tracemalloc.is_tracing()
    assert [watch.step(step) for step in range(3)] == [{}, {}, {}]
    MemoryWatch("trainer", is_traced=True)  # nothing to write lines with
    assert not tracemalloc.is_tracing()


def test_the_lines_that_made_what_is_there():
    said: dict[str, Any] = {}
    watch = MemoryWatch("trainer", say=lambda event, **fields: said.update({event: fields}), is_traced=True)
    try:
        held = [bytes(2**20 + index) for index in range(16)]
        more = dict[str, bytes]()
        exec("\n".join(f"of_{line} = bytes({line})" for line in range(100, 130)), more)
        watch.step(1)
    finally:
        tracemalloc.stop()
    assert (said["memory_lines"]["step"], said["memory_lines"]["role"]) == (1, "trainer")
    first = said["memory_lines"]["lines"][0]
    assert first["line"].startswith(__file__)
    assert first["size_bytes"] >= sum(map(len, held))
    assert len(said["memory_lines"]["lines"]) == 20, "the largest"
    json.dumps(said)
