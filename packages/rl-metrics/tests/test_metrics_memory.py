from pathlib import Path

import pytest

from rl_metrics.memory import memory_metrics
from rl_metrics.table import DEFINITIONS


def test_what_linux_says(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 4194304 kB\nMemFree: 1 kB\nMemAvailable: 1048576 kB\nHugePages: 0\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Name:\tpython\nVmRSS:\t  524288 kB\n")
    assert memory_metrics(tmp_path) == {"perf/cpu_memory_used_gb": 3.0, "perf/process_memory_gb": 0.5}


def test_without_proc_there_is_nothing(tmp_path):
    assert memory_metrics(tmp_path / "missing") == {}


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_this_process():
    metrics = memory_metrics()
    assert 0.01 < metrics["perf/process_memory_gb"] < 1000
    for name in metrics:
        DEFINITIONS.lookup(name)
