"""The console line on the machine's load, from a fake /proc and nvidia-smi."""

import os

import pytest

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


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that makes a fake nvidia-smi from a shell script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def make(script):
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return make


def test_processors_and_memory(proc, monkeypatch):
    monkeypatch.setenv("PATH", "")
    watch = ResourceWatch(proc=proc)
    assert watch.look() == "memory 4.0/8.0 GiB (run 1.0)"
    (proc / "stat").write_text("cpu  190 0 100 710 100 0 0 0 0 0\n")
    assert watch.look() == f"CPU 90 % of {os.cpu_count()}  memory 4.0/8.0 GiB (run 1.0)"


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ("87, 40960, 81920", "GPU 87 %, 40.0/80 GiB"),
        ("100, 1024, 81920\n50, 1024, 81920", "2 GPUs 75 %, 2.0/160 GiB"),
    ],
)
def test_gpus(proc, nvidia_smi, rows, text):
    nvidia_smi(f"echo '{rows}'")
    assert ResourceWatch(proc=proc).look().endswith(text)


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", "echo '[N/A], [N/A], [N/A]'", "true"])
def test_a_driver_that_does_not_tell_is_not_asked_again(proc, nvidia_smi, script):
    nvidia_smi(script)
    watch = ResourceWatch(proc=proc)
    assert "GPU" not in watch.look()
    nvidia_smi("echo '1, 1, 1'")
    assert "GPU" not in watch.look()
