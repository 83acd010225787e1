"""The console line on the machine's load, from a fake /proc and driver."""

import os

import pytest

from rl_core.gpus import DriverReading
from rl_metrics.trackers import console_resources
from rl_metrics.trackers.console_resources import ResourceWatch

MEMINFO = "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n"


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "stat").write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1\n")
    own = tmp_path / str(os.getpid())
    own.mkdir()
    (own / "status").write_text("RssAnon: 1048576 kB\nRssShmem: 0 kB\n")
    return tmp_path


class FakeDriver:
    """A driver with these cards: percent busy, and GiB used and in total."""

    def __init__(self, *cards):
        self._cards = cards

    def read_all(self):
        return [
            DriverReading(utilization=busy / 100, used_bytes=used * 2**30, total_bytes=total * 2**30)
            for busy, used, total in self._cards
        ]


def test_processors_and_memory(proc, monkeypatch):
    monkeypatch.setattr(console_resources, "open_driver", lambda: None)
    watch = ResourceWatch(proc=proc)
    assert watch.look() == "memory 4.0/8.0 GiB (run 1.0)"
    (proc / "stat").write_text("cpu  190 0 100 710 100 0 0 0 0 0\n")
    assert watch.look() == f"CPU 90 % of {os.cpu_count()}  memory 4.0/8.0 GiB (run 1.0)"


@pytest.mark.parametrize(
    ("driver", "text"),
    [
        (FakeDriver((87, 40, 80)), "  GPU 87 %, 40.0/80 GiB"),
        (FakeDriver((100, 1, 80), (50, 1, 80)), "  2 GPUs 75 %, 2.0/160 GiB"),
        (FakeDriver(), ""),
        (None, ""),
    ],
)
def test_gpus(proc, monkeypatch, driver, text):
    monkeypatch.setattr(console_resources, "open_driver", lambda: driver)
    assert ResourceWatch(proc=proc).look() == "memory 4.0/8.0 GiB (run 1.0)" + text
