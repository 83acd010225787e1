"""The teachers' host: metrics and events since the last call."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest
from fake_gpu import USE, figures

from rl_async_trainer.roles import teachers as teacher_host
from rl_async_trainer.roles.teachers import RunTeachers
from rl_async_trainer.settings import AsyncSettings
from rl_core import InProcessQueue, TaskSpec
from rl_core.gpus import GpuUse
from rl_distill.teacher.scoring import ServiceReport, TeacherReport

SPEED = "perf/teacher_tokens_per_s"


class ScriptedService:
    """Two teachers that scored these numbers of tokens since the last report."""

    def __init__(self, *num_tokens: int) -> None:
        self._num_tokens = list(num_tokens)

    async def start(self) -> None:
        """Start nothing."""

    async def gpu_use(self) -> list[GpuUse]:
        """Return the fake GPU."""
        return [USE]

    def take_report(self) -> ServiceReport:
        """Return the report of both teachers."""
        report = TeacherReport(
            score_s=1.0,
            idle_share=0.5,
            num_trajectories=2,
            num_tokens=self._num_tokens.pop(0),
            num_stored=0,
            num_restarts=0,
        )
        return ServiceReport(waited_s=0.0, teachers={"math": report, "code": report})


def test_the_tokens_of_all_teachers_are_told_by_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_host, "make_teachers", lambda *_, **__: ScriptedService(3000, 0))
    queue = InProcessQueue([TaskSpec(name="train", needs=frozenset({"reward"}))])
    host = RunTeachers(cast(AsyncSettings, None), queue, folder=tmp_path)

    async def ask() -> tuple[dict[str, Any], dict[str, Any], float]:
        began = time.monotonic()
        await host.start()
        first = await host.window()
        took_s = time.monotonic() - began
        return first["metrics"], (await host.window())["metrics"], took_s

    first, second, took_s = asyncio.run(ask())
    assert first[SPEED] >= 6000 / took_s
    assert first["teacher/math/tokens_per_s"] == 3000
    assert second[SPEED] == 0
    assert second.items() >= figures("teacher").items()
