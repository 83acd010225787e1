"""Algorithms by name in both trainers: without staleness, the asynchronous one learns the same bit for bit."""

from pathlib import Path

import pytest
from async_runs import train_async_here
from run_equality import learnt
from tiny_run import TinyRun, copy_tiny_run, make_tiny_run, train_here


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("name", ["ppo", "maxrl", "otb", "dro", "dapo"])
def test_both_trainers_learn_the_same(name: str, inputs: TinyRun, tmp_path: Path) -> None:
    changes = {"algorithm__name": name, "trainer__steps": 2, "trainer__validate_first": False}
    runs = [copy_tiny_run(inputs, tmp_path / trainer) for trainer in ("sync", "async")]
    assert train_here(runs[0], **changes) == 0
    assert train_async_here(runs[1], **changes, schedule__max_staleness=0) == 0
    sync, other = (learnt(run, step=2) for run in runs)
    assert sync
    assert other == sync
