"""Mutated files of every format that we read: each is read, or refused with one of our errors, in time."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from file_fuzz import MAKERS
from file_mutation import run_cases, watch

SUPPORT = Path(__file__).parent / "support"
CASES = {False: 100_000, True: 1_000}
"""Number of cases for our own parsers, and for readers of other libraries (True)."""

SHORT_CASES = {False: 150, True: 4}
OTHERS = ("safetensors", "tokenizer", "chat_template", "prompts_parquet", "prompts_arrow", "journal")
NOT_SHORT = ("prompts_arrow", "tokenizer", "chat_template", "prompts_parquet")
"""Left out of short runs, because each case starts a process."""


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in NOT_SHORT])
def test_a_short_fuzz_finds_no_fault_in_a_file_format(name, tmp_path, seed, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = signal.getsignal(signal.SIGPROF)
    try:
        watch()
        with structlog.testing.capture_logs():
            (tmp_path / name).mkdir()
            made = MAKERS[name](tmp_path / name)
            assert made.is_others is (name in OTHERS)
            run_cases(name, made, cases=SHORT_CASES[made.is_others], seed=seed)
    finally:
        signal.signal(signal.SIGPROF, before)


@pytest.mark.soak
@pytest.mark.parametrize("name", MAKERS)
def test_the_fuzz_finds_no_fault_in_a_file_format(name, seed):
    cases = CASES[name in OTHERS]
    command = [sys.executable, SUPPORT / "file_fuzz.py", name, str(cases), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=14_000)
    assert done.returncode == 0, done.stderr[-3000:]
